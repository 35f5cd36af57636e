"""What a benchmark was run with: device, versions, date, commit and command."""

from __future__ import annotations

import datetime
import platform
import sys
from typing import Any

import torch

from latent_santa.eval.run.environment import environment, source


def facts(device: str, **settings: Any) -> dict[str, Any]:
    """Facts of a run on ``device``, for its file and its table; ``settings`` come last."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"CPU ({platform.machine()})"
    versions = environment()
    return {
        "device": name,
        **{package: versions[package] for package in ("torch", "triton", "transformers") if package in versions},
        "date": datetime.date.today().isoformat(),
        "commit": source(),
        "command": "latent-santa " + " ".join(_what_was_asked(sys.argv[1:])),
        **settings,
    }


def _what_was_asked(arguments: list[str]) -> list[str]:
    """The arguments without ``--out``, which says where a file lies on one machine and nothing about its numbers."""
    pairs = zip(arguments, ["", *arguments], strict=False)
    return [now for now, before in pairs if before != "--out" and now != "--out" and not now.startswith("--out=")]
