"""Routing: every team's noisy score for every head, and the largest of each block of teams (Algorithm 1, lines 7-8).

Teams are the rows of the matrix product, heads its columns. The noisy scores are kept; phi of the few selected teams
comes back by drawing their noise again, and only the pooled estimator needs phi of the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import code_query, coded_scores, words_of_scales
from .draws import gumbel_tile, sequence_key
from .maths import add_product, load_query
from .parents import add_half_variances


@triton.jit
def add_scores(
    acc, p_query, p_keys, p_scales, i_team, m_team, i_head, H, query_stride, key_stride, D: tl.constexpr,
    DC: tl.constexpr, dtype: tl.constexpr, SPLIT: tl.constexpr, BITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """acc ``[T, HB]`` plus the products of one key part, DC dimensions at a time."""
    if BITS < 16:
        codes, b_unit = code_query(p_query, i_head, H, query_stride, D=D, DC=DC)
        return acc + coded_scores(p_keys, p_scales, codes, b_unit, i_team, m_team, key_stride, D=D, BITS=BITS, DC=DC)
    else:
        o_team = i_team.to(tl.int64) * key_stride
        for o_dim in tl.range(0, D, DC, num_stages=STAGES):
            i_dim = o_dim + tl.arange(0, DC)
            m_key = m_team[:, None] & (i_dim < D)[None, :]
            b_key = tl.load(p_keys + o_team[:, None] + i_dim[None, :], mask=m_key, other=0)  # [T, DC]
            b_query = load_query(p_query, i_head, i_dim, H, D, query_stride)  # [HB, DC]
            acc = add_product(acc, b_key, b_query, dtype, SPLIT)
        return acc


@triton.jit
def key_scores(
    query0, query1, keys0, keys1, scales0, scales1, i_key, m_key, i_head, i_b, i_g, first_key, H, query0_strides,
    query1_strides, keys0_strides, keys1_strides, D0: tl.constexpr, D1: tl.constexpr, DC0: tl.constexpr,
    DC1: tl.constexpr, LATENT: tl.constexpr, SPLIT: tl.constexpr, BITS: tl.constexpr, STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Unscaled scores ``[T, HB]`` of the routing keys ``i_key [T]`` of sequence i_b and group i_g, whose keys follow
    ``first_key`` others in a contiguous tensor."""
    T: tl.constexpr = i_key.shape[0]
    HB: tl.constexpr = i_head.shape[0]
    p_query0 = query0 + i_b.to(tl.int64) * query0_strides[0] + i_g.to(tl.int64) * query0_strides[1]
    p_query1 = query1 + i_b.to(tl.int64) * query1_strides[0] + i_g.to(tl.int64) * query1_strides[1]
    p_keys0 = keys0 + i_b.to(tl.int64) * keys0_strides[0] + i_g.to(tl.int64) * keys0_strides[1]
    p_keys1 = keys1 + i_b.to(tl.int64) * keys1_strides[0] + i_g.to(tl.int64) * keys1_strides[1]
    p_scales0 = scales0 + first_key * words_of_scales(D0, DC0, BITS)
    p_scales1 = scales1 + first_key * words_of_scales(D1, DC1, BITS)
    acc = tl.zeros((T, HB), tl.float32)  # [T, HB]
    if LATENT and BITS == 16 and DC1 >= D1:
        # the rotary part is asked for first and used last, so that the other products hide its latency
        i_dim = tl.arange(0, DC1)
        m_rotary = m_key[:, None] & (i_dim < D1)[None, :]
        b_rotary = tl.load(
            p_keys1 + i_key.to(tl.int64)[:, None] * keys1_strides[2] + i_dim[None, :], mask=m_rotary, other=0
        )  # [T, DC1]
        b_query1 = load_query(p_query1, i_head, i_dim, H, D1, query1_strides[2])  # [HB, DC1]
        acc = add_scores(
            acc, p_query0, p_keys0, p_scales0, i_key, m_key, i_head, H, query0_strides[2], keys0_strides[2], D=D0,
            DC=DC0, dtype=DTYPE, SPLIT=SPLIT, BITS=BITS, STAGES=STAGES,
        )  # fmt: skip
        return add_product(acc, b_rotary, b_query1, DTYPE, SPLIT)
    else:
        acc = add_scores(
            acc, p_query0, p_keys0, p_scales0, i_key, m_key, i_head, H, query0_strides[2], keys0_strides[2], D=D0,
            DC=DC0, dtype=DTYPE, SPLIT=SPLIT, BITS=BITS, STAGES=STAGES,
        )  # fmt: skip
        if LATENT:
            acc = add_scores(
                acc, p_query1, p_keys1, p_scales1, i_key, m_key, i_head, H, query1_strides[2], keys1_strides[2], D=D1,
                DC=DC1, dtype=DTYPE, SPLIT=SPLIT, BITS=BITS, STAGES=STAGES,
            )  # fmt: skip
        return acc


