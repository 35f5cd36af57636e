"""Routed experts for the tests of their kernels."""

from __future__ import annotations

import torch


def case(tokens: int, top: int, experts: int, width: int, inner: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens + width)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    states = torch.randn(tokens, width, generator=generator).to(dtype)
    shares, index = torch.rand(tokens, experts, generator=generator).topk(top)
    return states, index, shares, draw(experts, 2 * inner, width), draw(experts, width, inner)
