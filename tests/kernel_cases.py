"""Decoding steps for the kernels' tests: odd sizes, caches that are views of larger buffers, any device and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from latent_santa.estimator import sampled_attention as torch_attention
from latent_santa.kernels import Workspace, sampled_attention
from latent_santa.noise import noise_keys
from latent_santa.parent_records import summarised
from latent_santa.parents import contiguous_parents
from latent_santa.routing_keys import quantise_parts
from latent_santa.rows import Rows
from latent_santa.step import DecodeStep, Draw, Output, Sampling, Suffix

from .cases import frozen_teams

# small blocks, so that small cases have several of everything
SMALL: dict[str, Any] = {
    "route_teams": 16, "attend_rows": 16, "lanes": 64,
    "shares": 3, "combine_shares": 2,
}  # fmt: skip


def kernels(
    step: DecodeStep,
    k: int,
    workspace: Workspace,
    estimator: str = "per_head",
    noise: str = "independent",
    parents: int | None = None,
) -> Output:
    """The step through the kernels."""
    return sampled_attention(step, Sampling(k, estimator, noise, parents), workspace)


def twin(
    step: DecodeStep, k: int, estimator: str = "per_head", noise: str = "independent", parents: int | None = None
) -> Output:
    """PyTorch's operator on a float32 query: the same numbers, without 16-bit rounding on the way."""
    step = replace(step, query=tuple(part.float() for part in step.query))
    return torch_attention(step, Sampling(k, estimator, noise, parents))


def poisoned(
    step: DecodeStep,
    k: int,
    over: dict[str, Any],
    estimator: str = "per_head",
    noise: str = "independent",
    parents: int | None = None,
) -> Workspace:
    """A workspace whose buffers for this step are allocated and full of NaN."""
    from latent_santa.kernels.launch import launches_of

    workspace = Workspace(over)
    launches_of(step, Sampling(k, estimator, noise, parents), workspace)
    poison(workspace)
    return workspace


def poison(workspace: Workspace) -> None:
    """Fill every buffer with NaN or a large integer: no kernel may read what none wrote."""
    for buffers in workspace._buffers.values():
        for t in vars(buffers).values():
            t.fill_(float("nan") if t.is_floating_point() else torch.iinfo(t.dtype).max)


def make_step(
    layout: str = "mla",
    heads: int = 4,
    groups: int = 1,
    lengths: Sequence[int] = (150,),
    suffix: int = 5,
    hidden: int = 0,
    dims: tuple[int, ...] = (32, 16),
    values: int | None = None,
    dtype: torch.dtype = torch.float32,
    query_dtype: torch.dtype = torch.float32,
    parent_size: int = 16,
    representatives: int = 4,
    routing_dtype: str = "model",
    device: str = "cpu",
    scale: float = 0.3,
    seed: int = 0,
    spare: int = 7,
    summary: str | None = None,
) -> DecodeStep:
    """Draw a step. ``hidden`` leading suffix rows of every sequence but the first are padding. Padding rows of the
    prompt hold a large number, and the ``spare`` rows that the cache's buffer has room for hold NaN. With a ``summary``
    the teams carry their parents' records, for two stages."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    batch, prompt = len(lengths), max(lengths)
    real = torch.arange(prompt, device=device) >= prompt - torch.tensor(lengths, device=device)[:, None]

    def buffer(width: int) -> Tensor:
        whole = normal(batch, groups, prompt + suffix + spare, width).to(dtype)
        whole[:, :, prompt + suffix :] = float("nan")
        whole[:, :, :prompt].masked_fill_(~real[:, None, :, None], 30.0)
        return whole[:, :, : prompt + suffix]

    keys = tuple(buffer(d) for d in (dims if layout == "mla" else dims[:1]))
    rows = Rows(keys, keys[0] if layout == "mla" else buffer(values or dims[0]))
    before = Rows(tuple(part[:, :, :prompt] for part in keys), rows.values[:, :, :prompt])
    points = before.keys[0].float().masked_fill(~real[:, None, :, None], 0.0)
    parents = contiguous_parents(real, parent_size).expand(-1, groups, -1)
    teams = frozen_teams(before, points, parents, representatives)
    teams = replace(teams, routing_keys=quantise_parts(teams.routing_keys, routing_dtype, teams.sizes > 0))
    if summary is not None:
        records = summarised(teams, parents, before, summary)
        coded = quantise_parts(records.keys, routing_dtype, records.sizes > 0)
        teams = replace(teams, parents=replace(records, keys=coded))
    visible = None
    if hidden:
        visible = torch.ones(batch, suffix, dtype=torch.bool, device=device)
        visible[1:, :hidden] = False
    exact = Suffix(torch.arange(prompt, prompt + suffix, device=device), visible)
    key = noise_keys(seed + 17, [5 * b + 2 for b in range(batch)], device)
    query = tuple(normal(batch, groups, heads, part.shape[-1]).to(query_dtype) for part in keys)
    draw = Draw(key, real.sum(-1) + exact.counts(batch), 3)
    return DecodeStep(query, rows, teams, exact, draw, scale)


def compare(got: Output, want: Output, tolerance: float) -> None:
    """Outputs agree relative to the output's norm, log masses absolutely, row counts exactly."""
    for name in ("routing", "union", "suffix"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.out.dtype == got.lse.dtype == torch.float32
    assert got.out.shape == want.out.shape and got.lse.shape == want.lse.shape
    error = (got.out - want.out).norm(dim=-1) / want.out.norm(dim=-1)
    assert bool((error <= tolerance).all()), f"relative error {float(error.max()):.2e} above {tolerance:.0e}"
    gap = (got.lse - want.lse).abs().max()
    assert bool(gap <= 2 * tolerance + 2e-5), f"log mass differs by {float(gap):.2e}"


# float32 sums in another order
ROUNDING = 2e-5


def check(
    step: DecodeStep,
    k: int,
    estimator: str = "per_head",
    noise: str = "independent",
    parents: int | None = None,
    **over: Any,
) -> None:
    """Equal to the twin, from scratch memory full of NaN."""
    workspace = poisoned(step, k, {**SMALL, **over}, estimator, noise, parents)
    got = kernels(step, k, workspace, estimator, noise, parents)
    compare(got, twin(step, k, estimator, noise, parents), ROUNDING)
