"""Requests in a paged cache, as the launches see them: which teams they sample, and where their rows are."""

from __future__ import annotations

import triton
import triton.language as tl

from .rowlist import RUN, team_bits

PAIR = tl.constexpr(2)  # neighbouring parents that stay in one share


@triton.jit
def sampled_teams(n, wants_all, K, dense_below, SIZE: tl.constexpr, SLOTS: tl.constexpr):
    """Teams of the full blocks of requests with ``n`` rows; 0 where a request attends to all of its rows."""
    teams = tl.maximum(n - 1, 0) // SIZE * SLOTS
    return tl.where((wants_all == 0) & (n >= dense_below) & (teams > K), teams, 0)


@triton.jit
def request(seq_lens, dense, i_b, K, dense_below, SIZE: tl.constexpr, SLOTS: tl.constexpr, FLAGGED: tl.constexpr):
    """Rows of a request, and the teams it samples. FLAGGED: ``dense`` says who attends to all rows."""
    n = tl.load(seq_lens + i_b)
    wants_all = n * 0
    if FLAGGED:
        wants_all = tl.load(dense + i_b).to(tl.int32)
    return n, sampled_teams(n, wants_all, K, dense_below, SIZE, SLOTS)


@triton.jit
def tiles_before(
    seq_lens, dense, B, K, dense_below, BATCH: tl.constexpr, T: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr,
    FLAGGED: tl.constexpr,
):  # fmt: skip
    """Tiles of T teams that each of the requests ``[BATCH]`` and those before it sample, and all there are."""
    i_b = tl.arange(0, BATCH)
    b_rows = tl.load(seq_lens + i_b, mask=i_b < B, other=0)
    wants_all = b_rows * 0
    if FLAGGED:
        wants_all = tl.load(dense + i_b, mask=i_b < B, other=0).to(tl.int32)
    b_end = tl.cumsum(tl.cdiv(sampled_teams(b_rows, wants_all, K, dense_below, SIZE, SLOTS), T), 0)
    return b_end, tl.max(b_end, 0)


@triton.jit
def tile_at(b_end, i):
    """The request that has the batch's ``i``-th tile, and the tile's number in it. So programs walk over the tiles of
    all requests, whatever their lengths, and those beyond the last tile leave at once."""
    m_before = b_end <= i
    return tl.sum(m_before.to(tl.int32), 0), i - tl.max(tl.where(m_before, b_end, 0), 0)