@triton.jit
def store_scores(
    b_phi, b_noise, phi, noisy, tops, i_bg, i_tile, first_head, H, MP, BLOCK: tl.constexpr, PHI: tl.constexpr
):
    """Line 8, Y_g = phi_g + G_g, at the places i_tile T .. i_tile T + T - 1: noisy scores, block maxima, and phi."""
    T: tl.constexpr = b_phi.shape[0]
    HB: tl.constexpr = b_phi.shape[1]
    b_noisy = b_phi + b_noise  # [T, HB]
    i_head = first_head + tl.arange(0, HB)  # [HB]
    i_place = i_tile * T + tl.arange(0, T)  # [T]
    i_bgh = i_bg.to(tl.int64) * H + i_head  # [HB]
    m_head = (i_head < H)[None, :]
    tl.store(noisy + i_bgh[None, :] * MP + i_place[:, None], b_noisy, mask=m_head)
    if PHI:
        tl.store(phi + i_bgh[None, :] * MP + i_place[:, None], b_phi, mask=m_head)
    b_top = tl.max(tl.reshape(b_noisy, (T // BLOCK, BLOCK, HB)), 1)  # [T / BLOCK, HB]
    i_block = i_tile * (T // BLOCK) + tl.arange(0, T // BLOCK)
    tl.store(tops + i_bgh[None, :] * (MP // BLOCK) + i_block[:, None], b_top, mask=m_head)


@triton.jit(do_not_specialize=["layer", "quad"])
def route_kernel(
    query0, query1, keys0, keys1, scales0, scales1, spread0, spread1, sizes, count, key, step, phi, noisy, tops, flags,
    union, scale, layer, quad, query0_strides, query1_strides, keys0_strides, keys1_strides, spread0_strides,
    spread1_strides, M, MP, G, H, WORDS, D0: tl.constexpr, D1: tl.constexpr, DC0: tl.constexpr, DC1: tl.constexpr,
    T: tl.constexpr, HB: tl.constexpr, LATENT: tl.constexpr, SPLIT: tl.constexpr, SHARED: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr, PHI: tl.constexpr,
    PARENTS: tl.constexpr, SPREAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, head block, sequence * G + group) scores the teams i T .. i T + T - 1 for HB heads; or PARENTS, with
    the delta of their SPREAD ("mean": none).

    Writes ``noisy (B G, H, MP)``, if PHI the same without noise to ``phi``, and ``tops (B G, H, MP / BLOCK)``; clears
    ``flags (B G, WORDS, MP)``. All in the blocks that hold a real team; nothing beyond them is read later. Strides are
    (sequence, group, head) of a query and (sequence, group, team) of keys and spreads. ``quad`` is the noise counter of
    the first quad of heads of the first group. PARENTS: also clears ``union (B G, MP / 32)``.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i_bg = tl.program_id(2)
    i_b, i_g = i_bg // G, i_bg % G
    n = tl.load(count + i_bg)
    i_tile = tl.program_id(0)
    if i_tile * T < n:
        first_head = tl.program_id(1) * HB
        i_head = first_head + tl.arange(0, HB)  # [HB]
        i_team = i_tile * T + tl.arange(0, T)  # [T]
        m_team = i_team < n
        o_teams = i_bg.to(tl.int64) * M
        seed = sequence_key(key, i_b)
        now = tl.load(step + i_b)
        b_size = tl.load(sizes + o_teams + i_team, mask=m_team, other=0)  # [T]
        acc = key_scores(
            query0, query1, keys0, keys1, scales0, scales1, i_team, m_team, i_head, i_b, i_g, o_teams, H,
            query0_strides, query1_strides, keys0_strides, keys1_strides, D0=D0, D1=D1, DC0=DC0, DC1=DC1,
            LATENT=LATENT, SPLIT=SPLIT, BITS=BITS, STAGES=STAGES, DTYPE=DTYPE,
        )  # fmt: skip
        # line 7: phi_g = log n_g + the scaled score, -inf for padding teams
        b_phi = acc * scale + tl.log(tl.maximum(b_size, 1).to(tl.float32))[:, None]  # [T, HB]
        if PARENTS and SPREAD != "mean":
            b_phi = add_half_variances(
                b_phi, query0, spread0, i_team, m_team, i_head, i_b, i_g, H, scale, query0_strides, spread0_strides,
                D=D0, DC=DC0, dtype=DTYPE, SPREAD=SPREAD,
            )  # fmt: skip
            if LATENT:
                b_phi = add_half_variances(
                    b_phi, query1, spread1, i_team, m_team, i_head, i_b, i_g, H, scale, query1_strides,
                    spread1_strides, D=D1, DC=DC1, dtype=DTYPE, SPREAD=SPREAD,
                )  # fmt: skip
        b_phi = tl.where((b_size > 0)[:, None], b_phi, float("-inf"))
        b_noise = gumbel_tile(seed, i_team, quad + i_g * 65536, first_head, now, layer, HB, SHARED)
        store_scores(b_phi, b_noise, phi, noisy, tops, i_bg, i_tile, first_head, H, MP, BLOCK=BLOCK, PHI=PHI)
        if tl.program_id(1) == 0:
            for i_word in range(WORDS):
                tl.store(flags + (i_bg.to(tl.int64) * WORDS + i_word) * MP + i_team, tl.zeros((T,), tl.int32))
            if PARENTS:
                p_union = union + i_bg.to(tl.int64) * (MP // 32)
                tl.store(p_union + i_team // 32, tl.zeros((T,), tl.int32), mask=i_team % 32 == 0)
