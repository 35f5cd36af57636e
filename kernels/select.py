"""Selection: each head's K largest noisy scores, its threshold, and its corrections and marks in the group's union.

Algorithm 1, lines 8-12. One program a head. A bound that at least K + 1 scores reach is found among the maxima of
blocks of teams; only the few blocks that reach it are drawn again and sorted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .draws import gumbel_head, log_inclusion, sequence_key, wait
from .route import BLOCK


@triton.jit
def sortable(x):
    """float32 as uint32 of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def raised(x, bound, need, enough):
    """The largest bound, bit by bit, that at least ``need`` of the uint32 ``x`` reach, stopping once no more than
    ``enough`` do; never below ``bound``. Slower than sorting few values, and able to search many."""
    found = bound * 0
    held = enough + 1
    bit = found + 0x80000000
    while (bit > 0) & (held > enough):
        reach = tl.sum((x >= (found | bit)).to(tl.int32), 0)
        held = tl.where(reach >= need, reach, held)
        found = tl.where(reach >= need, found | bit, found)
        bit = bit >> 1
    return tl.maximum(found, bound)


@triton.jit
def at_rank(x, rank, WIDTH: tl.constexpr):
    """The value of this rank, 0 the largest, among float32 ``x``; WIDTH, a power of two, is more than the rank."""
    best = tl.topk(x, WIDTH)
    return tl.sum(tl.where(tl.arange(0, WIDTH) == rank, best, 0.0), 0)


@triton.jit
def mark(flags, corrections, team, h, MP, log_c, ok):
    """Enter a head's teams in the union, 32 heads a word, with the head's log corrections."""
    bit = (tl.zeros_like(team) + 1) << (h % 32)
    tl.atomic_or(flags + (h // 32) * MP + team, bit, mask=ok, sem="relaxed")
    tl.store(corrections + team, log_c, mask=ok)


@triton.jit(do_not_specialize=["layer"])
def select_kernel(
    tops, phi, flags, corrections, count, key, step, blocks, tau, kth, layer, K, MP, G, H, WORDS, NT: tl.constexpr,
    COARSE: tl.constexpr, NB: tl.constexpr, WIDTH: tl.constexpr, SORT: tl.constexpr, SHARED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (h, sequence * G + group); NT holds a head's block maxima, NB the blocks that may be candidates.

    Writes ``tau, kth (B G, H)`` float32, the (K+1)-st and K-th largest scores, -inf where the sequence has no more
    than K teams; adds the head's bit to ``flags (B G, words, MP)`` and its log c_g to ``corrections (B G, H, MP)``
    for its selected teams. ``blocks (B G, H, NB)`` is scratch.
    """
    h = tl.program_id(0)
    bg = tl.program_id(1)
    b, g = bg // G, bg % G
    n = tl.load(count + bg)
    seed = sequence_key(key, b)
    now = tl.load(step + b)
    line = bg.to(tl.int64) * H + h
    tops += line * (MP // BLOCK)
    phi += line * MP
    corrections += line * MP
    flags += bg.to(tl.int64) * WORDS * MP
    blocks += line * NB
    wait(PDL)
    if n <= K:
        for start in range(0, n, NT):
            team = start + tl.arange(0, NT)
            mark(flags, corrections, team, h, MP, tl.zeros((NT,), tl.float32), team < n)
        tl.store(tau + line, float("-inf"))
        tl.store(kth + line, float("-inf"))
    else:
        place = tl.arange(0, NT)
        some = place < tl.cdiv(n, BLOCK)
        top = tl.load(tops + place, mask=some, other=float("-inf"))
        bound = tl.zeros((), tl.uint32)
        if SORT:
            # the largest of every NT / COARSE maxima, far apart, so that neighbours do not hide one another; where
            # fewer than K + 1 of these are real the bound is -inf, and every block a candidate
            coarse = tl.max(tl.reshape(top, (NT // COARSE, COARSE)), 0)
            bound = sortable(at_rank(coarse, K, WIDTH))
        sorted = sortable(top)
        wanted = some & (sorted >= bound)
        total = tl.sum(wanted.to(tl.int32), 0)
        if total > NB:
            wanted = some & (sorted >= raised(sorted, bound, K + 1, NB))
            # blocks beyond NB tie with the bound exactly; those of lower teams, which win ties, are kept
            total = tl.minimum(tl.sum(wanted.to(tl.int32), 0), NB)
        slot = tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(blocks + slot, place, mask=wanted & (slot < NB))
        tl.debug_barrier()
        lane = tl.arange(0, NB * BLOCK)
        listed = lane // BLOCK < total
        team = tl.load(blocks + lane // BLOCK, mask=listed, other=0) * BLOCK + lane % BLOCK
        listed = listed & (team < n)
        score = tl.load(phi + team, mask=listed, other=float("-inf"))
        value = tl.where(listed, score + gumbel_head(seed, team, g, h, now, layer, SHARED), float("-inf"))
        if SORT:
            least = at_rank(value, K - 1, WIDTH)
        else:
            order = sortable(value)
            least = tl.min(tl.where(order >= raised(order, bound, K, K), value, float("inf")), 0)
        picked = value >= least
        if tl.sum(picked.to(tl.int32), 0) > K:
            # equal scores at the threshold: the lower teams win, as many as there is room for
            same = value == least
            room = K - tl.sum((value > least).to(tl.int32), 0)
            picked = (value > least) | (same & (tl.cumsum(same.to(tl.int32), 0) <= room))
        above = tl.max(tl.where(picked, float("-inf"), value), 0)
        mark(flags, corrections, team, h, MP, log_inclusion(score - above), picked)
        tl.store(tau + line, above)
        tl.store(kth + line, least)
