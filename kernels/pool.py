"""Pooled corrections: one inclusion probability per team of the union, for all heads of its group."""

from __future__ import annotations

import triton
import triton.language as tl

from .device import wait
from .draws import gumbel_tile, sequence_key
from .maths import log_inclusion


@triton.jit
def flagged(p_flags, i_team, m_team, MP, WORDS):
    """Which of the teams ``[T]`` any head selected. Most blocks of teams hold none."""
    b_used = tl.zeros(i_team.shape, tl.int32)
    for i_word in range(WORDS):
        b_used |= tl.load(p_flags + i_word * MP + i_team, mask=m_team, other=0)
    return b_used != 0


@triton.jit
def pooled_correction(
    p_phi, p_tau, p_kth, p_flags, i_phi, i_flag, m_item, phi_stride, flags_stride, H, HB: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """log c of the teams or parents with scores at the places ``i_phi [T]`` and flags at ``i_flag [T]``.

    A head misses team g, given the others' scores, with probability exp(-exp(phi - T)), where T is its (K+1)-st score
    if it selected g and its K-th if not. Independent draws miss it together with the product, a shared one with the
    smallest.
    """
    T: tl.constexpr = i_phi.shape[0]
    # a running sum of exp(margin) over the heads, [T] each: exp(b_top) times b_mass
    b_top = tl.full((T,), float("-inf"), tl.float32)
    b_mass = tl.zeros((T,), tl.float32)
    for first_head in range(0, H, HB):
        i_head = first_head + tl.arange(0, HB)  # [HB]
        m_head = i_head < H
        b_phi = tl.load(
            p_phi + i_head.to(tl.int64)[:, None] * phi_stride + i_phi[None, :], mask=m_head[:, None] & m_item[None, :],
            other=float("-inf"),
        )  # fmt: skip
        b_bits = tl.load(p_flags + (first_head // 32) * flags_stride + i_flag, mask=m_item, other=0)  # [T]
        m_picked = ((b_bits[None, :] >> (first_head % 32 + tl.arange(0, HB))[:, None]) & 1) != 0  # [HB, T]
        b_tau = tl.load(p_tau + i_head, mask=m_head, other=0.0)[:, None]  # [HB, 1]
        b_kth = tl.load(p_kth + i_head, mask=m_head, other=0.0)[:, None]  # [HB, 1]
        # a threshold of -inf means certain inclusion; so does a large finite margin, without inf - inf
        b_margin = tl.minimum(b_phi - tl.where(m_picked, b_tau, b_kth), 1e4)  # [HB, T]
        b_margin = tl.where(b_phi == float("-inf"), float("-inf"), b_margin)
        b_new = tl.maximum(b_top, tl.max(b_margin, 0))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_mass = b_mass * tl.exp(b_top - b_safe) + tl.sum(tl.exp(b_margin - b_safe[None, :]), 0)
        b_top = b_new
    return log_inclusion(b_top if SHARED else b_top + tl.log(b_mass))


@triton.jit
def redrawn_correction(
    p_noisy, p_tau, p_kth, p_flags, i_score, i_item, m_item, seed, quad, now, layer, score_stride, flags_stride, H,
    HB: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """:func:`pooled_correction` where only noisy scores were kept: their noise is drawn again. Scores are at the places
    ``i_score [T]``, flags and noise are those of ``i_item [T]``; HB holds all H heads."""
    i_head = tl.arange(0, HB)  # [HB]
    m_both = m_item[:, None] & (i_head < H)[None, :]  # [T, HB]
    o_noisy = i_head.to(tl.int64)[None, :] * score_stride + i_score[:, None]
    b_noisy = tl.load(p_noisy + o_noisy, mask=m_both, other=float("-inf"))
    o_flags = (i_head // 32)[None, :] * flags_stride + i_item[:, None]
    b_bits = tl.load(p_flags + o_flags, mask=m_both, other=0)
    m_picked = ((b_bits >> (i_head % 32)[None, :]) & 1) != 0
    b_tau = tl.load(p_tau + i_head, mask=i_head < H, other=0.0)[None, :]
    b_kth = tl.load(p_kth + i_head, mask=i_head < H, other=0.0)[None, :]
    b_phi = b_noisy - gumbel_tile(seed, i_item, quad, 0, now, layer, HB, SHARED)
    # as above
    b_margin = tl.minimum(b_phi - tl.where(m_picked, b_tau, b_kth), 1e4)
    b_margin = tl.where(b_noisy == float("-inf"), float("-inf"), b_margin)
    b_top = tl.max(b_margin, 1)  # [T]
    if SHARED:
        return log_inclusion(b_top)
    else:
        b_safe = tl.where(b_top == float("-inf"), 0.0, b_top)
        return log_inclusion(b_top + tl.log(tl.sum(tl.exp(b_margin - b_safe[:, None]), 1)))


@triton.jit
def pool_redrawn(
    noisy, tau, kth, flags, count, key, step, listed_teams, listed_log_c, pooled, i_tile, i_bg, layer, quad, PLACES, MP,
    G, H, WORDS, T: tl.constexpr, HB: tl.constexpr, LISTED: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What a program of :func:`pool_kernel` does, where ``noisy (B G, H, PLACES)`` was kept and no phi."""
    i_b, i_g = i_bg // G, i_bg % G
    i_place = i_tile * T + tl.arange(0, T)  # [T]
    p_flags = flags + i_bg.to(tl.int64) * WORDS * MP
    o_list = i_bg.to(tl.int64) * PLACES
    seed = sequence_key(key, i_b)
    now = tl.load(step + i_b)
    wait(PDL)
    m_team = i_place < tl.load(count + i_bg)
    i_team = i_place
    if LISTED:
        i_team = tl.load(listed_teams + o_list + i_place, mask=m_team, other=-1)  # [T]
        m_team = i_team >= 0
    m_team = flagged(p_flags, i_team, m_team, MP, WORDS)
    if tl.sum(m_team.to(tl.int32), 0) > 0:
        i_bgh = i_bg.to(tl.int64) * H
        b_log_c = redrawn_correction(
            noisy + i_bgh * PLACES, tau + i_bgh, kth + i_bgh, p_flags, i_place, i_team, m_team, seed,
            quad + i_g * 65536, now, layer, PLACES, MP, H, HB=HB, SHARED=SHARED,
        )  # fmt: skip
        if LISTED:
            b_log_c += tl.load(listed_log_c + o_list + i_place, mask=m_team, other=0.0)
        tl.store(pooled + i_bg.to(tl.int64) * MP + i_team, b_log_c, mask=m_team)


@triton.jit
def pool_kernel(
    phi, tau, kth, flags, count, listed_teams, listed_log_c, pooled, PLACES, MP, H, WORDS, T: tl.constexpr,
    HB: tl.constexpr, LISTED: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, sequence * G + group) writes ``pooled (B G, MP)``, the log correction of the flagged teams whose
    scores ``phi (B G, H, PLACES)`` are at the places i T .. i T + T - 1.

    A team's place is its number; LISTED: teams are ``listed_teams (B G, PLACES)``, with ``listed_log_c`` the log c_p of
    their parents, which is added.
    """
    i_bg = tl.program_id(1)
    i_place = tl.program_id(0) * T + tl.arange(0, T)  # [T]
    p_flags = flags + i_bg.to(tl.int64) * WORDS * MP
    o_list = i_bg.to(tl.int64) * PLACES
    i_team = i_place
    if LISTED:
        wait(PDL)
        m_team = i_place < tl.load(count + i_bg)
        i_team = tl.load(listed_teams + o_list + i_place, mask=m_team, other=-1)  # [T]
        m_team = i_team >= 0
    else:
        m_team = i_place < tl.load(count + i_bg)
        wait(PDL)
    m_team = flagged(p_flags, i_team, m_team, MP, WORDS)
    if tl.sum(m_team.to(tl.int32), 0) > 0:
        i_bgh = i_bg.to(tl.int64) * H
        b_log_c = pooled_correction(
            phi + i_bgh * PLACES, tau + i_bgh, kth + i_bgh, p_flags, i_place, i_team, m_team, PLACES, MP, H, HB=HB,
            SHARED=SHARED,
        )  # fmt: skip
        if LISTED:
            b_log_c += tl.load(listed_log_c + o_list + i_place, mask=m_team, other=0.0)
        tl.store(pooled + i_bg.to(tl.int64) * MP + i_team, b_log_c, mask=m_team)
