"""Uniform draws of the torch engine, made on the host so that CPU and CUDA see the same ones."""

from __future__ import annotations

import torch
from torch import Tensor

INIT_STREAM, SEEDING_STREAM, MINIBATCH_STREAM = range(3)


def generator(seed: int, stream: int) -> torch.Generator:
    """The host's generator of one of the three streams of a seed."""
    # manual_seed of a CPU generator uses 32 bits only: no room to put the stream number beside the seed.
    root = torch.Generator(device="cpu").manual_seed(seed)
    seeds = torch.randint(2**32, (3,), generator=root, device="cpu").tolist()
    return torch.Generator(device="cpu").manual_seed(seeds[stream])


def draw(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """float64 uniforms in [0, 1) whose product with a row count stays below it after rounding."""
    return torch.rand(shape, generator=source, dtype=torch.float64, device="cpu").clamp_(max=1 - 2.0**-32)
