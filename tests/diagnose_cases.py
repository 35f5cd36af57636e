"""What the diagnostics' tests share: a patched tiny model and one recorded prompt of each layout."""

from __future__ import annotations

from functools import cache
from typing import Any

import latent_santa

from .tiny_models import prompt, tiny_model

LENGTH = 43


@cache
def recorded(name: str) -> Any:
    """A handle, and a recording of four calls behind a prompt of `LENGTH` tokens; the model stays patched."""
    santa = latent_santa.patch(tiny_model(name), method="dense", kmeans_engine="sklearn")
    return santa, santa.prefill(prompt(LENGTH)).record(4)
