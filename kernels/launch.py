"""The launches of one decoding step, four of them or pooled five: each gets its arguments by keyword."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from latent_santa.integers import ceil_div
from latent_santa.noise import GROUP_STRIDE
from latent_santa.step import DecodeStep, Output, Sampling

from . import launch_many
from .attend import attend_kernel
from .combine import combine_kernel
from .device import launches_early, processors, shared_memory
from .plan import (
    Shapes,
    candidate_blocks,
    candidates,
    mask_words,
    padded_teams,
    power,
    ranked,
    ranking_warps,
)
from .pool import pool_kernel
from .route import route_kernel
from .scoring import ELEMENT, route_coded, scoring
from .select import TEAMS, select_kernel
from .select_many import select_many_kernel
from .support import two_stages
from .together import pool, union_rows
from .workspace import Workspace, own_scratch


def run(step: DecodeStep, sampling: Sampling, workspace: Workspace | None = None) -> Output:
    """:func:`latent_santa.kernels.sampled_attention` for a step that :func:`~.support.reason_not` has let through."""
    device = step.rows.values.device
    workspace = default_workspace(device) if workspace is None else workspace
    # Triton launches on the current device; threads on one stream share scratch, and so take turns
    with current(device), workspace.lock:
        launches = launches_of(step, sampling, workspace)
        for launch in launches.routing().values():
            launch()
        launches.attend()
        output = launches.combine()
        if step.peers is None or sampling.pooled or launches.everything:
            return output
        return replace(output, union=union_rows(step, launches.buffers))


def launches_of(step: DecodeStep, sampling: Sampling, workspace: Workspace) -> Launches:
    """The launches of a step, in two stages where K1 leaves parents out."""
    if two_stages(step, sampling):
        from .launch_two_stage import TwoStageLaunches

        return TwoStageLaunches(step, sampling, workspace)
    return Launches(step, sampling, workspace)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """The context in which ``device`` is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


_WORKSPACES: dict[tuple[torch.device, int], Workspace] = {}


def default_workspace(device: torch.device) -> Workspace:
    """The workspace of :func:`~.workspace.scratch`, or of the current stream, whose steps run one after another."""
    own = own_scratch()
    if own is not None:
        return own
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found = _WORKSPACES.get((device, stream))
    return _WORKSPACES.setdefault((device, stream), Workspace()) if found is None else found


