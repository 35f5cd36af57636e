"""References of the small kernels around attention in a decoding step."""

from __future__ import annotations

from typing import Any

import torch


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, angles: Any) -> torch.Tensor:
    """``x (..., R)`` rotated, its numbers before and after as ``angles`` says."""
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if angles.pairs_in else (x[..., :half], x[..., half:])
    found = first * cos - second * sin, second * cos + first * sin
    return torch.stack(found, -1).flatten(-2) if angles.pairs_out else torch.cat(found, -1)
