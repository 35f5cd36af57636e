"""What a run was made with: versions, machine, and the commit of the source."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from latent_santa import __version__

PACKAGES = (
    "latent-santa", "torch", "triton", "transformers", "tokenizers", "numpy", "scikit-learn", "bitsandbytes",
    "datasets", "fa3-fwd",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """Versions and machine. They are recorded, and a change is only warned about."""
    import torch

    versions = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {"python": platform.python_version(), "machine": platform.machine(), "git": source(), **versions}


def source() -> str:
    """Commit of the checkout that this code runs from, "-dirty" if it has changes; else the package's version."""
    here = Path(__file__).resolve()
    commands = (("ls-files", "--error-unmatch", here.name), ("describe", "--always", "--dirty", "--abbrev=40"))
    found = ""
    for command in commands:
        try:
            done = subprocess.run(["git", "-C", here.parent, *command], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return __version__
        if done.returncode:
            return __version__
        found = done.stdout.strip()
    return found or __version__
