"""One decoding call through the kernels: the twin of :func:`latent_santa.estimator.sampled_attention`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton.language as tl

from latent_santa.routing_keys import RoutingKeys
from latent_santa.step import DecodeStep, Output, Sampling, Suffix

from .attend import attend_kernel
from .combine import combine_kernel
from .draws import INTERPRETED
from .interpreter import let_loops_count
from .plan import (
    Buffers,
    Plan,
    Shapes,
    Workspace,
    candidate_blocks,
    candidates,
    launches_early,
    list_capacity,
    padded_teams,
    power,
    processors,
    shared_memory,
    words,
)
from .pool import pool_kernel
from .route import route_kernel
from .select import select_kernel
from .support import unsupported

if INTERPRETED.value:
    let_loops_count()
ELEMENT = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def sampled_attention(step: DecodeStep, sampling: Sampling, workspace: Workspace | None = None) -> Output:
    """SANTA++ for one decoding call (Algorithm 1), or its pooled form. Four launches, pooled five; no synchronisation.

    A float32 query over 16-bit rows is fed to the tensor cores as two 16-bit parts, and so are the softmax weights,
    so that scores and output keep about float32's precision. A query in the rows' own dtype takes one part each.
    Seed, step and team counts are read on the device: a captured CUDA graph draws anew on each replay after
    ``draw.step`` was advanced in place.

    Args:
        step: the query in float32 or the rows' dtype; rows with a contiguous last dimension and any other strides;
            routing keys in the cache's dtype or in codes (:mod:`latent_santa.routing_keys`).
        sampling: K, estimator and noise.
        workspace: scratch kept between calls; None takes the current stream's own.

    Raises:
        RuntimeError: the kernels cannot take these inputs; the message says why.
    """
    assert step.teams is not None, "this operator samples teams"
    reason = unsupported(step.query, step.rows, step.teams, sampling.k)
    if reason is not None:
        raise RuntimeError(f"the triton backend cannot run: {reason}")
    device = step.rows.values.device
    workspace = default_workspace(device) if workspace is None else workspace
    # Triton launches on the current device; threads on one stream share scratch, and so take turns
    with current(device), workspace.lock:
        call = Call(step, sampling, workspace)
        if not call.everything:
            call.route()
            call.select()
            if call.pooled:
                call.pool()
        call.attend()
        return call.combine()


def current(device: torch.device) -> AbstractContextManager[Any]:
    """The context in which ``device`` is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


_WORKSPACES: dict[tuple[torch.device, int], Workspace] = {}


