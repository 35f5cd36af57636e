"""Row lists and pooled corrections of many heads, both from what the selection marked: one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from .pool import pool_redrawn
from .rowlist import list_piece


@triton.jit(do_not_specialize=["E", "visible_stride", "layer", "quad", "pieces", "blocks"])
def list_many_kernel(
    team_of_row, flags, index, visible, visible_stride, piece_rows, piece_teams, piece_counts, noisy, tau, kth, count,
    key, step, listed_teams, listed_log_c, pooled, layer, quad, pieces, blocks, N, E, MP, G, CAPACITY, PLACES, H,
    HB: tl.constexpr, POOL_HB: tl.constexpr, T: tl.constexpr, WORDS: tl.constexpr, POOLED: tl.constexpr,
    LISTED: tl.constexpr, SHARED: tl.constexpr, MASKED: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, sequence * G + group) lists the i-th piece (:func:`~.rowlist.list_piece`) of the head blocks, one
    behind the other; POOLED: those beyond the pieces pool the corrections of T places (:func:`~.pool.pool_redrawn`)."""
    i_list, i_bg = tl.program_id(0), tl.program_id(1)
    if i_list < pieces * blocks:
        list_piece(
            team_of_row, flags, index, visible, visible_stride, piece_rows, piece_teams, piece_counts, i_list % pieces,
            pieces, i_list // pieces, blocks, i_bg, N, E, MP, G, CAPACITY, HB=HB, WORDS=WORDS, POOLED=POOLED,
            MASKED=MASKED, LANES=LANES, PDL=PDL,
        )  # fmt: skip
    elif POOLED:
        pool_redrawn(
            noisy, tau, kth, flags, count, key, step, listed_teams, listed_log_c, pooled, i_list - pieces * blocks,
            i_bg, layer, quad, PLACES, MP, G, H, WORDS, T=T, HB=POOL_HB, LISTED=LISTED, SHARED=SHARED, PDL=PDL,
        )  # fmt: skip
