"""Selection: each head's K largest noisy scores, its threshold, and its corrections and marks in the group's union.

Algorithm 1, lines 8-12. One program a head. The (K+1)-st largest of a few coarse maxima bounds the threshold from
below. Blocks of teams whose maximum reaches the bound are listed, then their scores that reach it, few more than K + 1,
and these are ranked by counting how many exceed each. A step costs what its exchanges between warps cost (a sum 300
cycles, a running count of a thousand values 700, a list written and read back 1,000), so there are few of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .draws import gumbel_head, log_inclusion, sequence_key, wait


@triton.jit
def exceeded(x):
    """How many of the float32 ``x`` exceed each; few values, all compared with all. The sum over the first axis stays
    in registers but for one exchange between warps; over the second it would be a reduction a row."""
    return tl.sum((x[:, None] > x[None, :]).to(tl.int32), 0)


@triton.jit
def at_rank(x, above, rank):
    """The value of ``x`` that ``rank`` others exceed, equal ones counted apart; ``above`` as `exceeded` gives it."""
    return tl.min(tl.where(above <= rank, x, float("inf")), 0)


@triton.jit
def lowest(x, bound, room):
    """Which of the float32 ``x`` exceed ``bound`` or equal it, ``room`` in all: of equal ones those of lower places."""
    same = x == bound
    left = room - tl.sum((x > bound).to(tl.int32), 0)
    return (x > bound) | (same & (tl.cumsum(same.to(tl.int32), 0) <= left))


@triton.jit
def packed(x, team):
    """A score and its team in one 64-bit word."""
    return (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | team.to(tl.int64)


@triton.jit
def two_ranks(x, above, rank):
    """The values at ``rank`` and at the rank below it."""
    infinite = float("inf")
    return tl.reduce((tl.where(above <= rank, x, infinite), tl.where(above <= rank + 1, x, infinite)), 0, smaller)


@triton.jit
def smaller(a0, a1, b0, b1):
    return tl.minimum(a0, b0), tl.minimum(a1, b1)


@triton.jit
def raised(x, low, need, room):
    """A bound above ``low``, which too many of the float32 ``x`` reach: at least ``need`` reach it, and no more than
    ``room`` unless equal values leave no choice. Halves the interval each time, for rare crowds."""
    high = tl.max(x, 0)
    low = tl.min(tl.where((x >= low) & (x > float("-inf")), x, float("inf")), 0)
    held = room + 1
    moved = low < high
    while (held > room) & moved:
        # finite below an infinite maximum; and the maximum itself, which many may equal, once nothing lies between
        middle = tl.minimum(0.5 * low + 0.5 * high, 3.4028234663852886e38)
        middle = tl.where(middle > low, middle, high)
        reach = tl.sum((x >= middle).to(tl.int32), 0)
        enough = reach >= need
        moved = tl.where(enough, middle > low, middle < high)
        held = tl.where(enough, reach, held)
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low


@triton.jit
def reaching(x, low, need, room):
    """Which of the float32 ``x`` reach ``low``, or a higher bound where they are more than ``room``; the bound; and
    how many they are."""
    wanted = (x >= low) & (x > float("-inf"))
    held = tl.sum(wanted.to(tl.int32), 0)
    if held > room:
        low = raised(x, low, need, room)
        wanted = lowest(x, low, room)
        held = tl.sum(wanted.to(tl.int32), 0)
    return wanted, low, held


@triton.jit
def mark(flags, corrections, team, h, H, MP, log_c, ok):
    """Enter a head's teams in the union, 32 heads a word, with the head's log corrections."""
    bit = (tl.zeros_like(team) + 1) << (h % 32)
    tl.atomic_or(flags + (h // 32) * MP + team, bit, mask=ok, sem="relaxed")
    tl.store(corrections + team * H, log_c, mask=ok)


@triton.jit(do_not_specialize=["layer", "K"])
def select_kernel(
    tops, noisy, flags, corrections, count, key, step, blocks, found, tau, kth, layer, K, MP, G, H, WORDS,
    BLOCK: tl.constexpr, NT: tl.constexpr, COARSE: tl.constexpr, NB: tl.constexpr, ROOM: tl.constexpr,
    SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (h, sequence * G + group). NT holds a head's block maxima and COARSE their coarse ones (0: no bound is
    looked for), NB the blocks and ROOM the scores that may be candidates.

    Writes ``tau, kth (B G, H)`` float32, the (K+1)-st and K-th largest scores, -inf where the sequence has no more
    than K teams; adds the head's bit to ``flags (B G, words, MP)`` and its log c_g to ``corrections (B G, MP, H)``
    for its selected teams. ``blocks (B G, H, NB)`` and ``found (B G, H, ROOM)`` are scratch.
    """
    h = tl.program_id(0)
    bg = tl.program_id(1)
    b, g = bg // G, bg % G
    n = tl.load(count + bg)
    seed = sequence_key(key, b)
    now = tl.load(step + b)
    line = bg.to(tl.int64) * H + h
    tops += line * (MP // BLOCK)
    noisy += line * MP
    corrections += bg.to(tl.int64) * MP * H + h
    flags += bg.to(tl.int64) * WORDS * MP
    blocks += line * NB
    found += line * ROOM
    wait(PDL)
    if n <= K:
        for start in range(0, n, NT):
            team = start + tl.arange(0, NT)
            mark(flags, corrections, team, h, H, MP, tl.zeros((NT,), tl.float32), team < n)
        tl.store(tau + line, float("-inf"))
        tl.store(kth + line, float("-inf"))
    else:
        place = tl.arange(0, NT)
        top = tl.load(tops + place, mask=place < tl.cdiv(n, BLOCK), other=float("-inf"))
        low = tl.full((), float("-inf"), tl.float32)
        if COARSE > 0:
            # maxima that are far apart share a coarse one, so that neighbours do not hide one another; with fewer than
            # K + 1 real ones the bound is -inf
            coarse = tl.max(tl.reshape(top, (NT // COARSE, COARSE)), 0)
            low = at_rank(coarse, exceeded(coarse), K)
        wanted, low, total = reaching(top, low, K + 1, NB)
        slot = tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(blocks + slot, place, mask=wanted)
        tl.debug_barrier()
        lane = tl.arange(0, NB * BLOCK)
        listed = lane // BLOCK < total
        team = tl.load(blocks + lane // BLOCK, mask=listed, other=0) * BLOCK + lane % BLOCK
        value = tl.load(noisy + team, mask=listed & (team < n), other=float("-inf"))
        wanted, low, total = reaching(value, low, K + 1, ROOM)
        slot = tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(found + slot, packed(value, team), mask=wanted)
        tl.debug_barrier()
        place = tl.arange(0, ROOM)
        ok = place < total
        pair = tl.load(found + place, mask=ok, other=0)
        value = tl.where(ok, (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True), float("-inf"))
        team = pair.to(tl.int32)
        least, above = two_ranks(value, exceeded(value), K - 1)
        picked = ok & (value >= least)
        if least == above:
            # equal scores on both sides of the threshold: the lower teams win, as many as there is room for
            picked = ok & lowest(value, least, K)
        score = value - gumbel_head(seed, team, g, h, now, layer, SHARED)
        mark(flags, corrections, team, h, H, MP, log_inclusion(score - above), picked)
        tl.store(tau + line, above)
        tl.store(kth + line, least)
