"""Scratch memory and block sizes, kept between the steps of the same shapes."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from latent_santa.integers import ceil_div

from .plan import (
    PIECES,
    RUN,
    Plan,
    Shapes,
    candidate_blocks,
    candidates,
    choose,
    list_capacity,
    mask_words,
    padded_teams,
    power,
    ranked,
    tiles,
)

# plans kept; prompts of all lengths would otherwise add to them forever
MOST_PLANS = 4096
Sizes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
_OWN = threading.local()


@dataclass
class Buffers:
    """Scratch of one step; its shapes are in :func:`buffer_sizes`."""

    phi: Tensor
    noisy: Tensor
    tops: Tensor
    flags: Tensor
    corrections: Tensor
    blocks: Tensor
    found: Tensor
    pooled: Tensor
    tau: Tensor
    kth: Tensor
    parent_phi: Tensor
    parent_noisy: Tensor
    parent_tops: Tensor
    parent_flags: Tensor
    parent_corrections: Tensor
    parent_blocks: Tensor
    parent_found: Tensor
    parent_tau: Tensor
    parent_kth: Tensor
    union: Tensor
    first_team: Tensor
    places: Tensor
    teams_scored: Tensor
    listed_teams: Tensor
    listed_parents: Tensor
    listed_log_c: Tensor
    list_rows: Tensor
    list_teams: Tensor
    list_bits: Tensor
    list_bias: Tensor
    list_run_numbers: Tensor
    piece_rows: Tensor
    piece_teams: Tensor
    piece_counts: Tensor
    part_out: Tensor
    part_max: Tensor
    part_sum: Tensor
    part_rows: Tensor

    def bytes(self) -> int:
        """Memory held."""
        return sum(t.numel() * t.element_size() for t in vars(self).values())


def buffer_sizes(s: Shapes, p: Plan) -> Sizes:
    """Dtype and shape of every buffer; B * G comes first, and teams, parents and places are padded to whole routing
    blocks."""
    q, h, padded = s.batch * s.groups, s.heads, padded_teams(s.teams)
    blocks, pieces = (q, ceil_div(h, p.attend_heads)), p.shares * PIECES if p.many else 0
    lists = (*blocks, p.shares, list_capacity(s, p))
    piece = (*blocks, pieces, list_capacity(s, p, PIECES))
    words, parents, places = mask_words(h), padded_teams(s.parents), padded_teams(s.places)
    listed = places if s.parents else 0
    first = race(q if s.parents else 0, h, parents, s.parents_per_head, p.parent_block, not p.many)
    return {
        **race(q, h, places, s.teams_per_head, p.block, not p.many),
        "flags": (torch.int32, (q, words, padded)),
        "corrections": (torch.float32, (q, padded, h)),
        "pooled": (torch.float32, (q, padded)),
        **{f"parent_{name}": size for name, size in first.items()},
        "parent_flags": (torch.int32, (q, words, parents)),
        "parent_corrections": (torch.float32, (q, parents, h)),
        "union": (torch.int32, (q, parents // 32)),
        "first_team": (torch.int32, (q, parents)),
        "places": (torch.int32, (q,)),
        "teams_scored": (torch.int32, (q, tiles(s, p) if s.parents else 0)),
        "listed_teams": (torch.int32, (q, listed)),
        "listed_parents": (torch.int32, (q, listed)),
        "listed_log_c": (torch.float32, (q, listed)),
        "list_rows": (torch.int32, lists),
        "list_teams": (torch.int32, lists),
        "list_bits": (torch.int32, (0,) if p.many else lists),
        "list_bias": (torch.float32, lists if p.many else (0,)),
        "list_run_numbers": (torch.int32, (*lists[:-1], lists[-1] // RUN) if p.by_runs else (0,)),
        "piece_rows": (torch.int32, piece),
        "piece_teams": (torch.int32, piece),
        "piece_counts": (torch.int32, (*blocks, pieces, 3)),
        "part_out": (torch.float32, (q, h, p.shares, s.values)),
        "part_max": (torch.float32, (q, h, p.shares)),
        "part_sum": (torch.float32, (q, h, p.shares)),
        "part_rows": (torch.int32, (q, p.shares, 2)),
    }


def race(q: int, h: int, places: int, k: int, block: int, phi: bool = True) -> Sizes:
    """Buffers of one Gumbel-top-K over so many scores, of parents or of teams; ``phi``: with room for them without
    noise."""
    return {
        "phi": (torch.float32, (q, h, places if phi else 0)),
        "noisy": (torch.float32, (q, h, places)),
        "tops": (torch.float32, (q, h, places // block)),
        "blocks": (torch.int32, (q, h, candidate_blocks(k) if ranked(k, places // block) else places // block)),
        "found": (torch.int64, (q, h, candidates(k) if ranked(k, places // block) else power(k))),
        "tau": (torch.float32, (q, h)),
        "kth": (torch.float32, (q, h)),
    }


@dataclass
class Workspace:
    """Scratch memory and block sizes, kept between the steps of the same shapes.

    One workspace serves any number of layers on one stream, and whatever CUDA graphs were captured with it, as long
    as no two steps run at the same time.

    Attributes:
        overrides: fields of :class:`Plan` to use instead of the chosen ones.
        limit_bytes: beyond it new scratch takes the place of what was used least recently. Scratch that a CUDA graph
            was captured with stays, because the graph keeps using it.
        lock: held while a step is launched.
    """

    overrides: dict[str, Any] = field(default_factory=dict)
    limit_bytes: int = 1 << 30
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _plans: dict[Shapes, tuple[Plan, Sizes]] = field(default_factory=dict, repr=False)
    _buffers: dict[tuple[Any, ...], Buffers] = field(default_factory=dict, repr=False)  # in the order of use
    _captured: set[tuple[Any, ...]] = field(default_factory=set, repr=False)

    def prepared(self, shapes: Shapes, device: torch.device) -> tuple[Plan, Buffers]:
        """Plan and scratch for these shapes; steps that need the same sizes share the scratch."""
        plan, sizes = self._planned(shapes)
        # keyed by every size: a key that leaves one out hands a step too little memory
        key = (device, *sizes.values())
        found = self._buffers.pop(key, None)
        if found is None:
            self._make_room(sum(dtype.itemsize * math.prod(shape) for dtype, shape in sizes.values()))
            found = Buffers(**{name: torch.empty(s, dtype=dtype, device=device) for name, (dtype, s) in sizes.items()})
        self._buffers[key] = found
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured.add(key)
        return plan, found

    def _planned(self, shapes: Shapes) -> tuple[Plan, Sizes]:
        found = self._plans.get(shapes)
        if found is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = replace(choose(shapes), **self.overrides)
            found = self._plans[shapes] = plan, buffer_sizes(shapes, plan)
        return found

    def _make_room(self, wanted: int) -> None:
        """Let go of what was used least recently, until ``wanted`` bytes more stay within the limit."""
        free = [key for key in self._buffers if key not in self._captured]
        over = wanted + sum(self._buffers[key].bytes() for key in free) - self.limit_bytes
        for key in free:
            if over <= 0:
                break
            over -= self._buffers.pop(key).bytes()

    def bytes(self) -> int:
        """Memory held."""
        return sum(buffers.bytes() for buffers in self._buffers.values())


@contextmanager
def scratch(workspace: Workspace) -> Iterator[None]:
    """Steps of this thread take ``workspace`` while the context is open: a CUDA graph keeps its own."""
    before = own_scratch()
    _OWN.workspace = workspace
    try:
        yield
    finally:
        _OWN.workspace = before


def own_scratch() -> Workspace | None:
    """The workspace of the innermost :func:`scratch` of this thread."""
    found: Workspace | None = getattr(_OWN, "workspace", None)
    return found
