"""Selection: each head's K largest noisy scores, its threshold, and its corrections and marks in the group's union.

Algorithm 1, lines 8-12. One program a head. A bound that at least K + 1 scores reach is found among the maxima of
blocks of teams; the few blocks that reach it are drawn again, and their scores ranked by counting. Sorting would unroll
into tens of kilobytes of code, and a search over the bits of the scores waits for a reduction a turn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .draws import gumbel_head, log_inclusion, sequence_key, wait
from .route import BLOCK

PIECE = tl.constexpr(32)  # scores that all others are compared with in one go


@triton.jit
def sortable(x):
    """float32 as uint32 of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def raised(x, bound, need, enough):
    """The largest bound, bit by bit, that at least ``need`` of the uint32 ``x`` reach, stopping once no more than
    ``enough`` do. Only for score distributions whose first bound lets too many blocks through."""
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
def ranks(scratch, value, N: tl.constexpr):
    """How many of ``value (N,)`` come before each: larger ones, and equal ones of lower place."""
    place = tl.arange(0, N)
    tl.store(scratch + place, value)
    tl.debug_barrier()
    rank = tl.zeros((N,), tl.int32)
    for start in range(0, N, PIECE):
        other = start + tl.arange(0, PIECE)
        x = tl.load(scratch + other)[:, None]
        before = (x > value[None, :]) | ((x == value[None, :]) & (other[:, None] < place[None, :]))
        rank += tl.sum(before.to(tl.int32), 0)
    return rank


@triton.jit
def mark(flags, corrections, team, h, MP, log_c, ok):
    """Enter a head's teams in the union, 32 heads a word, with the head's log corrections."""
    bit = (tl.zeros_like(team) + 1) << (h % 32)
    tl.atomic_or(flags + (h // 32) * MP + team, bit, mask=ok, sem="relaxed")
    tl.store(corrections + team, log_c, mask=ok)


@triton.jit
def select_kernel(
    tops, phi, flags, corrections, count, key, step, blocks, ranked, tau, kth, layer, K, MP, G, H, WORDS,
    NT: tl.constexpr, COARSE: tl.constexpr, NB: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (h, sequence * G + group); NT holds a head's block maxima, NB the blocks that may be candidates.

    Writes ``tau, kth (B G, H)`` float32, the (K+1)-st and K-th largest scores, -inf where the sequence has no more
    than K teams; adds the head's bit to ``flags (B G, words, MP)`` and its log c_g to ``corrections (B G, H, MP)``
    for its selected teams. ``blocks (B G, H, NB)`` and ``ranked (B G, H, COARSE + NB * BLOCK)`` are scratch.
    """
    CANDIDATES: tl.constexpr = NB * BLOCK
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
    ranked += line * (COARSE + CANDIDATES)
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
        # the largest of every NT / COARSE maxima, far apart, so that neighbours do not hide one another
        coarse = tl.max(tl.reshape(top, (NT // COARSE, COARSE)), 0)
        rank = ranks(ranked, coarse, COARSE)
        # where COARSE <= K no rank is K, the bound is 0, and every block is a candidate
        bound = tl.max(tl.where(rank == K, coarse, 0), 0)
        wanted = some & (top >= bound)
        total = tl.sum(wanted.to(tl.int32), 0)
        if total > NB:
            bound = raised(top, bound, K + 1, NB)
            wanted = some & (top >= bound)
            # blocks beyond NB tie with the bound exactly; those of lower teams, which win ties, are kept
            total = tl.minimum(tl.sum(wanted.to(tl.int32), 0), NB)
        slot = tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(blocks + slot, place, mask=wanted & (slot < NB))
        tl.debug_barrier()
        lane = tl.arange(0, CANDIDATES)
        listed = lane // BLOCK < total
        team = tl.load(blocks + lane // BLOCK, mask=listed, other=0) * BLOCK + lane % BLOCK
        listed = listed & (team < n)
        score = tl.load(phi + team, mask=listed, other=float("-inf"))
        value = tl.where(listed, score + gumbel_head(seed, team, g, h, now, layer, SHARED), float("-inf"))
        rank = ranks(ranked + COARSE, sortable(value), CANDIDATES)
        above = tl.max(tl.where(rank == K, value, float("-inf")), 0)
        mark(flags, corrections, team, h, MP, log_inclusion(score - above), listed & (rank < K))
        tl.store(tau + line, above)
        tl.store(kth + line, tl.max(tl.where(rank == K - 1, value, float("-inf")), 0))
