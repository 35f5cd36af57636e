"""What the kernels leave to PyTorch where processes share a group's heads: the union, and the pooled correction."""

from __future__ import annotations

import torch
from torch import Tensor

from latent_santa.sampling import pooled_correction
from latent_santa.step import DecodeStep, Sampling

from .workspace import Buffers


def union_rows(step: DecodeStep, buffers: Buffers) -> Tensor:
    """Rows in the teams that any head of any process selected, ``(B, G)`` int64; every process must ask."""
    assert step.teams is not None and step.peers is not None
    sizes = step.teams.sizes
    marked = (buffers.flags != 0).any(1).view(step.batch, step.groups, -1)[..., : step.teams.M]
    # beyond a sequence's last team the marks mean nothing
    return (sizes * step.peers.any(marked & (sizes > 0))).sum(-1)


def pool(step: DecodeStep, sampling: Sampling, buffers: Buffers) -> None:
    """In place of ``pool_kernel``: the correction over all processes' heads, and the union's marks for the row list."""
    assert step.teams is not None
    shape = (step.batch, step.groups)
    real = (step.teams.sizes > 0)[:, :, None]
    head = torch.arange(step.heads, device=real.device)
    word = buffers.flags.view(*shape, -1, buffers.flags.shape[-1])[..., : step.teams.M]
    selected = (((word[:, :, head // 32] >> (head % 32)[:, None]) & 1) != 0) & real
    phi = buffers.phi.view(*shape, step.heads, -1)[..., : step.teams.M].masked_fill(~real, -torch.inf)
    tau, kth = (part.view(*shape, step.heads, 1) for part in (buffers.tau, buffers.kth))
    union, log_c = pooled_correction(phi, selected, tau, kth, sampling.shared, step.peers)
    buffers.pooled.view(*shape, -1)[..., : step.teams.M] = log_c[:, :, 0]
    word[:, :, 0] |= union.int()
