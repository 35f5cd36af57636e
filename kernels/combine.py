"""The split softmax put together: outputs, log masses and the ledger's row counts (Algorithm 1, line 19)."""

from __future__ import annotations

import triton
import triton.language as tl

from .device import wait


@triton.jit
def weighed_shares(
    part_out, part_max, part_sum, i_bgh, i_dim, shares, V: tl.constexpr, NS: tl.constexpr, BS: tl.constexpr
):
    """Sum of the shares' values ``[BV]`` and their mass, both times exp(-shift), and the shift."""
    BV: tl.constexpr = i_dim.shape[0]
    i_share = tl.arange(0, NS)
    m_share = i_share < shares
    b_top = tl.load(part_max + i_bgh * shares + i_share, mask=m_share, other=float("-inf"))  # [NS]
    b_mass = tl.load(part_sum + i_bgh * shares + i_share, mask=m_share, other=0.0)  # [NS]
    top = tl.max(b_top, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.sum(b_mass * tl.exp(b_top - safe), 0)
    b_total = tl.zeros((BV,), tl.float32)  # [BV]
    for start in range(0, shares, BS):
        i_some = start + tl.arange(0, BS)
        o_part = i_bgh * shares + i_some
        b_some = tl.load(part_max + o_part, mask=i_some < shares, other=float("-inf"))  # [BS]
        # a share without mass wrote no sum
        m_part = (b_some > float("-inf"))[:, None] & (i_dim < V)[None, :]
        b_part = tl.load(part_out + o_part[:, None] * V + i_dim[None, :], mask=m_part, other=0.0)  # [BS, BV]
        b_total += tl.sum(b_part * tl.exp(b_some - safe)[:, None], 0)
    return b_total, mass, safe


@triton.jit(do_not_specialize=["shares", "K", "K2"])
def combine_kernel(
    part_out, part_max, part_sum, part_rows, count, teams_scored, out, lse, counts, K, K2, VECTORS, shares, TILES, G, H,
    GROUPS, V: tl.constexpr, BV: tl.constexpr, NS: tl.constexpr, BS: tl.constexpr, TWO: tl.constexpr,
    ALL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (value block, h, sequence * G + group) weighs the shares' sums by exp(part_max - their maximum).

    Writes ``out (B G, H, V)``, ``lse (B G, H)`` and ``counts (3, B G)`` int64: routing, union and suffix rows. Routing
    scored all ``count (B G)`` teams for K, unless ALL; if TWO it scored ``count`` parents with VECTORS each for K, and
    for K2 the teams whose numbers by tile are ``teams_scored (B G, TILES)``. Where there are K or fewer, it drew none.
    """
    i_h = tl.program_id(1)
    i_bg = tl.program_id(2)
    i_bgh = i_bg.to(tl.int64) * H + i_h
    i_dim = tl.program_id(0) * BV + tl.arange(0, BV)  # [BV]
    wait(PDL)
    b_total, mass, safe = weighed_shares(part_out, part_max, part_sum, i_bgh, i_dim, shares, V=V, NS=NS, BS=BS)
    # a sequence without any row (all padding) gets zeros, as in PyTorch
    tl.store(out + i_bgh * V + i_dim, b_total / tl.where(mass == 0.0, 1.0, mass), mask=i_dim < V)
    if tl.program_id(0) == 0:
        tl.store(lse + i_bgh, safe + tl.log(mass))
        if i_h == 0:
            i_share = tl.arange(0, NS)
            m_share = i_share < shares
            b_union = tl.load(part_rows + (i_bg.to(tl.int64) * shares + i_share) * 2, mask=m_share, other=0)  # [NS]
            b_suffix = tl.load(part_rows + (i_bg.to(tl.int64) * shares + i_share) * 2 + 1, mask=m_share, other=0)
            n = tl.load(count + i_bg)
            routed = tl.where((n > K) & (not ALL), n * VECTORS, 0)
            if TWO:
                scored = 0
                for start in range(0, TILES, 256):
                    i_tile = start + tl.arange(0, 256)
                    scored += tl.sum(tl.load(teams_scored + i_bg * TILES + i_tile, mask=i_tile < TILES, other=0), 0)
                routed += tl.where(scored > K2, scored, 0)
            tl.store(counts + i_bg, routed.to(tl.int64))
            tl.store(counts + GROUPS + i_bg, tl.sum(b_union.to(tl.int64), 0))
            tl.store(counts + 2 * GROUPS + i_bg, tl.sum(b_suffix.to(tl.int64), 0))
