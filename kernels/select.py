"""Selection: each head's K teams, its threshold tau, its corrections and its marks in the union (Algorithm 1, 9-11).

One program per head. The (K+1)-st largest of a few coarse maxima bounds the threshold from below. Blocks of teams whose
maximum reaches the bound are listed, then their scores that reach it, few more than K + 1, and these are ranked by
counting how many exceed each. A step costs what its exchanges between warps cost (a sum 300 cycles, a running count of
a thousand values 700, a list written and read back 1,000), so there are few of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import wait
from .draws import gumbel_head, sequence_key
from .maths import log_inclusion
from .parents import prepare_teams


@triton.jit
def ranks(x):
    """How many of the float32 ``x`` exceed each; few values, all compared with all. The sum over the first axis stays
    in registers but for one exchange between warps; over the second it would be one reduction per value."""
    return tl.sum((x[:, None] > x[None, :]).to(tl.int32), 0)


@triton.jit
def at_rank(x, rank_of, rank):
    """The value of ``x`` that ``rank`` others exceed, equal ones counted apart; ``rank_of`` as :func:`ranks` gives."""
    return tl.min(tl.where(rank_of <= rank, x, float("inf")), 0)


@triton.jit
def two_ranks(x, rank_of, rank):
    """The values at ``rank`` and at the rank below it."""
    infinite = float("inf")
    return tl.reduce((tl.where(rank_of <= rank, x, infinite), tl.where(rank_of <= rank + 1, x, infinite)), 0, smaller)


@triton.jit
def smaller(a0, a1, b0, b1):
    """The smaller of two pairs, each place by itself."""
    return tl.minimum(a0, b0), tl.minimum(a1, b1)


@triton.jit
def first_reaching(x, bound, room):
    """Which of the float32 ``x`` exceed ``bound`` or equal it, ``room`` in all: of equal ones those of lower places."""
    m_equal = x == bound
    left = room - tl.sum((x > bound).to(tl.int32), 0)
    return (x > bound) | (m_equal & (tl.cumsum(m_equal.to(tl.int32), 0) <= left))


@triton.jit
def packed(x, i_team):
    """A score and its team in one 64-bit word."""
    return (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | i_team.to(tl.int64)


@triton.jit
def raised(x, bound, need, room):
    """A bound above ``bound``, which too many of the float32 ``x`` reach: at least ``need`` reach it, and no more than
    ``room`` unless equal values leave no choice. Halves the interval each time, for rare crowds."""
    top = tl.max(x, 0)
    bound = tl.min(tl.where((x >= bound) & (x > float("-inf")), x, float("inf")), 0)
    reached = room + 1
    moved = bound < top
    while (reached > room) & moved:
        # finite below an infinite maximum; and the maximum itself, which many may equal, once nothing lies between
        middle = tl.minimum(0.5 * bound + 0.5 * top, 3.4028234663852886e38)
        middle = tl.where(middle > bound, middle, top)
        reach_middle = tl.sum((x >= middle).to(tl.int32), 0)
        enough = reach_middle >= need
        moved = tl.where(enough, middle > bound, middle < top)
        reached = tl.where(enough, reach_middle, reached)
        bound, top = tl.where(enough, middle, bound), tl.where(enough, top, middle)
    return bound


@triton.jit
def reaching(x, bound, need, room):
    """Which of the float32 ``x`` reach ``bound``, or a higher one where they are more than ``room``; the bound; and
    how many they are."""
    m_reach = (x >= bound) & (x > float("-inf"))
    reached = tl.sum(m_reach.to(tl.int32), 0)
    if reached > room:
        bound = raised(x, bound, need, room)
        m_reach = first_reaching(x, bound, room)
        reached = tl.sum(m_reach.to(tl.int32), 0)
    return m_reach, bound, reached


# what a selection draws from
TEAMS, PARENTS, LISTED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def mark(p_flags, p_union, p_corrections, i_team, i_h, H, MP, b_log_c, m_team, OF: tl.constexpr):
    """Enter the teams of a head in the union, 32 heads per word, with the head's log corrections; parents also among
    the union's bits."""
    bit = (tl.zeros_like(i_team) + 1) << (i_h % 32)
    tl.atomic_or(p_flags + (i_h // 32) * MP + i_team, bit, mask=m_team, sem="relaxed")
    tl.store(p_corrections + i_team * H, b_log_c, mask=m_team)
    if OF == PARENTS:
        bit = (tl.zeros_like(i_team) + 1) << (i_team % 32)
        tl.atomic_or(p_union + i_team // 32, bit, mask=m_team, sem="relaxed")


@triton.jit
def places_in_use(p_count, K, OF: tl.constexpr, PDL: tl.constexpr):
    """How many places have a score, and whether all of them are selected without looking at it. The launch before
    writes how many places of a list there are."""
    if OF == LISTED:
        # fewer teams than K are selected like any: their threshold is -inf
        wait(PDL)
        n = tl.load(p_count)
        everything = n == 0
    else:
        n = tl.load(p_count)
        everything = n <= K
        wait(PDL)
    return n, everything


@triton.jit
def teams_at(
    i_place, m_place, listed_teams, listed_parents, parent_log_c, i_bg, i_h, H, PLACES, CP, OF: tl.constexpr,
    POOLED: tl.constexpr,
):  # fmt: skip
    """The teams or parents at the places, and the log c_p that a per-head correction of listed teams begins with."""
    i_team = i_place
    b_before = tl.zeros(i_place.shape, tl.float32)
    if OF == LISTED:
        o_list = i_bg.to(tl.int64) * PLACES + i_place
        i_team = tl.load(listed_teams + o_list, mask=m_place, other=0)
        if not POOLED:
            i_parent = tl.load(listed_parents + o_list, mask=m_place, other=0)
            p_parent_log_c = parent_log_c + i_bg.to(tl.int64) * CP * H + i_h
            b_before = tl.load(p_parent_log_c + i_parent * H, mask=m_place, other=0.0)
    return i_team, b_before


@triton.jit
def draw_teams(
    p_tops, p_noisy, p_flags, p_union, p_corrections, p_blocks, p_found, n, seed, now, listed_teams, listed_parents,
    parent_log_c, layer, quad, K, i_bg, i_h, H, PLACES, MP, CP, BLOCK: tl.constexpr, NT: tl.constexpr,
    COARSE: tl.constexpr, NB: tl.constexpr, ROOM: tl.constexpr, OF: tl.constexpr, POOLED: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Find and mark the K teams of one head among the scores at its first ``n`` places; returns the K-th and (K+1)-st
    largest score. Pointers are the head's own; the rest as in :func:`select_kernel`."""
    i_block = tl.arange(0, NT)
    b_top = tl.load(p_tops + i_block, mask=i_block < tl.cdiv(n, BLOCK), other=float("-inf"))  # [NT]
    bound = tl.full((), float("-inf"), tl.float32)
    if COARSE > 0:
        # maxima that are far apart share a coarse one, so that neighbours do not hide one another; with fewer than
        # K + 1 real ones the bound is -inf
        b_coarse = tl.max(tl.reshape(b_top, (NT // COARSE, COARSE)), 0)  # [COARSE]
        bound = at_rank(b_coarse, ranks(b_coarse), K)
    m_block, bound, listed = reaching(b_top, bound, K + 1, NB)
    i_slot = tl.cumsum(m_block.to(tl.int32), 0) - 1
    tl.store(p_blocks + i_slot, i_block, mask=m_block)
    tl.debug_barrier()
    i_lane = tl.arange(0, NB * BLOCK)
    m_lane = i_lane // BLOCK < listed
    i_place = tl.load(p_blocks + i_lane // BLOCK, mask=m_lane, other=0) * BLOCK + i_lane % BLOCK  # [NB * BLOCK]
    b_noisy = tl.load(p_noisy + i_place, mask=m_lane & (i_place < n), other=float("-inf"))  # [NB * BLOCK]
    m_score, bound, listed = reaching(b_noisy, bound, K + 1, ROOM)
    i_slot = tl.cumsum(m_score.to(tl.int32), 0) - 1
    tl.store(p_found + i_slot, packed(b_noisy, i_place), mask=m_score)
    tl.debug_barrier()
    i_slot = tl.arange(0, ROOM)
    m_slot = i_slot < listed
    b_pair = tl.load(p_found + i_slot, mask=m_slot, other=0)  # [ROOM]
    b_noisy = tl.where(m_slot, (b_pair >> 32).to(tl.int32).to(tl.float32, bitcast=True), float("-inf"))  # [ROOM]
    i_team, b_before = teams_at(
        b_pair.to(tl.int32), m_slot, listed_teams, listed_parents, parent_log_c, i_bg, i_h, H, PLACES, CP, OF=OF,
        POOLED=POOLED,
    )  # fmt: skip
    # lines 9-10: the K-th largest score, and tau below it
    b_kth, b_tau = two_ranks(b_noisy, ranks(b_noisy), K - 1)
    m_picked = m_slot & (b_noisy >= b_kth)
    if b_kth == b_tau:
        # equal scores on both sides of the threshold: the lower teams win, as many as there is room for
        m_picked = m_slot & first_reaching(b_noisy, b_kth, K)
    # line 11: log c_g from phi_g - tau
    b_phi = b_noisy - gumbel_head(seed, i_team, quad, i_h, now, layer, SHARED)  # [ROOM]
    b_log_c = log_inclusion(b_phi - b_tau) + b_before
    mark(p_flags, p_union, p_corrections, i_team, i_h, H, MP, b_log_c, m_picked, OF=OF)
    return b_kth, b_tau


@triton.jit(do_not_specialize=["layer", "quad", "K"])
def select_kernel(
    tops, noisy, flags, union, corrections, count, key, step, listed_teams, listed_parents, parent_log_c, of_team,
    first_team, team_flags, blocks, found, tau, kth, layer, quad, K, PLACES, MP, CP, TEAMS, TEAMS_PADDED, G, H, WORDS,
    BLOCK: tl.constexpr, NT: tl.constexpr, COARSE: tl.constexpr, NB: tl.constexpr, ROOM: tl.constexpr,
    OF: tl.constexpr, POOLED: tl.constexpr, SHARED: tl.constexpr, PREPARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (h, sequence * G + group). NT holds a head's block maxima and COARSE their coarse ones (0: no bound is
    looked for), NB the blocks and ROOM the scores that may be candidates.

    Writes ``tau, kth (B G, H)`` float32, the (K+1)-st and K-th largest scores, -inf where the sequence has no more
    than K teams; adds the head's bit to ``flags (B G, WORDS, MP)`` and its log c_g to ``corrections (B G, MP, H)``
    for its selected teams. ``blocks (B G, H, NB)`` and ``found (B G, H, ROOM)`` are scratch.

    OF TEAMS a team's place among the PLACES scores is its number. OF PARENTS the same holds of parents, and their bits
    are added to ``union (B G, MP / 32)``; and of all TEAMS it prepares ``first_team (B G, MP)`` and ``team_flags
    (B G, WORDS, TEAMS_PADDED)``. OF LISTED teams the list ``listed_teams (B G, PLACES)`` has their numbers,
    ``listed_parents`` their parents, and ``parent_log_c (B G, CP, H)`` the log c_p that is added to log c_g.
    """
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
    p_blocks = blocks + i_bgh * NB
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
        for start in range(0, n, NT):
            i_team = start + tl.arange(0, NT)
            mark(p_flags, p_union, p_corrections, i_team, i_h, H, MP, tl.zeros((NT,), tl.float32), i_team < n, OF=OF)
        tl.store(tau + i_bgh, float("-inf"))
        tl.store(kth + i_bgh, float("-inf"))
    else:
        b_kth, b_tau = draw_teams(
            p_tops, p_noisy, p_flags, p_union, p_corrections, p_blocks, p_found, n, seed, now, listed_teams,
            listed_parents, parent_log_c, layer, quad + i_g * 65536, K, i_bg, i_h, H, PLACES, MP, CP, BLOCK=BLOCK,
            NT=NT, COARSE=COARSE, NB=NB, ROOM=ROOM, OF=OF, POOLED=POOLED, SHARED=SHARED,
        )  # fmt: skip
        tl.store(tau + i_bgh, b_tau)
        tl.store(kth + i_bgh, b_kth)
