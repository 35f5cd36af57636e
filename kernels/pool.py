"""Pooled corrections: one inclusion probability per team of the union, for all heads of its group."""

from __future__ import annotations

import triton
import triton.language as tl

from .device import wait
from .maths import log_inclusion


@triton.jit
def pool_kernel(
    phi, tau, kth, flags, count, pooled, MP, H, WORDS, T: tl.constexpr, HB: tl.constexpr, SHARED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, sequence * G + group) writes ``pooled (B G, MP)``, log c_g of the flagged teams i T .. i T + T - 1.

    A head misses team g, given the others' scores, with probability exp(-exp(phi - T)), where T is its (K+1)-st score
    if it selected g and its K-th if not. Independent draws miss it together with the product, a shared one with the
    smallest.
    """
    i_bg = tl.program_id(1)
    i_team = tl.program_id(0) * T + tl.arange(0, T)  # [T]
    m_team = i_team < tl.load(count + i_bg)
    p_flags = flags + i_bg.to(tl.int64) * WORDS * MP
    wait(PDL)
    b_used = tl.zeros((T,), tl.int32)  # [T]
    for i_word in range(WORDS):
        b_used |= tl.load(p_flags + i_word * MP + i_team, mask=m_team, other=0)
    m_team = b_used != 0
    # most blocks of teams hold none that was selected
    if tl.sum(m_team.to(tl.int32), 0) > 0:
        # a running sum of exp(margin) over the heads, [T] each: exp(b_top) times b_mass
        b_top = tl.full((T,), float("-inf"), tl.float32)
        b_mass = tl.zeros((T,), tl.float32)
        for first_head in range(0, H, HB):
            i_head = first_head + tl.arange(0, HB)  # [HB]
            m_head = i_head < H
            i_bgh = i_bg.to(tl.int64) * H + i_head
            b_phi = tl.load(
                phi + i_bgh[:, None] * MP + i_team[None, :], mask=m_head[:, None] & m_team[None, :], other=float("-inf")
            )  # [HB, T]
            b_bits = tl.load(p_flags + (first_head // 32) * MP + i_team, mask=m_team, other=0)  # [T]
            m_picked = ((b_bits[None, :] >> (first_head % 32 + tl.arange(0, HB))[:, None]) & 1) != 0  # [HB, T]
            b_tau = tl.load(tau + i_bgh, mask=m_head, other=0.0)[:, None]  # [HB, 1]
            b_kth = tl.load(kth + i_bgh, mask=m_head, other=0.0)[:, None]  # [HB, 1]
            # a threshold of -inf means certain inclusion; so does a large finite margin, without inf - inf
            b_margin = tl.minimum(b_phi - tl.where(m_picked, b_tau, b_kth), 1e4)  # [HB, T]
            b_margin = tl.where(b_phi == float("-inf"), float("-inf"), b_margin)
            b_new = tl.maximum(b_top, tl.max(b_margin, 0))
            b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_mass = b_mass * tl.exp(b_top - b_safe) + tl.sum(tl.exp(b_margin - b_safe[None, :]), 0)
            b_top = b_new
        b_joint = b_top if SHARED else b_top + tl.log(b_mass)
        tl.store(pooled + i_bg.to(tl.int64) * MP + i_team, log_inclusion(b_joint), mask=m_team)
