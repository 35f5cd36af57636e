"""The second stage of two-stage routing: noisy scores of the sampled parents' teams (:mod:`latent_santa.two_stage`).

The teams of one parent are neighbours, so a list of parents is a list of teams: parent after parent, each with as many
places as any parent has teams. Every program finds its own parents in the union's bits; no launch makes a list first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import wait
from .draws import gumbel_tile, sequence_key
from .parents import parents_at, parents_in
from .pool import pooled_correction, redrawn_correction
from .route import key_scores, store_scores


@triton.jit
def parent_corrections(p_corrections, p_flags, i_parent, m_parent, i_head, H, flags_stride):
    """log c_p of parents ``[PT]`` for heads ``[HB]``; +inf where the head did not select the parent: ``[PT, HB]``."""
    m_both = m_parent[:, None] & (i_head < H)[None, :]
    o_flags = (i_head // 32)[None, :] * flags_stride + i_parent[:, None]
    b_bits = tl.load(p_flags + o_flags, mask=m_both, other=0)
    m_picked = ((b_bits >> (i_head % 32)[None, :]) & 1) != 0
    o_log_c = i_parent.to(tl.int64)[:, None] * H + i_head[None, :]
    return tl.load(p_corrections + o_log_c, mask=m_picked, other=float("inf"))


@triton.jit(do_not_specialize=["layer", "quad", "parent_layer"])
def route_listed_kernel(
    query0, query1, keys0, keys1, scales0, scales1, sizes, of_team, key, step, parent_count, parent_phi, parent_tau,
    parent_kth, parent_flags, parent_log_c, union, first_team, phi, noisy, tops, places, teams_scored, listed_teams,
    listed_parents, listed_log_c, scale, layer, parent_layer, quad, query0_strides, query1_strides, keys0_strides,
    keys1_strides, M, PLACES, PARENTS, G, H, WORDS, D0: tl.constexpr, D1: tl.constexpr, DC0: tl.constexpr,
    DC1: tl.constexpr, T: tl.constexpr, HB: tl.constexpr, POOL_HB: tl.constexpr, REDRAW: tl.constexpr,
    LATENT: tl.constexpr, SPLIT: tl.constexpr, SHARED: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, DTYPE: tl.constexpr, POOLED: tl.constexpr, EACH: tl.constexpr, SPARSE: tl.constexpr,
    LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, head block, sequence * G + group) scores the teams at the places i T .. i T + T - 1 for HB heads.
    A parent has EACH places, the teams of the parent at rank r in the union those from r EACH on.

    Writes psi with noise to ``noisy (B G, H, PLACES)``, without to ``phi`` if POOLED, and ``tops (B G, H, PLACES /
    BLOCK)``, -inf at places without a team and for a head that did not select the parent; ``listed_teams`` and
    ``listed_parents (B G, PLACES)`` int32, -1 for none, if POOLED ``listed_log_c`` with the parents' log c_p; ``places
    (B G)``, how many are in use; and ``teams_scored (B G, programs)``. ``parent_...`` is what the first stage left of
    PARENTS padded parents. SPARSE: few tiles of places are in use, which the others find out soon. REDRAW: no phi is
    kept, and ``parent_phi`` are the parents' noisy scores.
    """
    i_tile = tl.program_id(0)
    i_bg = tl.program_id(2)
    i_b, i_g = i_bg // G, i_bg % G
    first_head = tl.program_id(1) * HB
    i_head = first_head + tl.arange(0, HB)  # [HB]
    seed = sequence_key(key, i_b)
    now = tl.load(step + i_b)
    i_bgp = i_bg.to(tl.int64) * PARENTS
    i_bgh = i_bg.to(tl.int64) * H
    words = tl.cdiv(tl.load(parent_count + i_bg), 32)
    U: tl.constexpr = EACH if EACH < T else T  # teams of one parent in this tile
    PT: tl.constexpr = T // U  # parents in this tile
    i_rank = i_tile * T // EACH + tl.arange(0, PT)  # [PT]
    p_union = union + i_bg.to(tl.int64) * (PARENTS // 32)
    wait(PDL)
    if SPARSE and i_tile > 0:
        if i_tile * T >= parents_in(p_union, words, LANES=LANES) * EACH:
            if tl.program_id(1) == 0:
                tl.store(teams_scored + i_bg.to(tl.int64) * tl.num_programs(0) + i_tile, 0)
            return
    i_parent, total = parents_at(p_union, words, i_rank, LANES=LANES)  # [PT]
    scored = 0
    if i_tile * T < total * EACH:
        m_parent = i_rank < total
        p_flags = parent_flags + i_bgp * WORDS
        if POOLED and REDRAW:
            b_pooled = redrawn_correction(
                parent_phi + i_bgh * PARENTS, parent_tau + i_bgh, parent_kth + i_bgh, p_flags, i_parent, i_parent,
                m_parent, seed, quad + i_g * 65536, now, parent_layer, PARENTS, PARENTS, H, HB=POOL_HB, SHARED=SHARED,
            )  # fmt: skip
            b_log_c = b_pooled[:, None] + tl.zeros((PT, HB), tl.float32)
        elif POOLED:
            b_pooled = pooled_correction(
                parent_phi + i_bgh * PARENTS, parent_tau + i_bgh, parent_kth + i_bgh, p_flags, i_parent, i_parent,
                m_parent, PARENTS, PARENTS, H, HB=POOL_HB, SHARED=SHARED,
            )  # fmt: skip
            b_log_c = b_pooled[:, None] + tl.zeros((PT, HB), tl.float32)
        else:
            b_log_c = parent_corrections(
                parent_log_c + i_bgp * H, p_flags, i_parent, m_parent, i_head, H, PARENTS
            )  # [PT, HB]
        b_first = tl.load(first_team + i_bgp + i_parent, mask=m_parent, other=M)  # [PT]
        i_among = i_tile * T % EACH + tl.arange(0, U)  # [U]
        i_team = tl.reshape(b_first[:, None] + i_among[None, :], (T,))
        b_owner = tl.reshape(tl.broadcast_to(i_parent[:, None], (PT, U)), (T,))
        o_teams = i_bg.to(tl.int64) * M
        m_team = i_team < M
        m_team = m_team & (tl.load(of_team + o_teams + i_team, mask=m_team, other=-1) == b_owner)
        i_team = tl.where(m_team, i_team, 0)
        b_size = tl.load(sizes + o_teams + i_team, mask=m_team, other=0)  # [T]
        acc = key_scores(
            query0, query1, keys0, keys1, scales0, scales1, i_team, m_team, i_head, i_b, i_g, o_teams, H,
            query0_strides, query1_strides, keys0_strides, keys1_strides, D0=D0, D1=D1, DC0=DC0, DC1=DC1,
            LATENT=LATENT, SPLIT=SPLIT, BITS=BITS, STAGES=STAGES, DTYPE=DTYPE,
        )  # fmt: skip
        # psi_g = log n_g + the scaled score - log c_p: a sampled parent stands for 1 / c_p of itself
        b_phi = acc * scale + tl.log(tl.maximum(b_size, 1).to(tl.float32))[:, None]  # [T, HB]
        b_phi -= tl.reshape(tl.broadcast_to(b_log_c[:, None, :], (PT, U, HB)), (T, HB))
        b_phi = tl.where((b_size > 0)[:, None], b_phi, float("-inf"))
        b_noise = gumbel_tile(seed, i_team, quad + i_g * 65536, first_head, now, layer, HB, SHARED)
        store_scores(
            b_phi, b_noise, phi, noisy, tops, i_bg, i_tile, first_head, H, PLACES, BLOCK=BLOCK,
            PHI=POOLED and not REDRAW,
        )  # fmt: skip
        scored = tl.sum((b_size > 0).to(tl.int32), 0)
        if tl.program_id(1) == 0:
            o_list = i_bg.to(tl.int64) * PLACES + i_tile * T + tl.arange(0, T)
            tl.store(listed_teams + o_list, tl.where(b_size > 0, i_team, -1))
            tl.store(listed_parents + o_list, b_owner)
            if POOLED:
                tl.store(listed_log_c + o_list, tl.reshape(tl.broadcast_to(b_pooled[:, None], (PT, U)), (T,)))
    if tl.program_id(1) == 0:
        tl.store(teams_scored + i_bg.to(tl.int64) * tl.num_programs(0) + i_tile, scored)
        if i_tile == 0:
            tl.store(places + i_bg, total * EACH)
