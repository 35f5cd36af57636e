"""Selection: each head's K largest noisy scores, its threshold, and its corrections and marks in the group's union.

Algorithm 1, lines 8-12. One program a head. Two searches over the bits of float32 scores take the place of sorting,
which would unroll into tens of kilobytes of code that a cold instruction cache must fetch on every step. The first
finds, among the maxima of blocks of teams, a bound that K + 1 of them reach; the second finds the K-th largest score
among the teams of the blocks that do.
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
def reached(x, bound, step, shift):
    """How many of ``x`` are at least ``bound + (step << shift)``."""
    return tl.sum((x >= bound + (step << shift)).to(tl.int32), 0)


@triton.jit
def search(x, need, enough):
    """The largest bound, two more of its bits a turn, that at least ``need`` of ``x`` reach; the search ends early
    once no more than ``enough`` do. Returns the bound and how many reach it."""
    bound = tl.zeros((), tl.uint32)
    held = tl.zeros((), tl.int32) + 0x7FFFFFFF
    shift = tl.zeros((), tl.uint32) + 30
    turns = 16
    while (turns > 0) & (held > enough):
        one = tl.full((), 1, tl.uint32)
        a = reached(x, bound, one, shift)
        b = reached(x, bound, one * 2, shift)
        c = reached(x, bound, one * 3, shift)
        step = (a >= need).to(tl.uint32) + (b >= need).to(tl.uint32) + (c >= need).to(tl.uint32)
        held = tl.where(step == 0, held, tl.where(step == 1, a, tl.where(step == 2, b, c)))
        bound += step << shift
        shift -= 2
        turns -= 1
    return bound, held


@triton.jit
def mark(flags, corrections, team, h, MP, log_c, ok):
    """Enter a head's teams in the union, 32 heads a word, with the head's log corrections."""
    bit = (tl.zeros_like(team) + 1) << (h % 32)
    tl.atomic_or(flags + (h // 32) * MP + team, bit, mask=ok, sem="relaxed")
    tl.store(corrections + team, log_c, mask=ok)


@triton.jit
def select_kernel(
    tops, phi, flags, corrections, count, key, step, blocks, tau, kth, layer, K, MP, G, H, WORDS, NT: tl.constexpr,
    NB: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
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
        top = sortable(tl.load(tops + place, mask=some, other=float("-inf")))
        # with no more than K blocks every one is a candidate, and the bound stays 0
        bound, _ = search(top, K + 1, NB)
        wanted = some & (top >= bound)
        slot = tl.cumsum(wanted.to(tl.int32), 0) - 1
        # blocks beyond NB tie with the bound exactly; those of lower teams, which win ties, are kept
        tl.store(blocks + slot, place, mask=wanted & (slot < NB))
        total = tl.minimum(tl.sum(wanted.to(tl.int32), 0), NB)
        tl.debug_barrier()
        lane = tl.arange(0, NB * BLOCK)
        listed = lane // BLOCK < total
        team = tl.load(blocks + lane // BLOCK, mask=listed, other=0) * BLOCK + lane % BLOCK
        score = tl.load(phi + team, mask=listed, other=float("-inf"))
        value = score + gumbel_head(seed, team, g, h, now, layer, SHARED)
        value = tl.where(listed & (team < n), value, float("-inf"))
        noisy = sortable(value)
        bound, held = search(noisy, K, K)
        picked = noisy >= bound
        if held > K:
            # equal scores at the threshold: the lower teams win, as many as there is room for
            same = noisy == bound
            room = K - tl.sum((noisy > bound).to(tl.int32), 0)
            picked = (noisy > bound) | (same & (tl.cumsum(same.to(tl.int32), 0) <= room))
        least = tl.min(tl.where(picked, value, float("inf")), 0)
        next = tl.max(tl.where(picked, float("-inf"), value), 0)
        mark(flags, corrections, team, h, MP, log_inclusion(score - next), picked)
        tl.store(tau + line, next)
        tl.store(kth + line, least)
