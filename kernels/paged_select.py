"""Selection and pooled corrections of paged requests (Algorithm 1, lines 9-11); dense requests are skipped."""

from __future__ import annotations

import triton
import triton.language as tl

from .device import wait
from .paged_rows import request, tile_at, tiles_before
from .pool import flagged, pooled_correction
from .select import LISTED, PARENTS, draw_teams, mark
from .select_many import draw_many


@triton.jit(do_not_specialize=["seed", "layer", "quad", "K", "dense_below", "WANTED"])
def paged_select_kernel(
    tops, noisy, flags, union, corrections, seq_lens, dense, places, listed_teams, listed_parents, parent_log_c, seed,
    blocks, found, tau, kth, layer, quad, K, dense_below, WANTED, PLACES, MP, CP, H, WORDS, SIZE: tl.constexpr,
    SLOTS: tl.constexpr, FLAGGED: tl.constexpr, BLOCK: tl.constexpr, NT: tl.constexpr, COARSE: tl.constexpr,
    NB: tl.constexpr, ROOM: tl.constexpr, LANES: tl.constexpr, OF: tl.constexpr, EACH: tl.constexpr,
    POOLED: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (h, request) selects WANTED teams or parents as :func:`.select.select_kernel` does for a head of a
    sequence, or with NT of 0 as :func:`.select_many.select_many_kernel`. A parent has EACH teams."""
    i_h = tl.program_id(0)
    i_b = tl.program_id(1)
    n, teams = request(seq_lens, dense, i_b, K, dense_below, SIZE=SIZE, SLOTS=SLOTS, FLAGGED=FLAGGED)
    i_bh = i_b.to(tl.int64) * H + i_h
    p_noisy = noisy + i_bh * PLACES
    p_tops = tops + i_bh * (PLACES // BLOCK)
    p_flags = flags + i_b.to(tl.int64) * WORDS * MP
    p_union = union + i_b.to(tl.int64) * (MP // 32)
    p_corrections = corrections + i_b.to(tl.int64) * MP * H + i_h
    wait(PDL)
    scores = teams
    if OF == PARENTS:
        scores = teams // EACH
    if OF == LISTED:
        scores = tl.load(places + i_b)
    if (OF == PARENTS) & (scores <= WANTED):
        # all parents, c = 1
        for start in range(0, scores, LANES):
            i_parent = start + tl.arange(0, LANES)
            b_log_c = tl.zeros((LANES,), tl.float32)
            mark(p_flags, p_union, p_corrections, i_parent, i_h, H, MP, b_log_c, i_parent < scores, OF=OF)
        tl.store(tau + i_bh, float("-inf"))
        tl.store(kth + i_bh, float("-inf"))
    elif scores > 0:
        if NT > 0:
            b_kth, b_tau = draw_teams(
                p_tops, p_noisy, p_flags, p_union, p_corrections, blocks + i_bh * NB, found + i_bh * ROOM, scores,
                seed, n, listed_teams, listed_parents, parent_log_c, layer, quad, WANTED, i_b, i_h, H, PLACES, MP, CP,
                BLOCK=BLOCK, NT=NT, COARSE=COARSE, NB=NB, ROOM=ROOM, OF=OF, POOLED=POOLED, SHARED=SHARED,
            )  # fmt: skip
        else:
            b_kth, b_tau = draw_many(
                p_tops, p_noisy, p_flags, p_union, p_corrections, blocks + i_bh * (PLACES // BLOCK),
                found + i_bh * ROOM, scores, seed, n, listed_teams, listed_parents, parent_log_c, layer, quad, WANTED,
                i_b, i_h, H, PLACES, MP, CP, BLOCK=BLOCK, LANES=LANES, OF=OF, POOLED=POOLED, SHARED=SHARED,
            )  # fmt: skip
        tl.store(tau + i_bh, b_tau)
        tl.store(kth + i_bh, b_kth)


@triton.jit(do_not_specialize=["K", "dense_below"])
def paged_pool_kernel(
    phi, tau, kth, flags, seq_lens, dense, pooled, K, dense_below, MP, B, H, WORDS, T: tl.constexpr, HB: tl.constexpr,
    BATCH: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, FLAGGED: tl.constexpr, SHARED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program i takes every ``num_programs``-th tile of T teams from the i-th on and writes ``pooled (B, MP)``, the log
    correction of those that any head selected."""
    b_end, tiles = tiles_before(
        seq_lens, dense, B, K, dense_below, BATCH=BATCH, T=T, SIZE=SIZE, SLOTS=SLOTS, FLAGGED=FLAGGED
    )  # fmt: skip
    wait(PDL)
    for i in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
        i_b, i_tile = tile_at(b_end, i)
        i_team = i_tile * T + tl.arange(0, T)  # [T]
        _, teams = request(seq_lens, dense, i_b, K, dense_below, SIZE=SIZE, SLOTS=SLOTS, FLAGGED=FLAGGED)
        m_team = i_team < teams
        p_flags = flags + i_b.to(tl.int64) * WORDS * MP
        m_team = flagged(p_flags, i_team, m_team, MP, WORDS)
        if tl.sum(m_team.to(tl.int32), 0) > 0:
            i_bh = i_b.to(tl.int64) * H
            b_log_c = pooled_correction(
                phi + i_bh * MP, tau + i_bh, kth + i_bh, p_flags, i_team, i_team, m_team, MP, MP, H, HB=HB,
                SHARED=SHARED,
            )  # fmt: skip
            tl.store(pooled + i_b.to(tl.int64) * MP + i_team, b_log_c, mask=m_team)
