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
def by_row(x, TALL: tl.constexpr):
    """A vector over rows beside the scores: the scores are ``(rows, heads)`` if TALL, else ``(heads, rows)``."""
    return x[:, None] if TALL else x[None, :]


@triton.jit
def by_head(x, TALL: tl.constexpr):
    """A vector over heads beside the scores."""
    return x[None, :] if TALL else x[:, None]


@triton.jit
def add_products(score, k, q, TALL: tl.constexpr):
    """The scores plus keys ``(rows, dims)`` times queries ``(heads, dims)``."""
    return dot(k, tl.trans(q), score) if TALL else dot(q, tl.trans(k), score)


@triton.jit
def add_values(out, p, v, TALL: tl.constexpr):
    """The outputs, ``(dims, heads)`` if TALL, else ``(heads, dims)``, plus weights times values ``(rows, dims)``."""
    return dot(tl.trans(v), p, out) if TALL else dot(p, v, out)


@triton.jit(do_not_specialize=["E", "visible_b"])
def attend_kernel(
    q0, q1, k0, k1, values, team_of_row, flags, corrections, index, visible, list_rows, list_teams, list_bits,
    part_out, part_max, part_sum, part_rows, scale, q0_b, q0_g, q0_h, q1_b, q1_g, q1_h, k0_b, k0_g, k0_n, k1_b,
    k1_g, k1_n, v_b, v_g, v_n, visible_b, N, E, MP, G, H, CAPACITY, D0: tl.constexpr, D1: tl.constexpr,
    BD0: tl.constexpr, BD1: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, HB: tl.constexpr, BN: tl.constexpr,
    LANES: tl.constexpr, WORDS: tl.constexpr, TALL: tl.constexpr, LATENT: tl.constexpr, TWO: tl.constexpr,
    SPLIT: tl.constexpr, POOLED: tl.constexpr, ALL: tl.constexpr, MASKED: tl.constexpr, DTYPE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
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
    list_bits += mine
    owner = team_of_row + bg.to(tl.int64) * N
    flags += bg.to(tl.int64) * WORDS * MP
    per = tl.cdiv(tl.cdiv(N, RUN), shares) * RUN
    first_rows, first_teams = share_rows(owner, 0, N, per, share, shares, LANES)
    wait(PDL)

    held, union = append_union(
        first_rows, first_teams, owner, flags, list_rows, list_teams, list_bits, N, per, share, shares, MP, h0, HB,
        WORDS, POOLED, ALL, LANES,
    )  # fmt: skip
    total = append_suffix(index, visible, visible_b, list_rows, list_teams, held, E, b, share, shares, MASKED, LANES)
    tl.debug_barrier()

    top = tl.full((HB,), float("-inf"), tl.float32)
    mass = tl.zeros((HB,), tl.float32)
    axis: tl.constexpr = 0 if TALL else 1
    out = tl.zeros((BV, HB) if TALL else (HB, BV), tl.float32)
    zero = tl.zeros((BN, HB) if TALL else (HB, BN), tl.float32)
    for start in tl.range(0, total, BN, num_stages=STAGES):
        slot = start + tl.arange(0, BN)
        ok = slot < total
        row = tl.load(list_rows + slot, mask=ok, other=0)
        team = tl.load(list_teams + slot, mask=ok, other=-1)
        k = load_rows(keys0, row, ok, k0_n, D0, BD0)
        bias = zero
        if not ALL:
            sampled = ok & (team >= 0)
            known = bg.to(tl.int64) * MP + tl.maximum(team, 0)
            if POOLED:
                bias += by_row(tl.load(corrections + known, mask=sampled, other=0.0), TALL)
            else:
                # a head that did not select the row's team has no correction for it, and the row counts for nothing
                bits = tl.load(list_bits + slot, mask=sampled, other=0)
                at = by_row(known, TALL) * H + by_head(head, TALL)
                log_c = tl.load(corrections + at, mask=by_row(sampled, TALL) & by_head(head < H, TALL), other=0.0)
                picked = ((by_row(bits, TALL) >> by_head(tl.arange(0, HB), TALL)) & 1) != 0
                bias = tl.where(by_row(sampled, TALL), tl.where(picked, log_c, float("inf")), 0.0)
        bias = tl.where(by_row(ok, TALL), bias, float("inf"))
        score = add_products(zero, k, qa0, TALL)
        if SPLIT:
            score = add_products(score, k, la0, TALL)
        if TWO:
            r = load_rows(keys1, row, ok, k1_n, D1, BD1)
            score = add_products(score, r, qa1, TALL)
            if SPLIT:
                score = add_products(score, r, la1, TALL)
        v = k if LATENT else load_rows(vals, row, ok, v_n, V, BV)
        score = score * scale - bias
        new = tl.maximum(top, tl.max(score, axis))
        safe = tl.where(new == float("-inf"), 0.0, new)
        old = tl.exp(top - safe)
        p = tl.exp(score - by_head(safe, TALL))
        mass = mass * old + tl.sum(p, axis)
        out = out * by_head(old, TALL)
        if SPLIT:
            high, low = split(p, DTYPE)
            out = add_values(out, high, v, TALL)
            out = add_values(out, low, v, TALL)
        else:
            out = add_values(out, p.to(DTYPE), v, TALL)
        top = new

    real = head < H
    cell = (line0 + head) * shares + share
    tl.store(part_max + cell, top, mask=real)
    tl.store(part_sum + cell, mass, mask=real)
    if total > 0:
        dim = tl.arange(0, BV)
        ok = by_head(real, TALL) & by_row(dim < V, TALL)
        tl.store(part_out + by_head(cell, TALL) * V + by_row(dim, TALL), out, mask=ok)
    if tl.program_id(1) == 0:
        count = part_rows + (bg.to(tl.int64) * shares + share) * 2
        tl.store(count, union)
        tl.store(count + 1, total - held)
