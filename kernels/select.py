"""Selection: each head's K largest noisy scores, its threshold, and the marks of its teams in the group's union.

Algorithm 1, lines 8-9. One program a head. The (K+1)-st largest of the stored maxima bounds the threshold from below,
so only the few blocks of 8 teams whose maximum reaches it are drawn again and sorted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .draws import gumbel_head, index_of, ordered, score_of, sequence_key, wait
from .route import BLOCK


@triton.jit
def candidates(
    blocks, phi, i, total, seed, g, h, now, layer, WIDTH: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr
):
    """The WIDTH largest packed scores of blocks i .. i + CHUNK - 1 of the list."""
    slot = i + tl.arange(0, CHUNK)
    live = slot < total
    block = tl.load(blocks + slot, mask=live, other=0)
    team = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    score = tl.load(phi + team, mask=live[:, None], other=float("-inf"))
    noisy = score + gumbel_head(seed, team, g, h, now, layer, SHARED)
    return tl.topk(tl.reshape(ordered(noisy, team), (CHUNK * BLOCK,)), WIDTH)


@triton.jit
def select_kernel(
    tops, phi, flags, count, key, step, blocks, tau, kth, last, layer, K, MP, G, H, NT: tl.constexpr, FOLD: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (h, sequence * G + group).

    Writes ``tau, kth (B G, H)`` float32, the (K+1)-st and K-th largest scores, -inf where the sequence has no more
    than K teams, and ``last (B G, H)`` int32, the K-th's team; sets ``flags`` of selected teams. ``blocks`` is scratch.
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
    flags += bg.to(tl.int64) * MP
    blocks += line * (MP // BLOCK)
    wait(PDL)
    if n <= K:
        if h == 0:
            for start in range(0, n, NT):
                team = start + tl.arange(0, NT)
                tl.store(flags + team, tl.full((NT,), 1, tl.int8), mask=team < n)
        tl.store(tau + line, float("-inf"))
        tl.store(kth + line, float("-inf"))
        tl.store(last + line, MP)
    else:
        place = tl.arange(0, NT)
        top = tl.load(tops + place, mask=place < tl.cdiv(n, BLOCK), other=float("-inf"))
        rank = tl.arange(0, WIDTH)
        coarse = tl.topk(tl.max(tl.reshape(top, (NT // FOLD, FOLD)), 1), WIDTH)
        # a sum with -inf in it is right: -inf means that every block is a candidate
        bound = tl.sum(tl.where(rank == K, coarse, 0.0), 0)
        wanted = (top >= bound) & (top > float("-inf"))
        slot = tl.cumsum(wanted.to(tl.int32), 0) - 1
        total = tl.sum(wanted.to(tl.int32), 0)
        tl.store(blocks + slot, place, mask=wanted)
        tl.debug_barrier()
        best = tl.full((WIDTH,), -(2**63), tl.int64)
        for i in range(0, total, CHUNK):
            more = candidates(blocks, phi, i, total, seed, g, h, now, layer, WIDTH, CHUNK, SHARED)
            best = tl.topk(tl.reshape(tl.join(best, more), (2 * WIDTH,)), WIDTH)
        score, team = score_of(best), index_of(best)
        tl.store(flags + team, tl.full((WIDTH,), 1, tl.int8), mask=(rank < K) & (score > float("-inf")))
        tl.store(tau + line, tl.sum(tl.where(rank == K, score, 0.0), 0))
        tl.store(kth + line, tl.sum(tl.where(rank == K - 1, score, 0.0), 0))
        tl.store(last + line, tl.sum(tl.where(rank == K - 1, team, 0), 0))
