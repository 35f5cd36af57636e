"""Routing by keys in integer codes: the same scores as in route.py, from products of 8-bit integers.

The query is coded too, with one scale a head and part (:func:`latent_santa.quantise.coded_query`), so that tensor cores
take the codes as they are; a group's scale multiplies its sum of products. A program codes its queries once and scores
many tiles of teams.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import half_float, nibbles, rounded
from .draws import sequence_key
from .route import keep_scores, load_query


@triton.jit
def largest(q, head, H, D: tl.constexpr, stride, HB: tl.constexpr):
    """The largest magnitude of each head's query part ``(heads,)``, and nothing so small that 127 over it overflows."""
    DC: tl.constexpr = 64
    top = tl.zeros((HB, DC), tl.float32)
    for d in tl.static_range(0, D, DC):
        part = load_query(q, head, d + tl.arange(0, DC), H, D, stride)
        top = tl.maximum(top, tl.abs(part.to(tl.float32)))
    return tl.maximum(tl.max(top, 1), 1e-30)


@triton.jit
def coded_query(q, head, H, D: tl.constexpr, stride, top, GROUP: tl.constexpr, DC: tl.constexpr):
    """Codes of a query part: a tuple of ``(DC, heads)`` int8 tensors, one a group of dimensions."""
    factor = tl.div_rn(tl.full(top.shape, 127.0, tl.float32), top)
    dim = tl.arange(0, DC)
    codes = ()
    for d in tl.static_range(0, D, GROUP):
        part = load_query(q + d, head, dim, H, GROUP, stride).to(tl.float32)
        codes = codes + (tl.trans(rounded(part * factor[:, None])),)  # type: ignore[assignment]
    return codes


@triton.jit
def part_scores(
    asked, top, keys, scales, team, live, k_stride, D: tl.constexpr, T: tl.constexpr, HB: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, DC: tl.constexpr,
):  # fmt: skip
    """Products ``(T, heads)`` of one key part in codes.

    ``scales`` are float16, in 4 bits a word for two groups. DC is GROUP, or 32 where a group is shorter than the 32
    dimensions that a product of bytes has at least; queries are zero there.
    """
    row = team.to(tl.int64) * k_stride
    dim = tl.arange(0, DC)
    ok = live[:, None] & (dim < GROUP)[None, :]
    sums = tl.zeros((T, HB), tl.float32)
    if BITS == 4:
        for pair in tl.static_range(0, D // GROUP // 2):
            c = tl.load(keys + row[:, None] + (pair * GROUP + dim)[None, :], mask=ok, other=0)
            s = tl.load(scales + team * (D // GROUP // 2) + pair, mask=live, other=0)
            low, high = nibbles(c)
            sums += tl.dot(low, asked[2 * pair], out_dtype=tl.int32).to(tl.float32) * half_float(s)[:, None]
            sums += tl.dot(high, asked[2 * pair + 1], out_dtype=tl.int32).to(tl.float32) * half_float(s >> 16)[:, None]
    else:
        for group in tl.static_range(0, D // GROUP):
            c = tl.load(keys + row[:, None] + (group * GROUP + dim)[None, :], mask=ok, other=0)
            s = tl.load(scales + team * (D // GROUP) + group, mask=live, other=0.0).to(tl.float32)
            sums += tl.dot(c, asked[group], out_dtype=tl.int32).to(tl.float32) * s[:, None]
    return sums * (top * (1.0 / 127.0))[None, :]


@triton.jit(do_not_specialize=["layer"])
def route_coded_kernel(
    q0, q1, k0, k1, s0, s1, sizes, count, key, step, phi, noisy, tops, flags, scale, layer, q0_b, q0_g, q0_h, q1_b,
    q1_g, q1_h, k0_b, k0_g, k0_m, k1_b, k1_g, k1_m, M, MP, G, H, WORDS, D0: tl.constexpr, D1: tl.constexpr,
    DC0: tl.constexpr, DC1: tl.constexpr, T: tl.constexpr, HB: tl.constexpr, TWO: tl.constexpr, SHARED: tl.constexpr,
    BITS: tl.constexpr, GROUP0: tl.constexpr, GROUP1: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    PHI: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, head block, sequence * G + group) of n scores every n-th tile of T teams from the i-th on. Reads and
    writes what :func:`route_kernel` does."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    bg = tl.program_id(2)
    b, g = bg // G, bg % G
    n = tl.load(count + bg)
    if tl.program_id(0) * T < n:
        h0 = tl.program_id(1) * HB
        head = h0 + tl.arange(0, HB)
        first = bg.to(tl.int64) * M
        seed = sequence_key(key, b)
        now = tl.load(step + b)
        query0 = q0 + b.to(tl.int64) * q0_b + g.to(tl.int64) * q0_g
        query1 = q1 + b.to(tl.int64) * q1_b + g.to(tl.int64) * q1_g
        keys0 = k0 + b.to(tl.int64) * k0_b + g.to(tl.int64) * k0_g
        keys1 = k1 + b.to(tl.int64) * k1_b + g.to(tl.int64) * k1_g
        # two 4-bit groups have one word of scales
        scales0 = s0 + first * (D0 // GROUP0 // (2 if BITS == 4 else 1))
        scales1 = s1 + first * (D1 // GROUP1 // (2 if BITS == 4 else 1))
        top0 = largest(query0, head, H, D0, q0_h, HB)
        asked0 = coded_query(query0, head, H, D0, q0_h, top0, GROUP0, DC0)
        if TWO:
            top1 = largest(query1, head, H, D1, q1_h, HB)
            asked1 = coded_query(query1, head, H, D1, q1_h, top1, GROUP1, DC1)
        for tile in tl.range(tl.program_id(0), tl.cdiv(n, T), tl.num_programs(0), num_stages=STAGES):
            team = tile * T + tl.arange(0, T)
            live = team < n
            size = tl.load(sizes + first + team, mask=live, other=0)
            acc = part_scores(asked0, top0, keys0, scales0, team, live, k0_m, D0, T, HB, BITS, GROUP0, DC0)
            if TWO:
                acc += part_scores(asked1, top1, keys1, scales1, team, live, k1_m, D1, T, HB, BITS, GROUP1, DC1)
            keep_scores(
                acc, noisy, phi, tops, flags, seed, now, layer, tile, team, size, bg, g, h0, head, scale, MP, H, WORDS,
                T, HB, SHARED, BLOCK, PHI,
            )  # fmt: skip
