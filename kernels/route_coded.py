"""Routing by keys in codes: :mod:`.route` with programs that code their queries once and score several tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import code_query, coded_scores, words_of_scales
from .draws import gumbel_tile, sequence_key
from .route import store_scores


@triton.jit(do_not_specialize=["layer", "quad"])
def route_coded_kernel(
    query0, query1, keys0, keys1, scales0, scales1, sizes, count, key, step, phi, noisy, tops, flags, scale, layer,
    quad, query0_strides, query1_strides, keys0_strides, keys1_strides, M, MP, G, H, WORDS, D0: tl.constexpr,
    D1: tl.constexpr, T: tl.constexpr, HB: tl.constexpr, LATENT: tl.constexpr, SHARED: tl.constexpr,
    BITS: tl.constexpr, DC0: tl.constexpr, DC1: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    PHI: tl.constexpr, PDL: tl.constexpr,
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
    codes0, b_unit0 = code_query(p_query0, i_head, H, query0_strides[2], D=D0, DC=DC0)
    codes1, b_unit1 = codes0, b_unit0
    if LATENT:
        p_query1 = query1 + i_b.to(tl.int64) * query1_strides[0] + i_g.to(tl.int64) * query1_strides[1]
        codes1, b_unit1 = code_query(p_query1, i_head, H, query1_strides[2], D=D1, DC=DC1)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n, T), tl.num_programs(0), num_stages=STAGES):
        i_team = i_tile * T + tl.arange(0, T)  # [T]
        m_team = i_team < n
        # before anything that was loaded: Triton waits for all loads of a tile where the first of them is used
        b_noise = gumbel_tile(seed, i_team, quad + i_g * 65536, first_head, now, layer, HB, SHARED)
        b_size = tl.load(sizes + o_teams + i_team, mask=m_team, other=0)  # [T]
        b_score = coded_scores(
            p_keys0, p_scales0, codes0, b_unit0, i_team, m_team, keys0_strides[2], D=D0, BITS=BITS, DC=DC0
        )
        if LATENT:
            b_score += coded_scores(
                p_keys1, p_scales1, codes1, b_unit1, i_team, m_team, keys1_strides[2], D=D1, BITS=BITS, DC=DC1
            )
        b_phi = b_score * scale + tl.log(tl.maximum(b_size, 1).to(tl.float32))[:, None]
        b_phi = tl.where((b_size > 0)[:, None], b_phi, float("-inf"))
        store_scores(b_phi, b_noise, phi, noisy, tops, i_bg, i_tile, first_head, H, MP, BLOCK=BLOCK, PHI=PHI)
        if tl.program_id(1) == 0:
            for i_word in range(WORDS):
                tl.store(flags + (i_bg.to(tl.int64) * WORDS + i_word) * MP + i_team, tl.zeros((T,), tl.int32))