def default_workspace(device: torch.device) -> Workspace:
    """The workspace of the current stream, whose calls run one after another."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _WORKSPACES.setdefault((device, stream), Workspace())


def _scales(keys: RoutingKeys) -> torch.Tensor:
    """Scales as the route kernel reads them: plain keys have none, and 4 bits take those of two groups as one word."""
    if keys.scales is None:
        return keys.codes
    return keys.scales.contiguous().view(torch.int32) if keys.bits == 4 else keys.scales.contiguous()


class Call:
    """The arguments of one call's launches, each a method."""

    def __init__(self, step: DecodeStep, sampling: Sampling, workspace: Workspace) -> None:
        query, rows, teams, suffix, draw, scale = (
            step.query,
            step.rows,
            step.teams,
            step.suffix,
            step.draw,
            step.scale,
        )
        assert teams is not None
        teams_per_head = sampling.k
        self.query = tuple(part if part.stride(-1) == 1 else part.contiguous() for part in query)
        visible = suffix.visible
        if visible is not None and visible.stride(1) != 1:
            visible = visible.contiguous()
        suffix = Suffix(suffix.index.contiguous(), visible)
        self.rows, self.teams, self.suffix, self.draw = rows, teams, suffix, draw
        self.scale, self.k = scale, teams_per_head
        self.pooled, self.shared = sampling.pooled, sampling.shared
        batch, groups, heads, _ = query[0].shape
        values = rows.values
        device = values.device
        self.latent = len(rows.keys) == 2
        dtype = values.dtype
        routed = teams.routing_keys[0]
        self.shapes = Shapes(
            batch=batch,
            groups=groups,
            heads=heads,
            prompt=teams.length,
            suffix=power(suffix.index.numel(), 64),
            teams=teams.M,
            dims=tuple(part.shape[-1] for part in query),
            values=values.shape[-1],
            latent=self.latent,
            dtype=dtype,
            split=query[0].dtype == torch.float32 and dtype != torch.float32,
            bits=16 if routed.scales is None else routed.bits,
            teams_per_head=teams_per_head,
            most_rows=teams.most_rows(heads * teams_per_head),
            processors=processors(device),
            shared_memory=shared_memory(device),
        )
        # where no sequence can have more than K teams, none is scored (Algorithm 1's first line)
        self.everything = teams.M <= teams_per_head
        self.plan: Plan = workspace.plan(self.shapes)
        self.held: Buffers = workspace.buffers(self.shapes, self.plan, device)
        self.early = launches_early(device)

    def _query_strides(self) -> list[int]:
        first, second = self.query[0], self.query[-1]
        return [*first.stride()[:3], *second.stride()[:3]]

    def _launch(self, warps: int, stages: int | None = None) -> dict[str, Any]:
        options: dict[str, Any] = {"num_warps": warps}
        if stages is not None:
            options["num_stages"] = stages
        if self.early:
            options["launch_pdl"] = True
        return options

    def route(self) -> None:
        """Score the representatives."""
        s, p, held, teams = self.shapes, self.plan, self.held, self.teams
        first, second = teams.routing_keys[0], teams.routing_keys[-1]
        keys, scales = (first.codes, second.codes), (_scales(first), _scales(second))
        options = self._launch(p.route_warps, p.route_stages)
        # the first launch waits for everything before it, so that scratch of the previous call is free
        options.pop("launch_pdl", None)
        pieces = [min(p.route_dims, power(d, 16)) for d in (s.dims[0], s.dims[-1])]
        grid = (-(-s.teams // p.route_teams), -(-s.heads // p.route_heads), s.batch * s.groups)
        route_kernel[grid](
            self.query[0], self.query[-1], *keys, *scales, teams.sizes, teams.count, self.draw.key, self.draw.step,
            held.phi, held.noisy, held.tops, held.flags, self.scale, self.draw.layer, *self._query_strides(),
            *keys[0].stride()[:3], *keys[1].stride()[:3], s.teams, padded_teams(s.teams), s.groups, s.heads,
            words(s.heads), D0=s.dims[0], D1=s.dims[-1], DC0=pieces[0], DC1=pieces[1], T=p.route_teams,
            HB=p.route_heads, TWO=self.latent, SPLIT=s.split, SHARED=self.shared, BITS=s.bits, GROUP0=first.group,
            GROUP1=second.group, BLOCK=p.block, STAGES=p.route_stages, DTYPE=ELEMENT[s.dtype],
            PHI=self.pooled, PDL=self.early, **options,
        )  # fmt: skip

    def select(self) -> None:
        """Find every head's threshold and flag its teams."""
        s, p, held = self.shapes, self.plan, self.held
        padded = padded_teams(s.teams)
        select_kernel[(s.heads, s.batch * s.groups)](
            held.tops, held.noisy, held.flags, held.corrections, self.teams.count, self.draw.key, self.draw.step,
            held.blocks, held.found, held.thresholds[0], held.thresholds[1], self.draw.layer, self.k, padded, s.groups,
            s.heads, words(s.heads), BLOCK=p.block, NT=power(padded // p.block), COARSE=p.coarse,
            NB=candidate_blocks(self.k), ROOM=candidates(self.k), SHARED=self.shared, PDL=self.early,
            **self._launch(p.select_warps),
        )  # fmt: skip

    def pool(self) -> None:
        """One correction a team for all heads (pooled only)."""
        s, p, held = self.shapes, self.plan, self.held
        pool_kernel[(-(-s.teams // p.pool_teams), s.batch * s.groups)](
            held.phi, held.thresholds[0], held.thresholds[1], held.flags, self.teams.count, held.pooled,
            padded_teams(s.teams), s.heads, words(s.heads), T=p.pool_teams, HB=min(power(s.heads), 32),
            SHARED=self.shared, PDL=self.early, **self._launch(4),
        )  # fmt: skip

    def attend(self) -> None:
        """Read the union's rows and the suffix."""
        s, p, held, rows = self.shapes, self.plan, self.held, self.rows
        visible, exact = self.suffix.visible, self.suffix.index.numel()
        mask = self.suffix.index if visible is None else visible.view(torch.int8)
        first, second = rows.keys[0], rows.keys[-1]
        options = self._launch(p.attend_warps, p.attend_stages)
        if self.everything:
            options.pop("launch_pdl", None)
        attend_kernel[(p.shares, -(-s.heads // p.attend_heads), s.batch * s.groups)](
            self.query[0], self.query[-1], first, second, rows.values, self.teams.team_of_row, held.flags,
            held.pooled if self.pooled else held.corrections, self.suffix.index, mask, held.list_rows, held.list_teams,
            held.list_bits, held.part_out, held.part_mass[0], held.part_mass[1], held.part_rows, self.scale,
            *self._query_strides(), *first.stride()[:3], *second.stride()[:3], *rows.values.stride()[:3],
            mask.stride(0), s.prompt, exact, padded_teams(s.teams), s.groups, s.heads, list_capacity(s, p),
            D0=s.dims[0], D1=s.dims[-1], BD0=power(s.dims[0], 16), BD1=power(s.dims[-1], 16), V=s.values,
            BV=power(s.values, 16), HB=p.attend_heads, BN=p.attend_rows, LANES=p.lanes, WORDS=words(s.heads),
            TALL=p.attend_tall, LATENT=self.latent, TWO=self.latent, SPLIT=s.split, POOLED=self.pooled,
            ALL=self.everything, MASKED=visible is not None, DTYPE=ELEMENT[s.dtype], STAGES=p.attend_stages,
            PDL=self.early and not self.everything, **options,
        )  # fmt: skip

    def combine(self) -> Output:
        """Put the shares together."""
        s, p, held = self.shapes, self.plan, self.held
        device = held.phi.device
        out = torch.empty(s.batch, s.groups, s.heads, s.values, dtype=torch.float32, device=device)
        lse = torch.empty(s.batch, s.groups, s.heads, dtype=torch.float32, device=device)
        counts = torch.empty(3, s.batch, s.groups, dtype=torch.int64, device=device)
        blocks = -(-s.values // p.combine_values)
        combine_kernel[(blocks, s.heads, s.batch * s.groups)](
            held.part_out, held.part_mass[0], held.part_mass[1], held.part_rows, self.teams.count, out, lse, counts,
            self.k, p.shares, s.groups, s.heads, s.batch * s.groups, V=s.values, BV=p.combine_values,
            NS=power(p.shares), BS=p.combine_shares, ALL=self.everything, PDL=self.early,
            **self._launch(p.combine_warps),
        )  # fmt: skip
        return Output(out, lse, counts[0], counts[1], counts[2])
