"""Block sizes and splits of a step's launches, from its shapes alone: nothing here looks at a device tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from latent_santa.integers import ceil_div

RUN = 8  # neighbouring rows that stay in one share: a 32-byte sector of their team numbers
PIECES = 4  # lists that one share's rows come from, where a launch of its own makes them


def power(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``n`` and ``least``."""
    return max(least, 1 << max(n - 1, 0).bit_length())


class Shapes(NamedTuple):
    """What a plan depends on; a tuple, because it is made and looked up on every step.

    Attributes:
        suffix: suffix rows, rounded up to a power of two, so that a growing suffix changes neither plan nor buffers on
            every step.
        teams: M.
        dims: dimensions of each query part; ``values`` those of the values.
        latent: two key parts, of which the first is the value too (MLA).
        split: a float32 query over 16-bit rows is fed in two parts.
        bits: of the routing keys; 16 for the rows' own dtype.
        teams_per_head: K, or K2 of two stages, at most the number of places.
        most_rows: an upper bound on the prompt rows of a union.
        shared_memory: what one program may use, in bytes.
        joint: one cache has the rows, this process all heads of a group, and they read much the same rows: pooled, or
            with one draw for all. Else the plan is never for many heads.
        parents: C of two stages, 0 in one; ``parents_per_head`` is K1, and ``most_teams`` the most of any one parent.
    """

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
    joint: bool = False
    parents: int = 0
    parents_per_head: int = 0
    most_teams: int = 0

    @property
    def places(self) -> int:
        """Where scores of teams stand: one place each, or in two stages as many for every parent that may be sampled
        as any parent has teams."""
        if not self.parents:
            return self.teams
        return min(self.parents, self.heads * self.parents_per_head) * power(self.most_teams)


@dataclass(frozen=True)
class Plan:
    """Block sizes of the launches. Any field may be overridden through :class:`Workspace`.

    Attributes:
        route_teams, route_heads: teams and heads of a routing block, ``route_dims`` dimensions of it at a time; of keys
            in codes ``route_programs`` score a sequence's blocks in turn, with at most ``route_registers`` per thread
            unless that is 0.
        block: teams under one stored maximum; ``coarse`` maxima of these are compared with one another, 0 where that is
            impossible. ``parent_block`` and ``parent_coarse`` are the same of parents.
        parent_stages, prepare_lanes: stages of the parents' scores, and teams made ready in one go.
        attend_rows, attend_heads: rows and heads of an attention tile, in this order if ``attend_tall``; ``shares``
            programs split the rows; ``lanes`` rows are looked at in one go while the list is made, which ``by_runs``
            lists runs first.
        many: the launches for groups of many heads: row lists by a launch of their own, and no score kept that the
            noise gives back.
        combine_values, combine_shares: the tile of partial sums read in one go.
    """

    route_teams: int = 64
    route_heads: int = 16
    route_dims: int = 64
    route_programs: int = 0
    route_registers: int = 0
    route_stages: int = 4
    route_warps: int = 4
    block: int = 8
    coarse: int = 0
    parent_block: int = 8
    parent_coarse: int = 0
    parent_stages: int = 4
    prepare_lanes: int = 512
    select_warps: int = 4
    select_many_warps: int = 16
    select_lanes: int = 2048
    pool_teams: int = 256
    attend_rows: int = 32
    attend_heads: int = 16
    attend_stages: int = 2
    attend_warps: int = 4
    attend_tall: bool = False
    many: bool = False
    shares: int = 1
    lanes: int = 1024
    by_runs: bool = False
    list_lanes: int = 1024
    list_warps: int = 4
    combine_values: int = 64
    combine_shares: int = 32
    combine_warps: int = 4