class Launches:
    """One step's arguments, and a method for each launch.

    Attributes:
        keeps_phi: scores without noise are kept for the pooled correction; else it draws the noise again.
        everything: no sequence can have more than K teams, so none is scored (Algorithm 1, lines 3-5).
    """

    two_stage = False

    def __init__(self, step: DecodeStep, sampling: Sampling, workspace: Workspace) -> None:
        assert step.teams is not None, "the kernels sample teams"
        self.step, self.sampling, self.teams = step, sampling, step.teams
        self.query = tuple(_rows_apart(part) for part in step.query)
        self.index = step.suffix.index.contiguous()
        visible = step.suffix.visible
        self.visible = None if visible is None else _rows_apart(visible)
        values, routed = step.rows.values, step.teams.routing_keys[0]
        device = values.device
        self.shapes = Shapes(
            batch=step.batch,
            groups=step.groups,
            heads=step.heads,
            prompt=step.teams.length,
            suffix=power(max(self.index.numel(), step.suffix.room), 64),
            teams=step.teams.M,
            dims=tuple(part.shape[-1] for part in step.query),
            values=values.shape[-1],
            latent=len(step.rows.keys) == 2,
            dtype=values.dtype,
            split=step.query[0].dtype == torch.float32 and values.dtype != torch.float32,
            bits=16 if routed.scales is None else routed.bits,
            teams_per_head=sampling.k,
            most_rows=step.teams.most_rows((step.all_heads if sampling.pooled else step.heads) * sampling.k),
            joint=step.peers is None and (sampling.pooled or sampling.shared),
            processors=processors(device),
            shared_memory=shared_memory(device),
            **self._parent_shapes(),
        )
        self.shapes = self.shapes._replace(teams_per_head=min(sampling.k, self.shapes.places))
        self.everything = not self.two_stage and step.teams.M <= sampling.k
        group, head = step.draw.first
        self.quad = group * GROUP_STRIDE + (0 if sampling.shared else head // 4)
        self.plan, self.buffers = workspace.prepared(self.shapes, device)
        self.keeps_phi = sampling.pooled and not self.plan.many
        self.early = launches_early(device)

    def options(self, warps: int, first: bool = False) -> dict[str, Any]:
        """Launch options. The first launch waits for everything before it, so that scratch of the step before is free;
        the others may start early."""
        return {"num_warps": warps, "launch_pdl": True} if self.early and not first else {"num_warps": warps}

    def _parent_shapes(self) -> dict[str, int]:
        """What :class:`Shapes` takes of the parents."""
        return {}

    def routing(self) -> dict[str, Callable[[], None]]:
        """The launches before :meth:`attend`, by name and in order."""
        if self.everything:
            return {}
        after: dict[str, Callable[[], None]] = {"pool": self.pool} if self.sampling.pooled else {}
        if self.plan.many:
            after = {"list": lambda: launch_many.list_rows(self)}
        return {"route": self.route, "select": self.select, **after}

    def route(self) -> None:
        """Lines 7-8: score the representatives and add noise."""
        if self.shapes.bits < 16:
            return route_coded(self)
        s, p, b, teams = self.shapes, self.plan, self.buffers, self.teams
        padded, nothing = padded_teams(s.teams), b.union
        route_kernel[(ceil_div(s.teams, p.route_teams), ceil_div(s.heads, p.route_heads), s.batch * s.groups)](
            **scoring(self, teams.routing_keys),
            SPLIT=s.split,
            DTYPE=ELEMENT[s.dtype],
            spread0=nothing,
            spread1=nothing,
            sizes=teams.sizes,
            count=teams.count,
            phi=b.phi,
            noisy=b.noisy,
            tops=b.tops,
            flags=b.flags,
            union=nothing,
            layer=self.step.draw.layer,
            spread0_strides=(0, 0, 0),
            spread1_strides=(0, 0, 0),
            M=s.teams,
            MP=padded,
            BLOCK=p.block,
            PHI=self.keeps_phi,
            PARENTS=False,
            SPREAD="mean",
            **self.options(p.route_warps, first=True),
        )

    def _selecting(self, places: int, k: int, block: int, coarse: int) -> dict[str, Any]:
        """Arguments of :meth:`_select` that selects K of so many scores."""
        s, p, draw = self.shapes, self.plan, self.step.draw
        blocks, warps = padded_teams(places) // block, ranking_warps(p, k)
        if ranked(k, blocks):
            sizes = {"NT": power(blocks), "COARSE": coarse, "NB": candidate_blocks(k), "ROOM": candidates(k)}
        else:
            sizes = {"ROOM": power(k), "LANES": min(power(max(blocks, k)), p.select_lanes)}
            warps = p.select_many_warps
        return {
            "key": draw.key,
            "step": draw.step,
            "quad": self.quad,
            "K": k,
            "PLACES": padded_teams(places),
            "G": s.groups,
            "H": s.heads,
            "WORDS": mask_words(s.heads),
            "BLOCK": block,
            **sizes,
            "POOLED": self.sampling.pooled,
            "SHARED": self.sampling.shared,
            "PREPARE": p.prepare_lanes,
            "PDL": self.early,
            **self.options(warps),
        }

    def _select(self, **arguments: Any) -> None:
        s = self.shapes
        kernel = select_kernel if "NT" in arguments else select_many_kernel
        kernel[(s.heads, s.batch * s.groups)](**arguments)

    def select(self) -> None:
        """Lines 9-11: find every head's threshold, flag its teams and write their corrections."""
        s, p, b = self.shapes, self.plan, self.buffers
        nothing = b.union
        self._select(
            **self._selecting(s.teams, s.teams_per_head, p.block, p.coarse),
            tops=b.tops,
            noisy=b.noisy,
            flags=b.flags,
            union=nothing,
            corrections=b.corrections,
            count=self.teams.count,
            listed_teams=nothing,
            listed_parents=nothing,
            parent_log_c=nothing,
            of_team=nothing,
            first_team=nothing,
            team_flags=nothing,
            blocks=b.blocks,
            found=b.found,
            tau=b.tau,
            kth=b.kth,
            layer=self.step.draw.layer,
            MP=padded_teams(s.teams),
            CP=0,
            TEAMS=0,
            TEAMS_PADDED=0,
            OF=TEAMS,
        )

    def pool(self) -> None:
        """One correction per team for all heads (pooled only)."""
        if self.step.peers is not None:
            return pool(self.step, self.sampling, self.buffers)
        s, p, b = self.shapes, self.plan, self.buffers
        pool_kernel[(ceil_div(s.places, p.pool_teams), s.batch * s.groups)](
            phi=b.phi,
            tau=b.tau,
            kth=b.kth,
            flags=b.flags,
            count=b.places if self.two_stage else self.teams.count,
            listed_teams=b.listed_teams,
            listed_log_c=b.listed_log_c,
            pooled=b.pooled,
            PLACES=padded_teams(s.places),
            MP=padded_teams(s.teams),
            H=s.heads,
            WORDS=mask_words(s.heads),
            T=p.pool_teams,
            HB=min(power(s.heads), 32),
            LISTED=self.two_stage,
            SHARED=self.sampling.shared,
            PDL=self.early,
            **self.options(4),
        )

    def listing(self) -> dict[str, Any]:
        """Arguments of a launch that lists rows."""
        s, b = self.shapes, self.buffers
        # without a mask any tensor does: it is not read
        visible = self.index if self.visible is None else self.visible.view(torch.int8)
        return {
            "team_of_row": self.teams.team_of_row,
            "flags": b.flags,
            "index": self.index,
            "visible": visible,
            "visible_stride": visible.stride(0),
            "piece_rows": b.piece_rows,
            "piece_teams": b.piece_teams,
            "piece_counts": b.piece_counts,
            "N": s.prompt,
            "E": self.index.numel(),
            "MP": padded_teams(s.teams),
            "G": s.groups,
            "WORDS": mask_words(s.heads),
            "POOLED": self.sampling.pooled,
            "MASKED": self.visible is not None,
            "PDL": self.early and not self.everything,
        }

    def attend(self) -> None:
        """Lines 13-18: read the rows of the union and of the suffix."""
        s, p, b, rows = self.shapes, self.plan, self.buffers, self.step.rows
        first, second = rows.keys[0], rows.keys[-1]
        attend_kernel[(p.shares, ceil_div(s.heads, p.attend_heads), s.batch * s.groups)](
            **self.listing(),
            query0=self.query[0],
            query1=self.query[-1],
            keys0=first,
            keys1=second,
            values=rows.values,
            corrections=b.pooled if self.sampling.pooled else b.corrections,
            list_rows=b.list_rows,
            list_teams=b.list_teams,
            list_bits=b.list_bits,
            list_bias=b.list_bias,
            list_run_numbers=b.list_run_numbers,
            part_out=b.part_out,
            part_max=b.part_max,
            part_sum=b.part_sum,
            part_rows=b.part_rows,
            scale=self.step.scale,
            query0_strides=self.query[0].stride()[:3],
            query1_strides=self.query[-1].stride()[:3],
            keys0_strides=first.stride()[:3],
            keys1_strides=second.stride()[:3],
            values_strides=rows.values.stride()[:3],
            H=s.heads,
            CAPACITY=b.list_rows.shape[-1],
            PIECE_CAPACITY=b.piece_rows.shape[-1],
            D0=s.dims[0],
            D1=s.dims[-1],
            BD0=power(s.dims[0], 16),
            BD1=power(s.dims[-1], 16),
            V=s.values,
            BV=power(s.values, 16),
            HB=p.attend_heads,
            BN=p.attend_rows,
            LANES=p.lanes,
            TALL=p.attend_tall,
            LATENT=s.latent,
            SPLIT=s.split,
            ALL=self.everything,
            LISTED=p.many and not self.everything,
            DTYPE=ELEMENT[s.dtype],
            STAGES=p.attend_stages,
            BY_RUNS=p.by_runs,
            num_stages=p.attend_stages,
            **self.options(p.attend_warps, first=self.everything),
        )

    def combine(self) -> Output:
        """Line 19: put the shares together."""
        s, p, b, device = self.shapes, self.plan, self.buffers, self.buffers.phi.device
        out = torch.empty(s.batch, s.groups, s.heads, s.values, dtype=torch.float32, device=device)
        lse = torch.empty(s.batch, s.groups, s.heads, dtype=torch.float32, device=device)
        counts = torch.empty(3, s.batch, s.groups, dtype=torch.int64, device=device)
        combine_kernel[(ceil_div(s.values, p.combine_values), s.heads, s.batch * s.groups)](
            part_out=b.part_out,
            part_max=b.part_max,
            part_sum=b.part_sum,
            part_rows=b.part_rows,
            **self._counting(),
            out=out,
            lse=lse,
            counts=counts,
            shares=p.shares,
            G=s.groups,
            H=s.heads,
            GROUPS=s.batch * s.groups,
            V=s.values,
            BV=p.combine_values,
            NS=power(p.shares),
            BS=p.combine_shares,
            TWO=self.two_stage,
            ALL=self.everything,
            PDL=self.early,
            **self.options(p.combine_warps),
        )
        return Output(out, lse, counts[0], counts[1], counts[2])

    def _counting(self) -> dict[str, Any]:
        """Arguments of what routing has scored."""
        nothing = self.buffers.teams_scored
        return {
            "count": self.teams.count, "K": self.sampling.k, "VECTORS": 1, "teams_scored": nothing, "TILES": 0, "K2": 0
        }  # fmt: skip


def _rows_apart(part: Tensor) -> Tensor:
    """The tensor, copied if its last dimension is not contiguous."""
    return part if part.stride(-1) == 1 else part.contiguous()
