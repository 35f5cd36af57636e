"""Routing: scores of all representatives for all heads, their noise, and the largest noisy score of every 4 teams.

Algorithm 1, lines 3-7. Each program walks blocks of teams of one sequence and group. Teams are the rows of the matrix
product, heads its columns. phi is kept, the noise is not: it is cheaper to draw again than to read back.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .draws import dot, gumbel_tile, sequence_key, split

BLOCK = tl.constexpr(4)  # teams under one stored maximum


@triton.jit
def query_tile(q, head, dim, H, D, stride, dtype: tl.constexpr, SPLIT: tl.constexpr):
    """Queries ``(dims, heads)`` as one part of the rows' dtype, or as two whose sum is the float32 query."""
    ok = (head < H)[:, None] & (dim < D)[None, :]
    x = tl.trans(tl.load(q + head[:, None] * stride + dim[None, :], mask=ok, other=0.0))
    if SPLIT:
        return split(x.to(tl.float32), dtype)
    high = x.to(dtype)
    return high, high


@triton.jit
def dequantised(codes, scales, offset, group, live, dtype: tl.constexpr, GROUP: tl.constexpr):
    """Codes ``(T, D)`` as integers times their scales, rounded to the rows' dtype."""
    T: tl.constexpr = codes.shape[0]
    D: tl.constexpr = codes.shape[1]
    s = tl.load(scales + offset[:, None] + group[None, :], mask=live, other=0.0).to(tl.float32)
    x = tl.reshape(codes.to(tl.float32), (T, D // GROUP, GROUP)) * tl.expand_dims(s, 2)
    return tl.reshape(x, (T, D)).to(dtype)


@triton.jit
def add_scores(
    acc, keys, scales, team, live, stride, D: tl.constexpr, BD: tl.constexpr, qa, la, qb, lb, dtype: tl.constexpr,
    SPLIT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """acc ``(T, heads)`` plus one key part's products; ``qb, lb`` are the second half of the dimensions (4 bits)."""
    row = team.to(tl.int64) * stride
    at = team.to(tl.int64) * (D // GROUP)
    if BITS == 4:
        half: tl.constexpr = D // 2
        groups: tl.constexpr = half // GROUP
        dim = tl.arange(0, BD // 2)
        group = tl.arange(0, BD // 2 // GROUP)
        ok = live[:, None] & (group < groups)[None, :]
        c = tl.load(keys + row[:, None] + dim[None, :], mask=live[:, None] & (dim < half)[None, :], other=0)
        low = dequantised((c & 15).to(tl.int32) - 8, scales, at, group, ok, dtype, GROUP)
        high = dequantised((c >> 4).to(tl.int32) - 8, scales, at + groups, group, ok, dtype, GROUP)
        acc = dot(low, qa, acc)
        acc = dot(high, qb, acc)
        if SPLIT:
            acc = dot(low, la, acc)
            acc = dot(high, lb, acc)
    else:
        dim = tl.arange(0, BD)
        k = tl.load(keys + row[:, None] + dim[None, :], mask=live[:, None] & (dim < D)[None, :], other=0)
        if BITS == 8:
            group = tl.arange(0, BD // GROUP)
            ok = live[:, None] & (group < D // GROUP)[None, :]
            k = dequantised(k, scales, at, group, ok, dtype, GROUP)
        acc = dot(k, qa, acc)
        if SPLIT:
            acc = dot(k, la, acc)
    return acc


@triton.jit
def route_kernel(
    q0, q1, k0, k1, s0, s1, sizes, count, key, step, phi, tops, flags, scale, layer, q0_b, q0_g, q0_h, q1_b, q1_g, q1_h,
    k0_b, k0_g, k0_m, k1_b, k1_g, k1_m, M, MP, G, H, WORDS, D0: tl.constexpr, D1: tl.constexpr, BD0: tl.constexpr,
    BD1: tl.constexpr, T: tl.constexpr, HB: tl.constexpr, TWO: tl.constexpr, SPLIT: tl.constexpr, SHARED: tl.constexpr,
    BITS: tl.constexpr, GROUP0: tl.constexpr, GROUP1: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, head block, sequence * G + group) scores the team blocks i, i + programs, ... of T teams.

    Writes ``phi (B G, H, MP)``, ``tops (B G, H, MP / 4)`` and clears ``flags (B G, words, MP)``, in the blocks that hold a
    real team; nothing beyond them is read later.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    bg = tl.program_id(2)
    b, g = bg // G, bg % G
    h0 = tl.program_id(1) * HB
    head = h0 + tl.arange(0, HB)
    at0 = q0 + b.to(tl.int64) * q0_b + g.to(tl.int64) * q0_g
    at1 = q1 + b.to(tl.int64) * q1_b + g.to(tl.int64) * q1_g
    keys0 = k0 + b.to(tl.int64) * k0_b + g.to(tl.int64) * k0_g
    keys1 = k1 + b.to(tl.int64) * k1_b + g.to(tl.int64) * k1_g
    first = bg.to(tl.int64) * M
    if BITS == 4:
        half0: tl.constexpr = BD0 // 2
        half1: tl.constexpr = BD1 // 2
        low0, low1 = tl.arange(0, half0), tl.arange(0, half1)
        qa0, la0 = query_tile(at0, head, low0, H, D0 // 2, q0_h, DTYPE, SPLIT)
        qb0, lb0 = query_tile(at0 + D0 // 2, head, low0, H, D0 // 2, q0_h, DTYPE, SPLIT)
        qa1, la1 = query_tile(at1, head, low1, H, D1 // 2, q1_h, DTYPE, SPLIT)
        qb1, lb1 = query_tile(at1 + D1 // 2, head, low1, H, D1 // 2, q1_h, DTYPE, SPLIT)
    else:
        qa0, la0 = query_tile(at0, head, tl.arange(0, BD0), H, D0, q0_h, DTYPE, SPLIT)
        qa1, la1 = query_tile(at1, head, tl.arange(0, BD1), H, D1, q1_h, DTYPE, SPLIT)
        qb0, lb0, qb1, lb1 = qa0, la0, qa1, la1
    n = tl.load(count + bg)
    seed = sequence_key(key, b)
    now = tl.load(step + b)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n, T), tl.num_programs(0), num_stages=STAGES):
        team = tile * T + tl.arange(0, T)
        live = team < n
        size = tl.load(sizes + first + team, mask=live, other=0)
        noise = gumbel_tile(seed, team, g, h0, now, layer, HB, SHARED)  # while the keys are on their way
        acc = tl.zeros((T, HB), tl.float32)
        acc = add_scores(
            acc, keys0, s0 + first * (D0 // GROUP0), team, live, k0_m, D0, BD0, qa0, la0, qb0, lb0, DTYPE, SPLIT, BITS,
            GROUP0,
        )  # fmt: skip
        if TWO:
            acc = add_scores(
                acc, keys1, s1 + first * (D1 // GROUP1), team, live, k1_m, D1, BD1, qa1, la1, qb1, lb1, DTYPE, SPLIT,
                BITS, GROUP1,
            )  # fmt: skip
        score = acc * scale + tl.log(tl.maximum(size, 1).to(tl.float32))[:, None]
        score = tl.where((size > 0)[:, None], score, float("-inf"))
        noisy = score + noise
        line = bg.to(tl.int64) * H + head
        ok = (head < H)[None, :]
        tl.store(phi + line[None, :] * MP + team[:, None], score, mask=ok)
        top = tl.max(tl.reshape(noisy, (T // BLOCK, BLOCK, HB)), 1)
        place = tile * (T // BLOCK) + tl.arange(0, T // BLOCK)
        tl.store(tops + line[None, :] * (MP // BLOCK) + place[:, None], top, mask=ok)
        if tl.program_id(1) == 0:
            for word in range(WORDS):
                tl.store(flags + (bg.to(tl.int64) * WORDS + word) * MP + team, tl.zeros((T,), tl.int32))
