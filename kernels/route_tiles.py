"""Routing by programs that hold their queries and score several tiles of teams, each tile's keys asked for at once.

What :mod:`.route` does of one stage, for keys in codes and in the rows' dtype. Noise is drawn while keys are coming.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import code_query, coded_scores, words_of_scales
from .draws import gumbel_tile, sequence_key
from .interpreter import INTERPRETED
from .maths import dot, load_query, split
from .route import store_scores


@triton.jit
def ask_for(p_keys, i_team, stride, WIDTH: tl.constexpr):
    """Ask for keys of WIDTH bytes, line by line of 128 bytes, so that they are in L2 when they are loaded."""
    if not INTERPRETED:
        SIZE: tl.constexpr = p_keys.dtype.element_ty.primitive_bitwidth // 8
        i_line = tl.arange(0, WIDTH // 128 if WIDTH > 128 else 1)
        p_line = p_keys + i_team.to(tl.int64)[:, None] * stride + (i_line * (128 // SIZE))[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [p_line.to(tl.int64)], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@triton.jit
def held_query(
    p_query, i_head, H, stride, D: tl.constexpr, DC: tl.constexpr, dtype: tl.constexpr, SPLIT: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """The queries ``[HB]`` of one key part, DC dimensions at a time: codes and what one counts, or the rows' dtype, if
    SPLIT as high and low parts."""
    if BITS < 16:
        return code_query(p_query, i_head, H, stride, D=D, DC=DC)
    else:
        i_dim = tl.arange(0, DC if DC > 16 else 16)
        high: tl.tuple = ()
        low: tl.tuple = ()
        for i in tl.static_range(D // DC):
            b_query = load_query(p_query + i * DC, i_head, i_dim, H, DC, stride)  # [HB, dims]
            if SPLIT:
                b_high, b_low = split(b_query.to(tl.float32), dtype)
                high += (b_high,)
                low += (b_low,)
            else:
                high += (b_query.to(dtype),)
        return high, low


@triton.jit
def part_scores(
    acc, p_keys, p_scales, query, i_team, m_team, stride, D: tl.constexpr, DC: tl.constexpr, SPLIT: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """acc ``[T, HB]`` plus the scores of teams ``i_team [T]`` in one key part; ``query`` is of :func:`held_query`."""
    if BITS < 16:
        return acc + coded_scores(p_keys, p_scales, query[0], query[1], i_team, m_team, stride, D=D, BITS=BITS, DC=DC)
    else:
        i_dim = tl.arange(0, DC if DC > 16 else 16)
        m_key = m_team[:, None]
        if DC < 16:
            m_key = m_key & (i_dim < DC)[None, :]
        p_team = p_keys + i_team.to(tl.int64)[:, None] * stride + i_dim[None, :]
        for i in tl.static_range(D // DC):
            b_key = tl.load(p_team + i * DC, mask=m_key, other=0)  # [T, dims]
            acc = dot(b_key, tl.trans(query[0][i]), acc)
            if SPLIT:
                acc = dot(b_key, tl.trans(query[1][i]), acc)
        return acc


@triton.jit(do_not_specialize=["layer", "quad"])
def route_tiles_kernel(
    query0, query1, keys0, keys1, scales0, scales1, sizes, count, key, step, phi, noisy, tops, flags, scale, layer,
    quad, query0_strides, query1_strides, keys0_strides, keys1_strides, M, MP, G, H, WORDS, D0: tl.constexpr,
    D1: tl.constexpr, T: tl.constexpr, HB: tl.constexpr, LATENT: tl.constexpr, SHARED: tl.constexpr,
    SPLIT: tl.constexpr, BITS: tl.constexpr, DC0: tl.constexpr, DC1: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, DTYPE: tl.constexpr, PHI: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, head block, sequence * G + group) scores every programs-th tile of T teams from i on for HB heads.

    What it writes is in :func:`.route.route_kernel`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i_bg = tl.program_id(2)
    i_b, i_g = i_bg // G, i_bg % G
    first_head = tl.program_id(1) * HB
    i_head = first_head + tl.arange(0, HB)  # [HB]
    n = tl.load(count + i_bg)
    seed = sequence_key(key, i_b)
    now = tl.load(step + i_b)
    o_teams = i_bg.to(tl.int64) * M
    p_keys0 = keys0 + i_b.to(tl.int64) * keys0_strides[0] + i_g.to(tl.int64) * keys0_strides[1]
    p_keys1 = keys1 + i_b.to(tl.int64) * keys1_strides[0] + i_g.to(tl.int64) * keys1_strides[1]
    p_scales0 = scales0 + o_teams * words_of_scales(D0, DC0, BITS)
    p_scales1 = scales1 + o_teams * words_of_scales(D1, DC1, BITS)
    p_query0 = query0 + i_b.to(tl.int64) * query0_strides[0] + i_g.to(tl.int64) * query0_strides[1]
    if PREFETCH:
        i_first = tl.minimum(tl.program_id(0) * T + tl.arange(0, T), M - 1)
        ask_for(p_keys0, i_first, keys0_strides[2], WIDTH=D0 * BITS // 8)
        if LATENT:
            ask_for(p_keys1, i_first, keys1_strides[2], WIDTH=D1 * BITS // 8)
    query = held_query(p_query0, i_head, H, query0_strides[2], D=D0, DC=DC0, dtype=DTYPE, SPLIT=SPLIT, BITS=BITS)
    rotary = query
    if LATENT:
        p_query1 = query1 + i_b.to(tl.int64) * query1_strides[0] + i_g.to(tl.int64) * query1_strides[1]
        rotary = held_query(p_query1, i_head, H, query1_strides[2], D=D1, DC=DC1, dtype=DTYPE, SPLIT=SPLIT, BITS=BITS)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n, T), tl.num_programs(0), num_stages=STAGES):
        i_team = i_tile * T + tl.arange(0, T)  # [T]
        m_team = i_team < n
        b_size = tl.load(sizes + o_teams + i_team, mask=m_team, other=0)  # [T]
        b_noise = gumbel_tile(seed, i_team, quad + i_g * 65536, first_head, now, layer, HB, SHARED)
        b_score = part_scores(
            tl.zeros((T, HB), tl.float32), p_keys0, p_scales0, query, i_team, m_team, keys0_strides[2], D=D0, DC=DC0,
            SPLIT=SPLIT, BITS=BITS,
        )  # fmt: skip
        if LATENT:
            b_score = part_scores(
                b_score, p_keys1, p_scales1, rotary, i_team, m_team, keys1_strides[2], D=D1, DC=DC1, SPLIT=SPLIT,
                BITS=BITS,
            )  # fmt: skip
        b_phi = b_score * scale + tl.log(tl.maximum(b_size, 1).to(tl.float32))[:, None]  # [T, HB]
        b_phi = tl.where((b_size > 0)[:, None], b_phi, float("-inf"))
        store_scores(b_phi, b_noise, phi, noisy, tops, i_bg, i_tile, first_head, H, MP, BLOCK=BLOCK, PHI=PHI)
        if tl.program_id(1) == 0:
            for i_word in range(WORDS):
                tl.store(flags + (i_bg.to(tl.int64) * WORDS + i_word) * MP + i_team, tl.zeros((T,), tl.int32))
