"""Selection of many teams per head, where ranking all candidates against all (`select.py`) stops paying.

One program per head, and no vector is as long as K or M. The (K+1)-st largest block maximum bounds the threshold from
below; the blocks that reach it are listed, and the (K+1)-st largest of their scores is tau. Both are found by digits:
counts of what lies in each of 128 equal stretches narrow the interval to one stretch, four times over for float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .draws import gumbel_head, sequence_key
from .maths import log_inclusion
from .parents import prepare_teams
from .select import PARENTS, mark, packed, places_in_use, teams_at

BINS = tl.constexpr(128)


@triton.jit
def ordered(x):
    """Scores as uint32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def score_of(key):
    """The inverse of :func:`ordered`."""
    bits = (key ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_scores(p_scores, p_blocks, lanes, start, n, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """``LANES`` scores from lane ``start`` on, their places, and which are real: below ``n``, in one of the blocks that
    ``p_blocks`` lists. BLOCK 1: all places, without a list."""
    i_lane = start + tl.arange(0, LANES)  # [LANES]
    m_lane = i_lane < lanes
    i_place = i_lane
    if BLOCK > 1:
        i_place = tl.load(p_blocks + i_lane // BLOCK, mask=m_lane, other=0) * BLOCK + i_lane % BLOCK
        m_lane = m_lane & (i_place < n)
    return tl.load(p_scores + i_place, mask=m_lane, other=float("-inf")), i_place, m_lane


@triton.jit
def largest(p_scores, p_blocks, lanes, n, rank, low, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """The score at ``rank``, 1 for the largest, and how many exceed it. ``low`` is known not to exceed it; it is the
    answer where there are fewer scores."""
    bottom = ordered(low)
    b_top = tl.full((LANES,), float("-inf"), tl.float32)  # [LANES]
    for start in range(0, lanes, LANES):
        b_score, _, _ = load_scores(p_scores, p_blocks, lanes, start, n, LANES=LANES, BLOCK=BLOCK)
        b_top = tl.maximum(b_top, b_score)
    width = ordered(tl.maximum(tl.max(b_top, 0), low)) - bottom  # the interval is bottom .. bottom + width
    shift = bottom * 0
    while (width >> shift) >= BINS:
        shift += 1
    i_bin = tl.arange(0, BINS)
    left = rank
    searching = True
    while searching:
        b_count = tl.zeros((BINS,), tl.int32)  # [BINS]
        for start in range(0, lanes, LANES):
            b_score, _, m_score = load_scores(p_scores, p_blocks, lanes, start, n, LANES=LANES, BLOCK=BLOCK)
            b_key = ordered(b_score)
            m_inside = m_score & (b_key >= bottom)
            b_away = tl.where(m_inside, b_key - bottom, 0)
            m_inside = m_inside & (b_away <= width)
            b_bin = tl.where(m_inside, b_away >> shift, 0)
            b_count += tl.histogram(b_bin.to(tl.int32), BINS, mask=m_inside)
        b_above = tl.sum(b_count, 0) - tl.cumsum(b_count, 0)  # in higher bins
        m_bin = (b_above < left) & (b_above + b_count >= left)
        left -= tl.sum(tl.where(m_bin, b_above, 0), 0)
        bottom += tl.sum(tl.where(m_bin, i_bin, 0), 0).to(tl.uint32) << shift
        searching = shift > 0
        width = ((bottom * 0 + 1) << shift) - 1
        shift = tl.where(shift > 7, shift - 7, 0).to(tl.uint32)
    return score_of(bottom), rank - left


@triton.jit
def draw_many(
    p_tops, p_noisy, p_flags, p_union, p_corrections, p_blocks, p_found, n, seed, now, listed_teams, listed_parents,
    parent_log_c, layer, quad, K, i_bg, i_h, H, PLACES, MP, CP, BLOCK: tl.constexpr, LANES: tl.constexpr,
    OF: tl.constexpr, POOLED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """:func:`.select.draw_teams` for any K and M."""
    lowest = tl.full((), float("-inf"), tl.float32)
    maxima = tl.cdiv(n, BLOCK)
    # K + 1 blocks reach it, so K + 1 scores do
    bound, _ = largest(p_tops, p_blocks, maxima, maxima, K + 1, lowest, LANES=LANES, BLOCK=1)
    listed = 0
    for start in range(0, maxima, LANES):
        b_top, i_block, m_block = load_scores(p_tops, p_blocks, maxima, start, maxima, LANES=LANES, BLOCK=1)
        m_block = m_block & (b_top >= bound) & (b_top > float("-inf"))
        i_slot = listed + tl.cumsum(m_block.to(tl.int32), 0) - 1
        tl.store(p_blocks + i_slot, i_block, mask=m_block)
        listed += tl.sum(m_block.to(tl.int32), 0)
    tl.debug_barrier()
    lanes = listed * BLOCK
    # lines 9-10: tau; of the scores that equal it the lower teams' are taken, as many as there is room for
    b_tau, above = largest(p_noisy, p_blocks, lanes, n, K + 1, bound, LANES=LANES, BLOCK=BLOCK)
    room = tl.where(b_tau == float("-inf"), 0, K - above)
    taken = 0
    b_least = tl.full((LANES,), float("inf"), tl.float32)  # [LANES]
    for start in range(0, lanes, LANES):
        b_score, i_place, m_score = load_scores(p_noisy, p_blocks, lanes, start, n, LANES=LANES, BLOCK=BLOCK)
        m_picked = m_score & (b_score > b_tau)
        if room > 0:
            m_equal = (m_score & (b_score == b_tau)).to(tl.int32)
            m_picked = m_picked | ((m_equal != 0) & (tl.cumsum(m_equal, 0) <= room))
            room -= tl.minimum(tl.sum(m_equal, 0), room)
        i_slot = taken + tl.cumsum(m_picked.to(tl.int32), 0) - 1
        tl.store(p_found + i_slot, packed(b_score, i_place), mask=m_picked)
        taken += tl.sum(m_picked.to(tl.int32), 0)
        b_least = tl.minimum(b_least, tl.where(m_picked, b_score, float("inf")))
    tl.debug_barrier()
    for start in range(0, taken, LANES):
        i_slot = start + tl.arange(0, LANES)
        m_slot = i_slot < taken
        b_pair = tl.load(p_found + i_slot, mask=m_slot, other=0)  # [LANES]
        b_noisy = (b_pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        i_team, b_before = teams_at(
            b_pair.to(tl.int32), m_slot, listed_teams, listed_parents, parent_log_c, i_bg, i_h, H, PLACES, CP,
            OF=OF, POOLED=POOLED,
        )  # fmt: skip
        # line 11: log c_g from phi_g - tau
        b_phi = b_noisy - gumbel_head(seed, i_team, quad, i_h, now, layer, SHARED)
        b_log_c = log_inclusion(b_phi - b_tau) + b_before
        mark(p_flags, p_union, p_corrections, i_team, i_h, H, MP, b_log_c, m_slot, OF=OF)
    return tl.where(taken == K, tl.min(b_least, 0), float("-inf")), b_tau


@triton.jit(do_not_specialize=["layer", "quad", "K"])
def select_many_kernel(
    tops, noisy, flags, union, corrections, count, key, step, listed_teams, listed_parents, parent_log_c, of_team,
    first_team, team_flags, blocks, found, tau, kth, layer, quad, K, PLACES, MP, CP, TEAMS, TEAMS_PADDED, G, H, WORDS,
    ROOM, BLOCK: tl.constexpr, LANES: tl.constexpr, OF: tl.constexpr, POOLED: tl.constexpr, SHARED: tl.constexpr,
    PREPARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """:func:`.select.select_kernel` for any K and M. ``blocks (B G, H, PLACES / BLOCK)`` and ``found (B G, H, ROOM)``,
    ROOM at least K, are scratch; LANES scores are looked at in one go."""
    i_h = tl.program_id(0)
    i_bg = tl.program_id(1)
    i_b, i_g = i_bg // G, i_bg % G
    seed = sequence_key(key, i_b)
    now = tl.load(step + i_b)
    i_bgh = i_bg.to(tl.int64) * H + i_h
    p_tops = tops + i_bgh * (PLACES // BLOCK)
    p_noisy = noisy + i_bgh * PLACES
    p_corrections = corrections + i_bg.to(tl.int64) * MP * H + i_h
    p_flags = flags + i_bg.to(tl.int64) * WORDS * MP
    p_union = union + i_bg.to(tl.int64) * (MP // 32)
    p_blocks = blocks + i_bgh * (PLACES // BLOCK)
    p_found = found + i_bgh * ROOM
    if OF == PARENTS:
        # before the wait: no launch that still runs looks at it
        prepare_teams(
            of_team + i_bg.to(tl.int64) * TEAMS, first_team + i_bg.to(tl.int64) * MP,
            team_flags + i_bg.to(tl.int64) * WORDS * TEAMS_PADDED, TEAMS, TEAMS_PADDED, WORDS, i_h, H, LANES=PREPARE,
        )  # fmt: skip
    n, everything = places_in_use(count + i_bg, K, OF=OF, PDL=PDL)
    if everything:
        # lines 3-5: all teams, c = 1
        for start in range(0, n, LANES):
            i_team = start + tl.arange(0, LANES)
            b_log_c = tl.zeros((LANES,), tl.float32)
            mark(p_flags, p_union, p_corrections, i_team, i_h, H, MP, b_log_c, i_team < n, OF=OF)
        tl.store(tau + i_bgh, float("-inf"))
        tl.store(kth + i_bgh, float("-inf"))
    else:
        b_kth, b_tau = draw_many(
            p_tops, p_noisy, p_flags, p_union, p_corrections, p_blocks, p_found, n, seed, now, listed_teams,
            listed_parents, parent_log_c, layer, quad + i_g * 65536, K, i_bg, i_h, H, PLACES, MP, CP, BLOCK=BLOCK,
            LANES=LANES, OF=OF, POOLED=POOLED, SHARED=SHARED,
        )  # fmt: skip
        tl.store(tau + i_bgh, b_tau)
        tl.store(kth + i_bgh, b_kth)
