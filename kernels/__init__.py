"""Triton decode kernels for SANTA++: the drop-in twin of :func:`latent_santa.attention.sampled_attention`.

Importing this package needs neither Triton nor a GPU; ask :func:`unsupported` before calling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .plan import Workspace
from .support import unavailable, unsupported

if TYPE_CHECKING:
    from .operator import sampled_attention

__all__ = ["Workspace", "sampled_attention", "unavailable", "unsupported"]


def __getattr__(name: str) -> Any:
    # the kernels' modules import triton, which a CPU installation may lack
    if name == "sampled_attention":
        from . import operator

        return operator.sampled_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
