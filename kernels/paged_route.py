"""Routing over block tables: noisy scores of the teams of all requests' full blocks (Algorithm 1, lines 7-8)."""

from __future__ import annotations

import triton
import triton.language as tl

from .draws import gumbel_tile
from .paged_rows import request, tile_at, tiles_before
from .route import key_scores, store_scores


@triton.jit(do_not_specialize=["seed", "layer", "quad", "K", "dense_below"])
def paged_route_kernel(
    query0, query1, latents, rotary, table, seq_lens, dense, row, size, seed, phi, noisy, tops, flags, union,
    team_flags, scale, layer, quad, K, dense_below, query0_strides, query1_strides, row_strides, table_stride, MP,
    TEAMS_PADDED, B, H, WORDS, D0: tl.constexpr, D1: tl.constexpr, DC0: tl.constexpr, DC1: tl.constexpr,
    T: tl.constexpr, HB: tl.constexpr, BATCH: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr,
    FLAGGED: tl.constexpr, SPLIT: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    DTYPE: tl.constexpr, PHI: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, head block) scores every ``num_programs``-th tile of T teams from the i-th on, for HB heads.

    Writes what :func:`.route.route_kernel` writes, for the B requests instead of sequences. A team's key is its
    representative's row, found through the block table ``(B, columns)`` and the records ``row, size (blocks, SLOTS)``.
    Strides are (request, 0, head) of queries, (0, 0, row) of the cache's parts.

    EACH above 0: T parents of as many teams instead of teams, by their means ``(blocks SIZE / P, ...)`` instead of
    ``latents`` and ``rotary``; ``size`` is then P. Also clears ``union (B, MP / 32)`` and the flags of their teams,
    ``team_flags (B, WORDS, TEAMS_PADDED)``.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_head = tl.program_id(1) * HB
    i_head = first_head + tl.arange(0, HB)  # [HB]
    PARENTS: tl.constexpr = EACH > 0
    U: tl.constexpr = EACH if PARENTS else 1  # teams of what is scored
    b_end, tiles = tiles_before(
        seq_lens, dense, B, K, dense_below, BATCH=BATCH, T=T * U, SIZE=SIZE, SLOTS=SLOTS, FLAGGED=FLAGGED
    )  # fmt: skip
    # what the compiler hoists out of this loop takes registers of a fourth program on the processor
    for i in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1, disable_licm=True):
        i_b, i_tile = tile_at(b_end, i)
        n, teams = request(seq_lens, dense, i_b, K, dense_below, SIZE=SIZE, SLOTS=SLOTS, FLAGGED=FLAGGED)
        i_team = i_tile * T + tl.arange(0, T)  # [T]
        m_team = i_team < teams // U
        p_table = table + i_b.to(tl.int64) * table_stride
        i_block = tl.load(p_table + i_team // (SLOTS // U), mask=m_team, other=0).to(tl.int64)  # [T]
        o_slot = i_block * (SLOTS // U) + i_team % (SLOTS // U)
        if PARENTS:
            i_row = o_slot
            b_size = tl.where(m_team, size, 0)  # [T]
        else:
            i_row = i_block * SIZE + tl.load(row + o_slot, mask=m_team, other=0).to(tl.int64)  # [T]
            b_size = tl.load(size + o_slot, mask=m_team, other=0).to(tl.int32)  # [T]
        acc = key_scores(
            query0, query1, latents, rotary, latents, rotary, i_row, m_team, i_head, i_b, i_b * 0, i_b * 0, H,
            query0_strides, query1_strides, row_strides, row_strides, D0=D0, D1=D1, DC0=DC0, DC1=DC1,
            LATENT=True, SPLIT=SPLIT, BITS=16, STAGES=STAGES, DTYPE=DTYPE,
        )  # fmt: skip
        b_phi = acc * scale + tl.log(tl.maximum(b_size, 1).to(tl.float32))[:, None]  # [T, HB]
        b_phi = tl.where((b_size > 0)[:, None], b_phi, float("-inf"))
        b_noise = gumbel_tile(seed, i_team, quad, first_head, n, layer, HB, SHARED)
        store_scores(b_phi, b_noise, phi, noisy, tops, i_b, i_tile, first_head, H, MP, BLOCK=BLOCK, PHI=PHI)
        if tl.program_id(1) == 0:
            for i_word in range(WORDS):
                tl.store(flags + (i_b.to(tl.int64) * WORDS + i_word) * MP + i_team, tl.zeros((T,), tl.int32))
                if PARENTS:
                    i_each = i_tile * T * U + tl.arange(0, T * U)
                    p_flags = team_flags + (i_b.to(tl.int64) * WORDS + i_word) * TEAMS_PADDED
                    tl.store(p_flags + i_each, tl.zeros((T * U,), tl.int32), mask=i_each < teams)
            if PARENTS:
                p_union = union + i_b.to(tl.int64) * (MP // 32)
                tl.store(p_union + i_team // 32, tl.zeros((T,), tl.int32), mask=i_team % 32 == 0)