@triton.jit
def share_of_rows(p_table, team, n, grouped, i_share, shares, SIZE: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
                  LANES: tl.constexpr):  # fmt: skip
    """The first LANES rows of this share: their places in the cache, their teams (-1 from row ``grouped`` on), and
    which exist. Runs of 8 rows are dealt in turn, as in :func:`.rowlist.share_rows`."""
    i = tl.arange(0, LANES)
    i_own = ((i // RUN) * shares + i_share) * RUN + i % RUN  # [LANES], within the request
    m_row = i_own < n
    m_grouped = m_row & (i_own < grouped)
    i_row = tl.load(p_table + i_own // SIZE, mask=m_row, other=0) * SIZE + i_own % SIZE
    b_team = tl.load(team + i_row, mask=m_grouped, other=0).to(tl.int32)
    return i_row, tl.where(m_grouped, i_own // P * R + b_team, -1), m_row


@triton.jit
def parents_of_share(
    p_flags, p_parents, parents, i_share, shares, MP, R: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr
):
    """List the parents of this share of which any head selected a team; how many. Pairs of parents are dealt in turn:
    the flags of their teams fill a sector of 32 bytes."""
    listed = 0
    for start in range(0, tl.cdiv(tl.cdiv(parents, PAIR), shares) * PAIR, LANES):
        i = start + tl.arange(0, LANES)
        i_parent = ((i // PAIR) * shares + i_share) * PAIR + i % PAIR  # [LANES]
        b_any = tl.zeros((LANES,), tl.int32)
        for i_word in tl.static_range(WORDS):
            for u in tl.static_range(R):
                b_any |= tl.load(p_flags + i_word * MP + i_parent * R + u, mask=i_parent < parents, other=0)
        m_listed = b_any != 0
        tl.store(p_parents + listed + tl.cumsum(m_listed.to(tl.int32), 0) - 1, i_parent, mask=m_listed)
        listed += tl.sum(m_listed.to(tl.int32), 0)
    return listed


@triton.jit
def list_selected(
    i_row, i_team, m_row, p_flags, p_rows, p_teams, p_bits, listed, MP, first_head, HB: tl.constexpr,
    WORDS: tl.constexpr, POOLED: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Add to the list those of the rows ``[LANES]`` that the heads ``first_head .. first_head + HB - 1`` read: rows of
    teams that one of them selected (POOLED: any head), with the heads' bits, and rows in no team (-1). Returns how many
    are listed now, and how many of these are in the union of all heads."""
    union = 0
    m_listed = m_row
    if not ALL:
        b_bits, b_group = team_bits(p_flags, i_team, i_team >= 0, MP, first_head, HB=HB, WORDS=WORDS, POOLED=POOLED)
        m_listed = m_row & ((b_bits != 0) | (i_team < 0))
        union = tl.sum((b_group != 0).to(tl.int32), 0)
    i_slot = listed + tl.cumsum(m_listed.to(tl.int32), 0) - 1
    tl.store(p_rows + i_slot, i_row, mask=m_listed)
    tl.store(p_teams + i_slot, i_team, mask=m_listed)
    if not POOLED and not ALL:
        tl.store(p_bits + i_slot, b_bits, mask=m_listed)
    return listed + tl.sum(m_listed.to(tl.int32), 0), union


@triton.jit
def list_rows_of(
    i_row, i_team, m_row, p_table, team, p_flags, p_rows, p_teams, p_bits, p_parents, n, grouped, i_share, shares, MP,
    first_head, SIZE: tl.constexpr, P: tl.constexpr, R: tl.constexpr, HB: tl.constexpr, WORDS: tl.constexpr,
    POOLED: tl.constexpr, ALL: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """List the rows of this share that the block of heads reads; how many, and how many are in the union of all heads.

    The first LANES rows and their teams come loaded, as they do not depend on the selection; often they are all. A
    longer share looks for its parents with a selected team, few of many, and only at their rows.
    """
    listed = 0
    union = 0
    if tl.cdiv(tl.cdiv(n, RUN), shares) * RUN <= LANES:
        listed, union = list_selected(
            i_row, i_team, m_row, p_flags, p_rows, p_teams, p_bits, 0, MP, first_head, HB=HB, WORDS=WORDS,
            POOLED=POOLED, ALL=ALL,
        )  # fmt: skip
    else:
        if not ALL:
            parents = parents_of_share(
                p_flags, p_parents, grouped // P, i_share, shares, MP, R=R, WORDS=WORDS, LANES=LANES
            )  # fmt: skip
            tl.debug_barrier()
            for start in range(0, parents * P, LANES):
                i = start + tl.arange(0, LANES)
                m_now = i < parents * P
                i_parent = tl.load(p_parents + i // P, mask=m_now, other=0)  # [LANES]
                i_own = i_parent * P + i % P
                i_now = tl.load(p_table + i_own // SIZE, mask=m_now, other=0) * SIZE + i_own % SIZE
                b_team = tl.load(team + i_now, mask=m_now, other=0).to(tl.int32)
                listed, more = list_selected(
                    i_now, tl.where(m_now, i_parent * R + b_team, -1), m_now, p_flags, p_rows, p_teams, p_bits, listed,
                    MP, first_head, HB=HB, WORDS=WORDS, POOLED=POOLED, ALL=ALL,
                )  # fmt: skip
                union += more
        for start in range(0, tl.cdiv(tl.cdiv(n - grouped, RUN), shares) * RUN, LANES):  # rows in no team
            i = start + tl.arange(0, LANES)
            i_own = grouped + ((i // RUN) * shares + i_share) * RUN + i % RUN
            m_now = i_own < n
            i_now = tl.load(p_table + i_own // SIZE, mask=m_now, other=0) * SIZE + i_own % SIZE
            listed, _ = list_selected(
                i_now, i * 0 - 1, m_now, p_flags, p_rows, p_teams, p_bits, listed, MP, first_head, HB=HB, WORDS=WORDS,
                POOLED=POOLED, ALL=True,
            )  # fmt: skip
    return listed, union
