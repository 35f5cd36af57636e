"""Attention over the union's rows and the suffix, read from the cache by row number; split over the rows.

Algorithm 1, lines 10-18. A row's bias is minus its team's log correction: per head where the head selected the team,
or one for all heads of the group (pooled).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .draws import dot, split, wait
from .rowlist import RUN, append_suffix, append_union, share_rows


@triton.jit
def load_query(q, head, H, D: tl.constexpr, BD: tl.constexpr, stride, dtype: tl.constexpr, SPLIT: tl.constexpr):
    """Queries ``(heads, dims)`` as one part of the rows' dtype, or as two whose sum is the float32 query."""
    dim = tl.arange(0, BD)
    x = tl.load(q + head[:, None] * stride + dim[None, :], mask=(head < H)[:, None] & (dim < D)[None, :], other=0.0)
    if SPLIT:
        return split(x.to(tl.float32), dtype)
    high = x.to(dtype)
    return high, high


@triton.jit
def load_rows(base, row, ok, stride, D: tl.constexpr, BD: tl.constexpr):
    """Cache rows ``(rows, dims)``, zero where not ``ok``."""
    dim = tl.arange(0, BD)
    mask = ok[:, None]
    if D < BD:
        mask = mask & (dim < D)[None, :]
    return tl.load(base + row.to(tl.int64)[:, None] * stride + dim[None, :], mask=mask, other=0.0)


@triton.jit
def head_bits(flags, team, ok, h0, MP, HB: tl.constexpr):
    """Whether the heads from ``h0`` selected the rows' teams, ``(heads, rows)``; no block of heads straddles words."""
    bits = tl.load(flags + (h0 // 32) * MP + team, mask=ok, other=0)
    return ((bits[None, :] >> (h0 % 32 + tl.arange(0, HB))[:, None]) & 1) != 0


@triton.jit(do_not_specialize=["E", "visible_b"])
def attend_kernel(
    q0, q1, k0, k1, values, team_of_row, flags, corrections, index, visible, list_rows, list_teams,
    part_out, part_max, part_sum, part_rows, scale, q0_b, q0_g, q0_h, q1_b, q1_g, q1_h, k0_b, k0_g, k0_n, k1_b,
    k1_g, k1_n, v_b, v_g, v_n, visible_b, N, E, MP, G, H, CAPACITY, D0: tl.constexpr, D1: tl.constexpr,
    BD0: tl.constexpr, BD1: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, HB: tl.constexpr, BN: tl.constexpr,
    LANES: tl.constexpr, WORDS: tl.constexpr, LATENT: tl.constexpr, TWO: tl.constexpr, SPLIT: tl.constexpr,
    POOLED: tl.constexpr, ALL: tl.constexpr, MASKED: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (share, head block, sequence * G + group). ``corrections`` are a head's own, or the pooled ones.

    Writes ``part_max, part_sum (B G, H, shares)`` and, where it had rows, ``part_out (B G, H, shares, V)``, the sum of
    values under exp(score - part_max); ``part_rows (B G, shares, 2)``, union and suffix rows. The lists are scratch.
    """
    share, shares = tl.program_id(0), tl.num_programs(0)
    bg = tl.program_id(2)
    b, g = bg // G, bg % G
    h0 = tl.program_id(1) * HB
    head = h0 + tl.arange(0, HB)
    qa0, la0 = load_query(
        q0 + b.to(tl.int64) * q0_b + g.to(tl.int64) * q0_g, head, H, D0, BD0, q0_h, DTYPE, SPLIT
    )  # fmt: skip
    qa1, la1 = load_query(
        q1 + b.to(tl.int64) * q1_b + g.to(tl.int64) * q1_g, head, H, D1, BD1, q1_h, DTYPE, SPLIT
    )  # fmt: skip
    keys0 = k0 + b.to(tl.int64) * k0_b + g.to(tl.int64) * k0_g
    keys1 = k1 + b.to(tl.int64) * k1_b + g.to(tl.int64) * k1_g
    vals = values + b.to(tl.int64) * v_b + g.to(tl.int64) * v_g
    line0 = bg.to(tl.int64) * H
    mine = ((bg.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * shares + share) * CAPACITY
    list_rows += mine
    list_teams += mine
    owner = team_of_row + bg.to(tl.int64) * N
    flags += bg.to(tl.int64) * WORDS * MP
    per = tl.cdiv(tl.cdiv(N, RUN), shares) * RUN
    first_rows, first_teams = share_rows(owner, 0, N, per, share, shares, LANES)
    wait(PDL)

    union = append_union(
        first_rows, first_teams, owner, flags, list_rows, list_teams, N, per, share, shares, MP, WORDS, ALL, LANES
    )  # fmt: skip
    total = append_suffix(
        index, visible, visible_b, list_rows, list_teams, union, E, b, share, shares, MASKED, LANES
    )  # fmt: skip
    tl.debug_barrier()

    top = tl.full((HB,), float("-inf"), tl.float32)
    mass = tl.zeros((HB,), tl.float32)
    out = tl.zeros((HB, BV), tl.float32)
    for start in tl.range(0, total, BN, num_stages=STAGES):
        slot = start + tl.arange(0, BN)
        ok = slot < total
        row = tl.load(list_rows + slot, mask=ok, other=0)
        team = tl.load(list_teams + slot, mask=ok, other=-1)
        k = load_rows(keys0, row, ok, k0_n, D0, BD0)
        bias = tl.zeros((HB, BN), tl.float32)
        if not ALL:
            sampled = ok & (team >= 0)
            known = tl.maximum(team, 0)
            if POOLED:
                log_c = tl.load(corrections + bg.to(tl.int64) * MP + known, mask=sampled, other=0.0)
                bias = log_c[None, :] + bias
            else:
                # log corrections exist where the head selected the team; elsewhere its rows count for nothing
                picked = head_bits(flags, known, sampled, h0, MP, HB)
                at = (line0 + head)[:, None] * MP + known[None, :]
                log_c = tl.load(corrections + at, mask=picked, other=float("inf"))
                bias = tl.where(sampled[None, :], log_c, 0.0)
        bias = tl.where(ok[None, :], bias, float("inf"))
        score = dot(qa0, tl.trans(k), tl.zeros((HB, BN), tl.float32))
        if SPLIT:
            score = dot(la0, tl.trans(k), score)
        if TWO:
            r = load_rows(keys1, row, ok, k1_n, D1, BD1)
            score = dot(qa1, tl.trans(r), score)
            if SPLIT:
                score = dot(la1, tl.trans(r), score)
        v = k if LATENT else load_rows(vals, row, ok, v_n, V, BV)
        score = score * scale - bias
        new = tl.maximum(top, tl.max(score, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        old = tl.exp(top - safe)
        p = tl.exp(score - safe[:, None])
        mass = mass * old + tl.sum(p, 1)
        out = out * old[:, None]
        if SPLIT:
            high, low = split(p, DTYPE)
            out = dot(high, v, out)
            out = dot(low, v, out)
        else:
            out = dot(p.to(DTYPE), v, out)
        top = new

    real = head < H
    cell = (line0 + head) * shares + share
    tl.store(part_max + cell, top, mask=real)
    tl.store(part_sum + cell, mass, mask=real)
    if total > 0:
        dim = tl.arange(0, BV)
        tl.store(part_out + cell[:, None] * V + dim[None, :], out, mask=real[:, None] & (dim < V)[None, :])
    if tl.program_id(1) == 0:
        count = part_rows + (bg.to(tl.int64) * shares + share) * 2
        tl.store(count, union)
        tl.store(count + 1, total - union)
