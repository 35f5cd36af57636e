"""The second stage of two-stage routing over block tables: noisy scores of the sampled parents' teams."""

from __future__ import annotations

import triton
import triton.language as tl

from .device import wait
from .draws import gumbel_tile
from .paged_rows import request
from .parents import parents_at
from .pool import pooled_correction
from .route import key_scores, store_scores
from .route_listed import parent_corrections


@triton.jit(do_not_specialize=["seed", "layer", "quad", "K", "dense_below"])
def paged_route_listed_kernel(
    query0, query1, latents, rotary, table, seq_lens, dense, row, size, seed, parent_phi, parent_tau, parent_kth,
    parent_flags, parent_log_c, union, phi, noisy, tops, places, teams_scored, listed_teams, listed_parents,
    listed_log_c, scale, layer, quad, K, dense_below, query0_strides, query1_strides, row_strides, table_stride, PLACES,
    PARENTS, H, WORDS, D0: tl.constexpr, D1: tl.constexpr, DC0: tl.constexpr, DC1: tl.constexpr, T: tl.constexpr,
    HB: tl.constexpr, POOL_HB: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, FLAGGED: tl.constexpr,
    SPLIT: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr,
    POOLED: tl.constexpr, EACH: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, head block, request) scores the teams at the places i T .. i T + T - 1 for HB heads, EACH of the
    parent at rank r in the union from place r EACH on. Writes what :func:`.route_listed.route_listed_kernel` writes."""
    i_tile = tl.program_id(0)
    i_b = tl.program_id(2)
    n, teams = request(seq_lens, dense, i_b, K, dense_below, SIZE=SIZE, SLOTS=SLOTS, FLAGGED=FLAGGED)
    first_head = tl.program_id(1) * HB
    i_head = first_head + tl.arange(0, HB)  # [HB]
    i_bp = i_b.to(tl.int64) * PARENTS
    i_bh = i_b.to(tl.int64) * H
    U: tl.constexpr = EACH if EACH < T else T  # teams of one parent in this tile
    PT: tl.constexpr = T // U  # parents in this tile
    i_rank = i_tile * T // EACH + tl.arange(0, PT)  # [PT]
    wait(PDL)
    words = tl.cdiv(teams // EACH, 32)  # none of a request that is attended densely
    i_parent, total = parents_at(union + i_b.to(tl.int64) * (PARENTS // 32), words, i_rank, LANES=LANES)  # [PT]
    scored = 0
    if i_tile * T < total * EACH:
        m_parent = i_rank < total
        p_flags = parent_flags + i_bp * WORDS
        if POOLED:
            b_pooled = pooled_correction(
                parent_phi + i_bh * PARENTS, parent_tau + i_bh, parent_kth + i_bh, p_flags, i_parent, i_parent,
                m_parent, PARENTS, PARENTS, H, HB=POOL_HB, SHARED=SHARED,
            )  # fmt: skip
            b_log_c = b_pooled[:, None] + tl.zeros((PT, HB), tl.float32)
        else:
            b_log_c = parent_corrections(
                parent_log_c + i_bp * H, p_flags, i_parent, m_parent, i_head, H, PARENTS
            )  # [PT, HB]
        i_among = i_tile * T % EACH + tl.arange(0, U)  # [U]
        b_owner = tl.reshape(tl.broadcast_to(i_parent[:, None], (PT, U)), (T,))
        m_team = tl.reshape(tl.broadcast_to(m_parent[:, None], (PT, U)), (T,))
        i_team = tl.where(m_team, tl.reshape(i_parent[:, None] * EACH + i_among[None, :], (T,)), 0)
        p_table = table + i_b.to(tl.int64) * table_stride
        i_block = tl.load(p_table + i_team // SLOTS, mask=m_team, other=0).to(tl.int64)  # [T]
        o_slot = i_block * SLOTS + i_team % SLOTS
        i_row = i_block * SIZE + tl.load(row + o_slot, mask=m_team, other=0).to(tl.int64)  # [T]
        b_size = tl.load(size + o_slot, mask=m_team, other=0).to(tl.int32)  # [T]
        acc = key_scores(
            query0, query1, latents, rotary, latents, rotary, i_row, m_team, i_head, i_b, i_b * 0, i_b * 0, H,
            query0_strides, query1_strides, row_strides, row_strides, D0=D0, D1=D1, DC0=DC0, DC1=DC1,
            LATENT=True, SPLIT=SPLIT, BITS=16, STAGES=STAGES, DTYPE=DTYPE,
        )  # fmt: skip
        # psi_g = log n_g + the scaled score - log c_p: a sampled parent stands for 1 / c_p of itself
        b_phi = acc * scale + tl.log(tl.maximum(b_size, 1).to(tl.float32))[:, None]  # [T, HB]
        b_phi -= tl.reshape(tl.broadcast_to(b_log_c[:, None, :], (PT, U, HB)), (T, HB))
        b_phi = tl.where((b_size > 0)[:, None], b_phi, float("-inf"))
        b_noise = gumbel_tile(seed, i_team, quad, first_head, n, layer, HB, SHARED)
        store_scores(b_phi, b_noise, phi, noisy, tops, i_b, i_tile, first_head, H, PLACES, BLOCK=BLOCK, PHI=POOLED)
        scored = tl.sum((b_size > 0).to(tl.int32), 0)
        if tl.program_id(1) == 0:
            o_list = i_b.to(tl.int64) * PLACES + i_tile * T + tl.arange(0, T)
            tl.store(listed_teams + o_list, tl.where(b_size > 0, i_team, -1))
            tl.store(listed_parents + o_list, b_owner)
            if POOLED:
                tl.store(listed_log_c + o_list, tl.reshape(tl.broadcast_to(b_pooled[:, None], (PT, U)), (T,)))
    if tl.program_id(1) == 0:
        tl.store(teams_scored + i_b.to(tl.int64) * tl.num_programs(0) + i_tile, scored)
        if i_tile == 0:
            tl.store(places + i_b, total * EACH)