def route_bytes(s: Shapes, p: Plan) -> int:
    """Shared memory of a routing program, as an upper bound: keys and queries of every stage, and of one over; of keys
    in codes whole keys of every stage (4-bit ones go through registers and need one less), and queries once."""
    if s.bits < 16:
        width, stages = sum(s.dims), p.route_stages - (s.bits == 4)
        return stages * p.route_teams * (width * s.bits // 8 + 64) + 2 * p.route_heads * width + 4096
    keys = p.route_teams * p.route_dims * s.dtype.itemsize
    queries = p.route_heads * p.route_dims * (4 if s.split else s.dtype.itemsize)
    return (p.route_stages + 1) * (keys + queries)


def attend_bytes(s: Shapes, p: Plan) -> int:
    """Shared memory of an attention program, roughly: a tile of rows, the queries, and room to change layouts."""
    width = sum(power(d, 16) for d in s.dims)
    if p.many:  # tensor cores read all operands from shared memory
        return (p.attend_heads + p.attend_stages * p.attend_rows) * width * s.dtype.itemsize + 8192
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
    while s.bits < 16 and route_bytes(s, p) > s.shared_memory and p.route_teams > 16:
        p = replace(p, route_teams=p.route_teams // 2)
    while attend_bytes(s, p) > s.shared_memory and p.attend_rows > 16:
        p = replace(p, attend_rows=p.attend_rows // 2)
    while attend_bytes(s, p) > s.shared_memory and p.attend_heads > 16:
        p = replace(p, attend_heads=p.attend_heads // 2)
    return p


def choose(s: Shapes) -> Plan:
    """The plan for a step, before overrides. Figures are from tuning runs on an H200 (NOTES.md)."""
    wide = s.dims[0] > 256
    heads = power(s.heads)
    exact = s.split or s.dtype == torch.float32
    sequences = s.batch * s.groups
    route_heads = min(max(heads, 8), 64 if exact else 128)
    route_teams = 64
    if s.bits < 16:
        # narrow 4-bit keys leave a tile of 64 little to read
        crowded = ceil_div(s.places, 64) * sequences >= 8 * s.processors
        route_teams, route_heads = 128 if s.bits == 4 and not wide and crowded else 64, min(route_heads, 32)
    elif s.dtype == torch.float32:
        route_teams, route_heads = 32, min(route_heads, 32)
    block, coarse = maxima(s.places, s.teams_per_head)
    parent_block, parent_coarse = maxima(s.parents, s.parents_per_head)
    blocks = sequences * ceil_div(s.heads, route_heads)
    while (
        0 < s.parents
        and route_teams > max(16, block, parent_block)
        and (ceil_div(min(s.parents, s.places), route_teams) * blocks < s.processors)
    ):
        route_teams //= 2
    tall = heads <= 8
    many = heads > 32 and s.latent and s.joint and not exact and s.shared_memory >= 200 << 10
    # selections are read in words of 32 heads
    attend_heads = 8 if tall else 64 if many else min(max(heads, 16), 32)
    attend_rows = 32 if many else 64 if wide or sequences < 16 else 32
    if s.dtype == torch.float32:
        attend_rows = 16
    elif wide and s.split:
        attend_rows = 32
    shares = _shares(s, attend_rows, sequences * ceil_div(s.heads, attend_heads), tall, many)
    per_share = ceil_div(s.prompt, RUN * shares) * RUN
    lanes = min(power(per_share, 32), 2048 if tall else 1024)
    plan = Plan(
        route_teams=route_teams,
        route_heads=route_heads,
        # the compiler takes 173 unasked, and two programs of that many leave room for no third
        route_registers=168 if s.bits == 4 and wide and route_heads <= 16 else 0,
        route_stages={8: 2, 4: 3}.get(s.bits, 3 if route_heads > 32 else 4),
        route_warps=8 if route_heads > 32 and not exact else 4,
        block=block,
        coarse=coarse,
        parent_block=parent_block,
        parent_coarse=parent_coarse,
        attend_rows=attend_rows,
        attend_heads=attend_heads,
        attend_warps=8 if many or (wide and heads <= 16) else 4,
        attend_stages=3 if attend_rows == 32 and not wide else 2,
        attend_tall=tall or many,
        many=many,
        pool_teams=32 if many else 256,
        shares=shares,
        lanes=lanes,
        # where rows are many and few runs of them have a selected one (more heads: not timed)
        by_runs=tall and per_share >= 2 * lanes and s.most_rows * RUN <= s.prompt,
        prepare_lanes=1024 if tall else 512,
        # a tile of many heads' sums is 16 KB, of others' up to 32
        combine_values=min(power(s.values, 16), max(64, 4096 // power(shares)) if many else 64),
        combine_shares=min(power(shares), 64 if many else 128),
    )
    plan = fitted(s, plan)
    plan = replace(plan, parent_stages=min(plan.route_stages, 3) if tall else plan.route_stages)
    return replace(plan, route_programs=_coded_programs(s, plan)) if s.bits < 16 else plan


def _coded_programs(s: Shapes, p: Plan) -> int:
    """Programs that share the tiles of a sequence: as many as stay resident at once, with the same number of tiles
    each."""
    registers = 3 if p.route_registers or p.route_teams == 128 else 2 if s.dims[0] > 256 else 8
    resident = max(1, min(s.shared_memory // route_bytes(s, p), registers))
    most = max(1, resident * s.processors // (s.batch * s.groups * ceil_div(s.heads, p.route_heads)))
    return ceil_div(tiles(s, p), ceil_div(tiles(s, p), most))


def maxima(places: int, k: int) -> tuple[int, int]:
    """The selection's ``block`` and ``coarse`` for K of so many scores."""
    # both lists of the selection are about as long: maxima of blocks, and the scores of the blocks that it looks into
    block = 8
    while block < 32 and padded_teams(places) // block > 24 * candidate_blocks(k):
        block *= 2
    # as many coarse maxima as blocks that may reach their (K+1)-st: enough of them that it bounds the threshold tightly
    coarse = candidate_blocks(k)
    return block, coarse if coarse <= min(256, padded_teams(places) // block) else 0


def _shares(s: Shapes, attend_rows: int, programs: int, tall: bool, many: bool) -> int:
    """Programs that split the rows of one of the ``programs`` (sequence, group, head block): one per processor in all
    where the rows are few, else as many as stay resident at once."""
    tiles = ceil_div(min(s.most_rows, s.prompt) + s.suffix, attend_rows)
    alone = max(1, s.processors // programs)
    if tall:
        resident = 3 if s.batch * s.groups >= 16 else 2
    elif many:
        resident = 1
    else:
        resident = 1 if tiles <= alone + alone // 2 else 2
    return max(1, min(2 * tiles, resident * alone, 256))


def candidate_blocks(teams_per_head: int) -> int:
    """Blocks of teams that the selection looks into: about 1.4 K are expected to reach the bound."""
    return power(teams_per_head + 1 + (teams_per_head + 1) // 2, 32)


def candidates(teams_per_head: int) -> int:
    """Scores that are ranked, by comparing all with all: more than blocks, as neighbours are often both large."""
    return max(candidate_blocks(teams_per_head), 128)


def ranked(k: int, blocks: int) -> bool:
    """Whether K are selected by comparing all candidates with all (`select.py`): the comparison of 1,024 takes a
    minute to compile, and no program holds more than 8,192 block maxima."""
    return candidates(k) <= 512 and blocks <= 8192


def ranking_warps(p: Plan, k: int) -> int:
    """Warps of a selection by ranks: 256 or 512 candidates do not fit the registers of four."""
    return p.select_warps if candidates(k) <= 128 else max(p.select_warps, candidates(k) // 32)


def padded_teams(teams: int) -> int:
    """M rounded up to whole routing blocks of any size."""
    return ceil_div(teams, 128) * 128


def tiles(s: Shapes, p: Plan) -> int:
    """Routing blocks of the places."""
    return ceil_div(s.places, p.route_teams)


def mask_words(heads: int) -> int:
    """32-bit words that hold one bit per head."""
    return ceil_div(heads, 32)


def list_capacity(s: Shapes, p: Plan, pieces: int = 1) -> int:
    """Rows that one piece of a share's list may have to hold; a power of two, so that a growing suffix moves to new
    buffers only now and then."""
    lists = p.shares * pieces
    return power(ceil_div(s.prompt, RUN * lists) * RUN + ceil_div(s.suffix, lists))
