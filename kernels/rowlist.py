"""The rows that one attention program reads: its share of the union's rows and of the exact suffix, as a list."""

from __future__ import annotations

import triton
import triton.language as tl

RUN = tl.constexpr(8)  # neighbouring rows that stay in one share: a 32-byte sector of their team numbers


@triton.jit
def share_rows(team_of_row, start, N, per, share, shares, LANES: tl.constexpr):
    """Rows ``start .. start + LANES - 1`` of this share and their teams, -1 where there is none.

    Runs of 8 rows are dealt to the shares in turn, so that a cluster of selected neighbours or a large team is spread
    over them. (Dealing whole teams reads less, but fills some shares more than others: slower, see NOTES.md.)
    """
    i = start + tl.arange(0, LANES)
    row = ((i // RUN) * shares + share) * RUN + i % RUN
    return row, tl.load(team_of_row + row, mask=(row < N) & (i < per), other=-1)


@triton.jit
def append_union(
    row, team, team_of_row, flags, rows, teams, bits, N, per, share, shares, MP, h0, HB: tl.constexpr,
    WORDS: tl.constexpr, POOLED: tl.constexpr, ALL: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """List this share's rows whose team one of the heads ``h0 .. h0 + HB - 1`` selected (POOLED: any head; ALL: those
    of any team), with the bits of these heads. Returns how many are listed, and how many are in the union.

    The first LANES rows and their teams come loaded: they do not depend on the selection.
    """
    held = 0
    union = 0
    for start in range(0, per, LANES):
        own = (team >= 0).to(tl.int32)
        any = own
        if not ALL:
            any = tl.zeros((LANES,), tl.int32)
            word_of_heads = any
            for word in tl.static_range(WORDS):
                found = tl.load(flags + word * MP + team, mask=team >= 0, other=0)
                any |= found
                word_of_heads = tl.where(word == h0 // 32, found, word_of_heads)
            own = any
            if not POOLED:
                own = word_of_heads >> (h0 % 32)
                if HB < 32:
                    own = own & ((1 << HB) - 1)
        wanted = own != 0
        place = held + tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(rows + place, row, mask=wanted)
        tl.store(teams + place, team, mask=wanted)
        if not POOLED and not ALL:
            tl.store(bits + place, own, mask=wanted)
        held += tl.sum(wanted.to(tl.int32), 0)
        union += tl.sum((any != 0).to(tl.int32), 0)
        row, team = share_rows(team_of_row, start + LANES, N, per, share, shares, LANES)
    return held, union


@triton.jit
def append_suffix(
    index, visible, visible_b, rows, teams, held, E, b, share, shares, MASKED: tl.constexpr, LANES: tl.constexpr
):
    """List this share's visible suffix rows behind the ``held`` rows listed, as team -1; the new total is returned."""
    for start in range(0, tl.cdiv(E, shares), LANES):
        e = (start + tl.arange(0, LANES)) * shares + share
        wanted = e < E
        if MASKED:
            wanted = tl.load(visible + b.to(tl.int64) * visible_b + e, mask=wanted, other=0) != 0
        place = held + tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(rows + place, tl.load(index + e, mask=wanted, other=0).to(tl.int32), mask=wanted)
        tl.store(teams + place, tl.full((LANES,), -1, tl.int32), mask=wanted)
        held += tl.sum(wanted.to(tl.int32), 0)
    return held
