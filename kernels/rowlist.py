"""The rows that one attention program reads: its share of the union's rows and of the exact suffix, as a list."""

from __future__ import annotations

import triton
import triton.language as tl

from . import plan

RUN = tl.constexpr(plan.RUN)


@triton.jit
def share_rows(p_team_of_row, start, N, per_share, i_share, shares, LANES: tl.constexpr):
    """Rows ``start .. start + LANES - 1`` of this share and their teams ``[LANES]``, -1 where there is none.

    Runs of 8 rows are dealt to the shares in turn, so that a cluster of selected neighbours or a large team is spread
    over them. (Dealing whole teams reads less, but fills some shares more than others: slower, see NOTES.md.)
    """
    i = start + tl.arange(0, LANES)
    i_row = ((i // RUN) * shares + i_share) * RUN + i % RUN
    return i_row, tl.load(p_team_of_row + i_row, mask=(i_row < N) & (i < per_share), other=-1)


@triton.jit
def team_bits(p_flags, i_team, m_team, MP, first_head, HB: tl.constexpr, WORDS: tl.constexpr, POOLED: tl.constexpr):
    """Who selected the teams ``[LANES]``: a bit for each of the heads ``first_head .. first_head + HB - 1`` (POOLED:
    for any 32 heads), and a word that is 0 where no head of the group did."""
    b_group = tl.zeros(i_team.shape, tl.int32)
    b_word = b_group
    for i_word in tl.static_range(WORDS):
        b_flags = tl.load(p_flags + i_word * MP + i_team, mask=m_team, other=0)  # [LANES]
        b_group |= b_flags
        b_word = tl.where(i_word == first_head // 32, b_flags, b_word)
    b_bits = b_group
    if not POOLED:
        b_bits = b_word >> (first_head % 32)
        if HB < 32:
            b_bits = b_bits & ((1 << HB) - 1)
    return b_bits, b_group


@triton.jit
def append_union(
    i_row, i_team, p_team_of_row, p_flags, p_rows, p_teams, p_bits, N, per_share, i_share, shares, MP, first_head,
    HB: tl.constexpr, WORDS: tl.constexpr, POOLED: tl.constexpr, ALL: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """List the rows of this share whose team one of the heads ``first_head .. first_head + HB - 1`` selected (POOLED:
    any head; ALL: those of any team), with the bits of these heads. Returns how many rows are listed, and how many are
    in the union.

    The first LANES rows and their teams come loaded: they do not depend on the selection.
    """
    listed = 0
    union = 0
    for start in range(0, per_share, LANES):
        b_bits = (i_team >= 0).to(tl.int32)  # [LANES]: this block's heads
        b_group = b_bits  # [LANES]: any head of the group
        if not ALL:
            b_bits, b_group = team_bits(
                p_flags, i_team, i_team >= 0, MP, first_head, HB=HB, WORDS=WORDS, POOLED=POOLED
            )  # fmt: skip
        m_row = b_bits != 0
        i_slot = listed + tl.cumsum(m_row.to(tl.int32), 0) - 1
        tl.store(p_rows + i_slot, i_row, mask=m_row)
        tl.store(p_teams + i_slot, i_team, mask=m_row)
        if not POOLED and not ALL:
            tl.store(p_bits + i_slot, b_bits, mask=m_row)
        listed += tl.sum(m_row.to(tl.int32), 0)
        union += tl.sum((b_group != 0).to(tl.int32), 0)
        i_row, i_team = share_rows(p_team_of_row, start + LANES, N, per_share, i_share, shares, LANES)
    return listed, union


@triton.jit
def append_suffix(
    index, visible, visible_stride, p_rows, p_teams, listed, E, i_b, i_share, shares, MASKED: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """List the visible suffix rows of this share behind the ``listed`` rows, as team -1; returns the new total."""
    for start in range(0, tl.cdiv(E, shares), LANES):
        i_suffix = (start + tl.arange(0, LANES)) * shares + i_share  # [LANES]
        m_row = i_suffix < E
        if MASKED:
            m_row = tl.load(visible + i_b.to(tl.int64) * visible_stride + i_suffix, mask=m_row, other=0) != 0
        i_slot = listed + tl.cumsum(m_row.to(tl.int32), 0) - 1
        tl.store(p_rows + i_slot, tl.load(index + i_suffix, mask=m_row, other=0).to(tl.int32), mask=m_row)
        tl.store(p_teams + i_slot, tl.full((LANES,), -1, tl.int32), mask=m_row)
        listed += tl.sum(m_row.to(tl.int32), 0)
    return listed
