"""Block sizes, splits and scratch memory of a call, from its shapes alone: nothing here looks at a device tensor."""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

RUN = 8
# plans kept; prompts of all lengths would otherwise add to them for ever
MOST_PLANS = 4096


def power(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``n`` and ``least``."""
    return max(least, 1 << max(n - 1, 0).bit_length())


@dataclass(frozen=True)
class Shapes:
    """What a plan depends on. ``bits`` are the routing keys' (16: the rows' own dtype), ``split`` says that a float32
    query is fed in two parts, ``shared_memory`` is what one program may use, in bytes. ``suffix`` is rounded up to a
    power of two, so that a growing suffix changes neither plan nor buffers on every step."""

    batch: int
    groups: int
    heads: int
    prompt: int
    suffix: int
    teams: int
    dims: tuple[int, ...]
    values: int
    latent: bool
    dtype: torch.dtype
    split: bool
    bits: int
    teams_per_head: int
    most_rows: int
    processors: int
    shared_memory: int


@dataclass(frozen=True)
class Plan:
    """Block sizes of the launches. Any field may be overridden through :class:`Workspace`.

    Attributes:
        route_teams, route_heads: teams and heads of a routing block, ``route_dims`` dimensions of it at a time.
        block: teams under one stored maximum; ``coarse`` maxima of these are compared with one another, 0 where that is
            impossible.
        attend_rows, attend_heads: rows and heads of an attention tile, in this order if ``attend_tall``; ``shares``
            programs split the rows; ``lanes`` rows are looked at in one go while the list is made.
        combine_values, combine_shares: the tile of partial sums read in one go.
    """

    route_teams: int = 64
    route_heads: int = 16
    route_dims: int = 64
    route_stages: int = 4
    route_warps: int = 4
    block: int = 8
    coarse: int = 0
    select_warps: int = 4
    pool_teams: int = 256
    attend_rows: int = 32
    attend_heads: int = 16
    attend_stages: int = 2
    attend_warps: int = 4
    attend_tall: bool = False
    shares: int = 1
    lanes: int = 1024
    combine_values: int = 64
    combine_shares: int = 32
    combine_warps: int = 4


def route_bytes(s: Shapes, p: Plan) -> int:
    """Shared memory of a routing program, as an upper bound: a piece of keys and of queries a stage and one over."""
    keys = p.route_teams * p.route_dims * s.dtype.itemsize
    queries = p.route_heads * p.route_dims * (4 if s.split else s.dtype.itemsize)
    return (p.route_stages + 1) * (keys + queries)


def attend_bytes(s: Shapes, p: Plan) -> int:
    """Shared memory of an attention program, roughly: a tile of rows, the queries, and room to change layouts."""
    width = sum(power(d, 16) for d in s.dims)
    rows = p.attend_rows * (width + (0 if s.latent else power(s.values, 16)))
    queries = p.attend_heads * width * (2 if s.split else 1)
    # float32 products keep a second copy of their operands
    return int((rows + queries) * s.dtype.itemsize * (1.6 if s.dtype == torch.float32 else 1.1)) + 8192


def fitted(s: Shapes, p: Plan) -> Plan:
    """The plan with blocks made smaller until they fit in the device's shared memory, or are the smallest."""
    while route_bytes(s, p) > s.shared_memory and p.route_stages > 2:
        p = replace(p, route_stages=p.route_stages - 1)
    while route_bytes(s, p) > s.shared_memory and p.route_heads > 16:
        p = replace(p, route_heads=p.route_heads // 2)
    while attend_bytes(s, p) > s.shared_memory and p.attend_rows > 16:
        p = replace(p, attend_rows=p.attend_rows // 2)
    while attend_bytes(s, p) > s.shared_memory and p.attend_heads > 16:
        p = replace(p, attend_heads=p.attend_heads // 2)
    return p


def choose(s: Shapes) -> Plan:
    """The plan for a call, before overrides. Figures are from tuning runs on an H200 (NOTES.md)."""
    wide = s.dims[0] > 256
    heads = power(s.heads)
    exact = s.split or s.dtype == torch.float32
    sequences = s.batch * s.groups
    route_heads = min(max(heads, 8), 64 if exact else 128)
    route_teams = 64 if s.bits == 16 or route_heads > 32 else 128
    if s.dtype == torch.float32:
        route_teams, route_heads = 32, min(route_heads, 32)
    # both lists of the selection are about as long: maxima of blocks, and the scores of the blocks that it looks into
    block = 8
    while block < 32 and padded_teams(s.teams) // block > 24 * candidate_blocks(s.teams_per_head):
        block *= 2
    # as many coarse maxima as blocks that may reach their (K+1)-st: enough of them that it bounds the threshold tightly
    coarse = candidate_blocks(s.teams_per_head)
    if coarse > min(256, padded_teams(s.teams) // block):
        coarse = 0
    tall = heads <= 8
    attend_heads = 8 if tall else min(max(heads, 16), 32)  # selections are read in words of 32 heads
    attend_rows = 64 if wide or sequences < 16 else 32
    if s.dtype == torch.float32:
        attend_rows = 16
    elif wide and s.split:
        attend_rows = 32
    # one program a processor where the rows are few, else as many as stay resident at once
    tiles = -(-(min(s.most_rows, s.prompt) + s.suffix) // attend_rows)
    alone = max(1, s.processors // (sequences * -(-s.heads // attend_heads)))
    most = (3 if sequences >= 16 else 2) * alone if tall else alone if tiles <= alone + alone // 2 else 2 * alone
    shares = max(1, min(2 * tiles, most, 256))
    per = -(-s.prompt // (RUN * shares)) * RUN
    plan = Plan(
        route_teams=route_teams,
        route_heads=route_heads,
        route_stages=3 if route_heads > 32 else 4,
        route_warps=8 if route_heads > 32 and not exact else 4,
        block=block,
        coarse=coarse,
        attend_rows=attend_rows,
        attend_heads=attend_heads,
        attend_warps=8 if wide and heads <= 16 else 4,
        attend_stages=3 if attend_rows == 32 and not wide else 2,
        attend_tall=tall,
        shares=shares,
        lanes=min(power(per, 32), 2048 if tall else 1024),
        combine_values=min(power(s.values, 16), 64),
        combine_shares=min(power(shares), 128),
    )
    return fitted(s, plan)


def candidate_blocks(teams_per_head: int) -> int:
    """Blocks of teams that the selection looks into: about 1.4 K are expected to reach the bound."""
    return power(teams_per_head + 1 + (teams_per_head + 1) // 2, 32)


def candidates(teams_per_head: int) -> int:
    """Scores that are ranked, by comparing all with all: more than blocks, as neighbours are often both large."""
    return max(candidate_blocks(teams_per_head), 128)


@dataclass
class Buffers:
    """Scratch of one call; ``Q`` is B * G and MP the teams padded to whole routing blocks."""

    phi: Tensor
    noisy: Tensor
    tops: Tensor
    flags: Tensor
    corrections: Tensor
    blocks: Tensor
    found: Tensor
    pooled: Tensor
    thresholds: Tensor
    list_rows: Tensor
    list_teams: Tensor
    list_bits: Tensor
    part_out: Tensor
    part_mass: Tensor
    part_rows: Tensor

    def tensors(self) -> list[Tensor]:
        """Every buffer, for tests that poison them."""
        return list(vars(self).values())

    def bytes(self) -> int:
        """Memory held."""
        return sum(t.numel() * t.element_size() for t in self.tensors())


@dataclass
class Workspace:
    """Scratch memory and block sizes, kept between calls of the same shapes.

    One workspace serves any number of layers on one stream, and whatever CUDA graphs were captured with it, as long
    as no two calls run at the same time.

    Attributes:
        overrides: fields of :class:`Plan` to use instead of the chosen ones.
        limit_bytes: beyond it new scratch takes the place of what was used least recently. Scratch that a CUDA graph
            was captured with stays, as the graph goes on using it.
        lock: held while a call is launched.
    """

    overrides: dict[str, Any] = field(default_factory=dict)
    limit_bytes: int = 1 << 30
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _plans: dict[Shapes, Plan] = field(default_factory=dict, repr=False)
    _buffers: dict[tuple[Any, ...], Buffers] = field(default_factory=dict, repr=False)  # in the order of use
    _captured: set[tuple[Any, ...]] = field(default_factory=set, repr=False)

    def plan(self, shapes: Shapes) -> Plan:
        """The plan for these shapes."""
        found = self._plans.get(shapes)
        if found is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            found = self._plans[shapes] = replace(choose(shapes), **self.overrides)
        return found

    def buffers(self, s: Shapes, p: Plan, device: torch.device) -> Buffers:
        """Scratch for these shapes; calls that need the same sizes share it."""
        sizes = buffer_sizes(s, p)
        # keyed by every size: a key that leaves one out hands a call too little memory
        key = (device, *sizes.values())
        found = self._buffers.pop(key, None)
        if found is None:
            self._make_room(sum(dtype.itemsize * math.prod(shape) for dtype, shape in sizes.values()))
            made = {name: torch.empty(shape, dtype=dtype, device=device) for name, (dtype, shape) in sizes.items()}
            found = Buffers(**made)
        self._buffers[key] = found
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured.add(key)
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
        return sum(held.bytes() for held in self._buffers.values())

    def poison(self) -> None:
        """Fill every buffer with NaN or a large integer, for tests: no kernel may read what none wrote."""
        for held in self._buffers.values():
            for t in held.tensors():
                t.fill_(float("nan") if t.is_floating_point() else torch.iinfo(t.dtype).max)


def buffer_sizes(s: Shapes, p: Plan) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of every buffer."""
    q, h, padded, k = s.batch * s.groups, s.heads, padded_teams(s.teams), s.teams_per_head
    lists = (q, -(-h // p.attend_heads), p.shares, list_capacity(s, p))
    real, whole = torch.float32, torch.int32
    return {
        "phi": (real, (q, h, padded)),
        "noisy": (real, (q, h, padded)),
        "tops": (real, (q, h, padded // p.block)),
        "flags": (whole, (q, words(h), padded)),
        "corrections": (real, (q, padded, h)),
        "blocks": (whole, (q, h, candidate_blocks(k))),
        "found": (torch.int64, (q, h, candidates(k))),
        "pooled": (real, (q, padded)),
        "thresholds": (real, (2, q, h)),
        "list_rows": (whole, lists),
        "list_teams": (whole, lists),
        "list_bits": (whole, lists),
        "part_out": (real, (q, h, p.shares, s.values)),
        "part_mass": (real, (2, q, h, p.shares)),
        "part_rows": (whole, (q, p.shares, 2)),
    }


def padded_teams(teams: int) -> int:
    """M rounded up to whole routing blocks of any size."""
    return -(-teams // 128) * 128


def words(heads: int) -> int:
    """32-bit words that hold a bit a head."""
    return -(-heads // 32)


def list_capacity(s: Shapes, p: Plan) -> int:
    """Rows that one share may have to list; a power of two, so that a growing suffix moves to new buffers only now and
    then."""
    return power(-(-s.prompt // (RUN * p.shares)) * RUN + -(-s.suffix // p.shares))


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device; a small number stands for the interpreter."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use."""
    if device.type != "cuda":
        return 1 << 20
    found = torch.cuda.get_device_properties(device)
    # every device from compute capability 8.0 on lets a program ask for 99 KiB
    return int(getattr(found, "shared_memory_per_block_optin", 99 << 10))


@functools.cache
def launches_early(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch (compute capability 9.0)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
