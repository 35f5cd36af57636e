"""Requests in a paged cache, as the launches see them: which teams they sample, and where their rows are."""

from __future__ import annotations

import triton
import triton.language as tl

from .rowlist import RUN, team_bits


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
def share_of_rows(p_table, team, start, n, grouped, i_share, shares, SIZE: tl.constexpr, P: tl.constexpr,
                  R: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """Rows ``start .. start + LANES - 1`` of this share: their places in the cache, their teams (-1 from row
    ``grouped`` on), and which exist. Runs of 8 rows are dealt in turn, as in :func:`.rowlist.share_rows`."""
    i = start + tl.arange(0, LANES)
    i_own = ((i // RUN) * shares + i_share) * RUN + i % RUN  # [LANES], within the request
    m_row = i_own < n
    m_grouped = m_row & (i_own < grouped)
    i_row = tl.load(p_table + i_own // SIZE, mask=m_row, other=0) * SIZE + i_own % SIZE
    b_team = tl.load(team + i_row, mask=m_grouped, other=0).to(tl.int32)
    return i_row, tl.where(m_grouped, i_own // P * R + b_team, -1), m_row


@triton.jit
def list_rows_of(
    i_row, i_team, m_row, p_table, team, p_flags, p_rows, p_teams, p_bits, n, grouped, i_share, shares, MP, first_head,
    SIZE: tl.constexpr, P: tl.constexpr, R: tl.constexpr, HB: tl.constexpr, WORDS: tl.constexpr, POOLED: tl.constexpr,
    ALL: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """List the rows of this share that the heads ``first_head .. first_head + HB - 1`` read: rows of teams that one of
    them selected (POOLED: any head), with the heads' bits, and rows in no team. Returns how many are listed, and how
    many are in the union of all heads.

    The first LANES rows and their teams come loaded: they do not depend on the selection.
    """
    listed = 0
    union = 0
    per_share = tl.cdiv(tl.cdiv(n, RUN), shares) * RUN
    for start in range(0, per_share, LANES):
        m_listed = m_row
        if not ALL:
            m_team = i_team >= 0
            b_bits, b_group = team_bits(p_flags, i_team, m_team, MP, first_head, HB=HB, WORDS=WORDS, POOLED=POOLED)
            m_listed = m_row & ((b_bits != 0) | (i_team < 0))
            union += tl.sum((b_group != 0).to(tl.int32), 0)
        i_slot = listed + tl.cumsum(m_listed.to(tl.int32), 0) - 1
        tl.store(p_rows + i_slot, i_row, mask=m_listed)
        tl.store(p_teams + i_slot, i_team, mask=m_listed)
        if not POOLED and not ALL:
            tl.store(p_bits + i_slot, b_bits, mask=m_listed)
        listed += tl.sum(m_listed.to(tl.int32), 0)
        i_row, i_team, m_row = share_of_rows(
            p_table, team, start + LANES, n, grouped, i_share, shares, SIZE=SIZE, P=P, R=R, LANES=LANES
        )  # fmt: skip
    return listed, union
