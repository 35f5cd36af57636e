"""Routing: scores of all representatives for all heads, their noise, and the largest noisy score of a block of teams.

Algorithm 1, lines 3-7. Teams are the rows of the matrix product, heads its columns. The noisy scores are kept; phi of
the few selected teams comes back by drawing their noise again, and only the pooled estimator needs it of others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import half_float, nibbles
from .draws import dot, gumbel_tile, sequence_key, split


@triton.jit
def load_query(q, head, dim, H, D, stride):
    """Queries ``(heads, dims)`` as they are, zero beyond the last head or dimension."""
    return tl.load(q + head[:, None] * stride + dim[None, :], mask=(head < H)[:, None] & (dim < D)[None, :], other=0.0)


@triton.jit
def product(acc, k, q, dtype: tl.constexpr, SPLIT: tl.constexpr):
    """acc ``(T, heads)`` plus keys ``(T, dims)`` times queries ``(heads, dims)``; SPLIT feeds float32 queries as two
    parts of the keys' dtype."""
    if SPLIT:
        high, low = split(q.to(tl.float32), dtype)
        acc = dot(k, tl.trans(high), acc)
        return dot(k, tl.trans(low), acc)
    else:
        return dot(k, tl.trans(q.to(dtype)), acc)


@triton.jit
def add_coded_scores(
    acc, q, keys, scales, team, live, head, H, q_stride, k_stride, D: tl.constexpr, dtype: tl.constexpr,
    SPLIT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """acc ``(T, heads)`` plus the products of one key part in codes, a group of dimensions at a time.

    ``scales`` are float16, in 4 bits a word for two groups.

    Codes are exact in a 16-bit float, so a group's scale multiplies its sum of products instead of its dimensions.
    """
    T: tl.constexpr = acc.shape[0]
    HB: tl.constexpr = acc.shape[1]
    # a matrix product has at least 16 dimensions; a shorter group is padded with queries of zero
    DC: tl.constexpr = GROUP if GROUP > 16 else 16
    row = team.to(tl.int64) * k_stride
    dim = tl.arange(0, DC)
    ok = live[:, None] & (dim < GROUP)[None, :]
    zero = tl.zeros((T, HB), tl.float32)
    if BITS == 4:
        for pair in tl.range(0, D // GROUP // 2, num_stages=STAGES):
            d = pair * GROUP
            c = tl.load(keys + row[:, None] + (d + dim)[None, :], mask=ok, other=0)
            # two float16 scales in one word, so that the load can be issued stages ahead
            s = tl.load(scales + team * (D // GROUP // 2) + pair, mask=live, other=0)
            low, high = nibbles(c, dtype)
            asked = load_query(q + 2 * d, head, dim, H, GROUP, q_stride)
            acc += product(zero, low, asked, dtype, SPLIT) * half_float(s)[:, None]
            asked = load_query(q + 2 * d + GROUP, head, dim, H, GROUP, q_stride)
            acc += product(zero, high, asked, dtype, SPLIT) * half_float(s >> 16)[:, None]
    else:
        for group in tl.range(0, D // GROUP, num_stages=STAGES):
            d = group * GROUP
            c = tl.load(keys + row[:, None] + (d + dim)[None, :], mask=ok, other=0)
            s = tl.load(scales + team * (D // GROUP) + group, mask=live, other=0.0).to(tl.float32)
            asked = load_query(q + d, head, dim, H, GROUP, q_stride)
            acc += product(zero, c.to(dtype), asked, dtype, SPLIT) * s[:, None]
    return acc


@triton.jit
def add_scores(
    acc, q, keys, scales, team, live, head, H, q_stride, k_stride, D: tl.constexpr, DC: tl.constexpr,
    dtype: tl.constexpr, SPLIT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """acc ``(T, heads)`` plus one key part's products, DC dimensions at a time (in codes: a group at a time)."""
    if BITS < 16:
        return add_coded_scores(
            acc, q, keys, scales, team, live, head, H, q_stride, k_stride, D, dtype, SPLIT, BITS, GROUP, STAGES
        )  # fmt: skip
    else:
        row = team.to(tl.int64) * k_stride
        for d in tl.range(0, D, DC, num_stages=STAGES):
            dim = d + tl.arange(0, DC)
            k = tl.load(keys + row[:, None] + dim[None, :], mask=live[:, None] & (dim < D)[None, :], other=0)
            acc = product(acc, k, load_query(q, head, dim, H, D, q_stride), dtype, SPLIT)
        return acc


@triton.jit(do_not_specialize=["layer"])
def route_kernel(
    q0, q1, k0, k1, s0, s1, sizes, count, key, step, phi, noisy, tops, flags, scale, layer, q0_b, q0_g, q0_h, q1_b,
    q1_g, q1_h, k0_b, k0_g, k0_m, k1_b, k1_g, k1_m, M, MP, G, H, WORDS, D0: tl.constexpr, D1: tl.constexpr,
    DC0: tl.constexpr, DC1: tl.constexpr, T: tl.constexpr, HB: tl.constexpr, TWO: tl.constexpr, SPLIT: tl.constexpr,
    SHARED: tl.constexpr, BITS: tl.constexpr, GROUP0: tl.constexpr, GROUP1: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, DTYPE: tl.constexpr, PHI: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, head block, sequence * G + group) scores the teams i T .. i T + T - 1.

    Writes ``noisy (B G, H, MP)``, if PHI the same without noise to ``phi``, and ``tops (B G, H, MP / BLOCK)``; clears
    ``flags (B G, words, MP)``. All in the blocks that hold a real team; nothing beyond them is read later.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    bg = tl.program_id(2)
    b, g = bg // G, bg % G
    n = tl.load(count + bg)
    tile = tl.program_id(0)
    if tile * T < n:
        h0 = tl.program_id(1) * HB
        head = h0 + tl.arange(0, HB)
        team = tile * T + tl.arange(0, T)
        live = team < n
        first = bg.to(tl.int64) * M
        seed = sequence_key(key, b)
        now = tl.load(step + b)
        size = tl.load(sizes + first + team, mask=live, other=0)
        query0 = q0 + b.to(tl.int64) * q0_b + g.to(tl.int64) * q0_g
        query1 = q1 + b.to(tl.int64) * q1_b + g.to(tl.int64) * q1_g
        keys0 = k0 + b.to(tl.int64) * k0_b + g.to(tl.int64) * k0_g
        keys1 = k1 + b.to(tl.int64) * k1_b + g.to(tl.int64) * k1_g
        # two 4-bit groups have one word of scales
        scales0 = s0 + first * (D0 // GROUP0 // (2 if BITS == 4 else 1))
        scales1 = s1 + first * (D1 // GROUP1 // (2 if BITS == 4 else 1))
        acc = tl.zeros((T, HB), tl.float32)
        if TWO and BITS == 16 and DC1 >= D1:
            # the short part is asked for first and used last, so that its way from memory is hidden
            dim = tl.arange(0, DC1)
            short = tl.load(
                keys1 + team.to(tl.int64)[:, None] * k1_m + dim[None, :],
                mask=live[:, None] & (dim < D1)[None, :], other=0,
            )  # fmt: skip
            asked = load_query(query1, head, dim, H, D1, q1_h)
            acc = add_scores(
                acc, query0, keys0, scales0, team, live, head, H, q0_h, k0_m, D0, DC0, DTYPE, SPLIT,
                BITS, GROUP0, STAGES,
            )  # fmt: skip
            acc = product(acc, short, asked, DTYPE, SPLIT)
        else:
            acc = add_scores(
                acc, query0, keys0, scales0, team, live, head, H, q0_h, k0_m, D0, DC0, DTYPE, SPLIT,
                BITS, GROUP0, STAGES,
            )  # fmt: skip
            if TWO:
                acc = add_scores(
                    acc, query1, keys1, scales1, team, live, head, H, q1_h, k1_m, D1, DC1, DTYPE,
                    SPLIT, BITS, GROUP1, STAGES,
                )  # fmt: skip
        score = acc * scale + tl.log(tl.maximum(size, 1).to(tl.float32))[:, None]
        score = tl.where((size > 0)[:, None], score, float("-inf"))
        value = score + gumbel_tile(seed, team, g, h0, now, layer, HB, SHARED)
        line = bg.to(tl.int64) * H + head
        ok = (head < H)[None, :]
        tl.store(noisy + line[None, :] * MP + team[:, None], value, mask=ok)
        if PHI:
            tl.store(phi + line[None, :] * MP + team[:, None], score, mask=ok)
        top = tl.max(tl.reshape(value, (T // BLOCK, BLOCK, HB)), 1)
        place = tile * (T // BLOCK) + tl.arange(0, T // BLOCK)
        tl.store(tops + line[None, :] * (MP // BLOCK) + place[:, None], top, mask=ok)
        if tl.program_id(1) == 0:
            for word in range(WORDS):
                tl.store(flags + (bg.to(tl.int64) * WORDS + word) * MP + team, tl.zeros((T,), tl.int32))
