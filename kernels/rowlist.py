"""The rows that one attention program reads: its share of the union's rows and of the exact suffix, as a list.

An attention program lists its own rows, or where a group has many heads finds them in the lists that
:func:`list_piece` made: several head blocks then need not look through the same rows, and more programs do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import plan
from .device import wait

RUN = tl.constexpr(plan.RUN)
PIECES = tl.constexpr(plan.PIECES)


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
    for any 32 heads; more than 32: one for two of them), and a word that is 0 where no head of the group did."""
    b_group = tl.zeros(i_team.shape, tl.int32)
    b_word = b_group
    for i_word in tl.static_range(WORDS):
        b_flags = tl.load(p_flags + i_word * MP + i_team, mask=m_team, other=0)  # [LANES]
        b_group |= b_flags
        if HB > 32:
            b_word |= tl.where(i_word // (HB // 32) == first_head // HB, b_flags, 0)
        else:
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
    HB: tl.constexpr, WORDS: tl.constexpr, POOLED: tl.constexpr, ALL: tl.constexpr, BITS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """List the rows of this share whose team one of the heads ``first_head .. first_head + HB - 1`` selected (POOLED:
    any head; ALL: those of any team), if BITS with the bits of these heads. Returns how many rows are listed, and how
    many are in the union.

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
        if BITS and not POOLED and not ALL:
            tl.store(p_bits + i_slot, b_bits, mask=m_row)
        listed += tl.sum(m_row.to(tl.int32), 0)
        union += tl.sum((b_group != 0).to(tl.int32), 0)
        i_row, i_team = share_rows(p_team_of_row, start + LANES, N, per_share, i_share, shares, LANES)
    return listed, union


@triton.jit
def list_runs(
    i_team, p_team_of_row, p_flags, p_runs, N, per_share, i_share, shares, MP, first_head, HB: tl.constexpr,
    WORDS: tl.constexpr, POOLED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """List the runs of this share with a row of the union, by their number in the share; returns how many they are. The
    teams of the first LANES rows come loaded."""
    found = 0
    for start in range(0, per_share, LANES):
        _, b_group = team_bits(p_flags, i_team, i_team >= 0, MP, first_head, HB=HB, WORDS=WORDS, POOLED=POOLED)
        b_selected = (b_group != 0).to(tl.int32)
        b_run = tl.max(tl.reshape(b_selected, (LANES // RUN, RUN)), 1)  # [LANES / RUN]
        i_run = start // RUN + tl.arange(0, LANES // RUN)
        tl.store(p_runs + found + tl.cumsum(b_run, 0) - 1, i_run, mask=b_run != 0)
        found += tl.sum(b_run, 0)
        _, i_team = share_rows(p_team_of_row, start + LANES, N, per_share, i_share, shares, LANES)
    tl.debug_barrier()
    return found


@triton.jit
def append_runs(
    found, p_runs, p_team_of_row, p_flags, p_rows, p_teams, p_bits, N, i_share, shares, MP, first_head,
    HB: tl.constexpr, WORDS: tl.constexpr, POOLED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """:func:`append_union` over the ``found`` runs that :func:`list_runs` listed."""
    listed = 0
    union = 0
    for start in range(0, found * RUN, LANES):
        i = start + tl.arange(0, LANES)
        i_run = tl.load(p_runs + i // RUN, mask=i < found * RUN, other=0)
        i_row = (i_run * shares + i_share) * RUN + i % RUN
        i_team = tl.load(p_team_of_row + i_row, mask=(i < found * RUN) & (i_row < N), other=-1)
        b_bits, b_group = team_bits(p_flags, i_team, i_team >= 0, MP, first_head, HB=HB, WORDS=WORDS, POOLED=POOLED)
        m_row = b_bits != 0
        i_slot = listed + tl.cumsum(m_row.to(tl.int32), 0) - 1
        tl.store(p_rows + i_slot, i_row, mask=m_row)
        tl.store(p_teams + i_slot, i_team, mask=m_row)
        if not POOLED:
            tl.store(p_bits + i_slot, b_bits, mask=m_row)
        listed += tl.sum(m_row.to(tl.int32), 0)
        union += tl.sum((b_group != 0).to(tl.int32), 0)
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


@triton.jit
def list_piece(
    team_of_row, flags, index, visible, visible_stride, piece_rows, piece_teams, piece_counts, i_piece, pieces, i_block,
    blocks, i_bg, N, E, MP, G, CAPACITY, HB: tl.constexpr, WORDS: tl.constexpr, POOLED: tl.constexpr,
    MASKED: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """List the rows of one piece of a share for one head block; POOLED: there is one, of all heads.

    Writes ``piece_rows, piece_teams (B G, blocks, pieces, CAPACITY)`` and ``piece_counts (B G, blocks, pieces, 3)``:
    rows listed, and among the piece's rows those of the group's union and of the suffix.
    """
    i_list = (i_bg.to(tl.int64) * blocks + i_block) * pieces + i_piece
    p_rows = piece_rows + i_list * CAPACITY
    p_teams = piece_teams + i_list * CAPACITY
    p_team_of_row = team_of_row + i_bg.to(tl.int64) * N
    per_piece = tl.cdiv(tl.cdiv(N, RUN), pieces) * RUN
    i_first_rows, i_first_teams = share_rows(p_team_of_row, 0, N, per_piece, i_piece, pieces, LANES)
    wait(PDL)
    listed, union = append_union(
        i_first_rows, i_first_teams, p_team_of_row, flags + i_bg.to(tl.int64) * WORDS * MP, p_rows, p_teams, p_rows, N,
        per_piece, i_piece, pieces, MP, i_block * HB, HB=HB, WORDS=WORDS, POOLED=POOLED, ALL=False, BITS=False,
        LANES=LANES,
    )  # fmt: skip
    total = append_suffix(
        index, visible, visible_stride, p_rows, p_teams, listed, E, i_bg // G, i_piece, pieces, MASKED=MASKED,
        LANES=LANES,
    )  # fmt: skip
    tl.store(piece_counts + i_list * 3, total)
    tl.store(piece_counts + i_list * 3 + 1, union)
    tl.store(piece_counts + i_list * 3 + 2, total - listed)


@triton.jit
def sum_of(p_counts):
    """The sum of one count over the pieces of a share."""
    return tl.sum(tl.load(p_counts + 3 * tl.arange(0, PIECES)), 0)


@triton.jit
def joined_pieces(
    p_counts, p_piece_rows, p_piece_teams, pooled, p_rows, p_teams, p_bias, first_team, CAPACITY, POOLED: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Write the four lists of one share's pieces, each with room for CAPACITY rows, one behind the other; the teams, or
    POOLED the rows' log corrections. Returns how many rows there are."""
    first, second, third = tl.load(p_counts), tl.load(p_counts + 3), tl.load(p_counts + 6)
    total = sum_of(p_counts)
    for start in range(0, total, LANES):
        i_slot = start + tl.arange(0, LANES)
        m_slot = i_slot < total
        i_place = i_slot + tl.where(i_slot >= first, CAPACITY - first, 0)
        i_place += tl.where(i_slot >= first + second, CAPACITY - second, 0)
        i_place += tl.where(i_slot >= first + second + third, CAPACITY - third, 0)
        i_team = tl.load(p_piece_teams + i_place, mask=m_slot, other=-1)
        tl.store(p_rows + i_slot, tl.load(p_piece_rows + i_place, mask=m_slot, other=0), mask=m_slot)
        if POOLED:
            b_bias = tl.load(pooled + first_team + i_team, mask=i_team >= 0, other=0.0)
            tl.store(p_bias + i_slot, b_bias, mask=m_slot)
        else:
            tl.store(p_teams + i_slot, i_team, mask=m_slot)
    tl.debug_barrier()
    return total
