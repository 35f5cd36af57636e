"""Attention of paged requests over the union and the exact rows (Algorithm 1, lines 13-19), and over all rows of
requests that are attended densely."""

from __future__ import annotations

import triton
import triton.language as tl

from .attend import attend_listed, query_parts, store_share
from .combine import weighed_shares
from .device import wait
from .paged_rows import list_rows_of, request, share_of_rows


@triton.jit(do_not_specialize=["K", "dense_below"])
def paged_attend_kernel(
    query0, query1, latents, rotary, table, seq_lens, dense, team, flags, corrections, list_rows, list_teams, list_bits,
    list_parents, part_out, part_max, part_sum, part_rows, scale, K, dense_below, query0_strides, query1_strides,
    row_stride, table_stride, MP, H, CAPACITY, PARENTS, D0: tl.constexpr, D1: tl.constexpr, BD0: tl.constexpr,
    BD1: tl.constexpr, HB: tl.constexpr, BN: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr,
    SIZE: tl.constexpr, SLOTS: tl.constexpr, FLAGGED: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
    TALL: tl.constexpr, SPLIT: tl.constexpr, POOLED: tl.constexpr, ALL: tl.constexpr, DTYPE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (share, head block, request). A request's last rows, or all of them where it samples no teams, are in no
    team and count fully. ALL: no request of this launch samples.

    Writes what :func:`.attend.attend_kernel` writes, but to ``part_rows (B, shares)`` the union's rows alone.
    """
    i_share, shares = tl.program_id(0), tl.num_programs(0)
    i_b = tl.program_id(2)
    n, teams = request(seq_lens, dense, i_b, K, dense_below, SIZE=SIZE, SLOTS=SLOTS, FLAGGED=FLAGGED)
    first_head = tl.program_id(1) * HB
    i_head = first_head + tl.arange(0, HB)  # [HB]
    p_query0 = query0 + i_b.to(tl.int64) * query0_strides[0]
    p_query1 = query1 + i_b.to(tl.int64) * query1_strides[0]
    b_high0, b_low0 = query_parts(p_query0, i_head, H, query0_strides[2], D0, BD0, DTYPE, SPLIT)
    b_high1, b_low1 = query_parts(p_query1, i_head, H, query1_strides[2], D1, BD1, DTYPE, SPLIT)
    i_list = (i_b.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * shares + i_share
    p_list_rows = list_rows + i_list * CAPACITY
    p_list_teams = list_teams + i_list * CAPACITY
    p_list_bits = list_bits + i_list * CAPACITY
    p_table = table + i_b.to(tl.int64) * table_stride
    p_flags = flags + i_b.to(tl.int64) * WORDS * MP
    grouped = n * 0 if ALL else teams // SLOTS * SIZE
    i_row, i_team, m_row = share_of_rows(p_table, team, n, grouped, i_share, shares, SIZE=SIZE, P=P, R=R, LANES=LANES)
    wait(PDL)
    total, union = list_rows_of(
        i_row, i_team, m_row, p_table, team, p_flags, p_list_rows, p_list_teams, p_list_bits,
        list_parents + i_list * PARENTS, n, grouped, i_share, shares, MP, first_head, SIZE=SIZE, P=P, R=R, HB=HB,
        WORDS=WORDS, POOLED=POOLED, ALL=ALL, LANES=LANES,
    )  # fmt: skip
    tl.debug_barrier()
    b_top, b_mass, b_out = attend_listed(
        latents, rotary, latents, p_list_rows, p_list_teams, p_list_bits, corrections, total, i_b.to(tl.int64) * MP,
        i_head, b_high0, b_low0, b_high1, b_low1, scale, H, row_stride, row_stride, row_stride, D0=D0, D1=D1, BD0=BD0,
        BD1=BD1, V=D0, BV=BD0, BN=BN, TALL=TALL, LATENT=True, SPLIT=SPLIT, POOLED=POOLED, ALL=ALL, DTYPE=DTYPE,
        STAGES=STAGES,
    )  # fmt: skip
    store_share(
        part_out, part_max, part_sum, b_top, b_mass, b_out, i_b.to(tl.int64) * H, i_head, i_share, shares, H, total,
        V=D0, BV=BD0, TALL=TALL,
    )  # fmt: skip
    if tl.program_id(1) == 0:
        tl.store(part_rows + i_b * shares + i_share, union)


@triton.jit(do_not_specialize=["K", "dense_below", "K1", "shares"])
def paged_combine_kernel(
    part_out, part_max, part_sum, part_rows, seq_lens, dense, teams_scored, out, counts, out_strides, counts_stride, K,
    dense_below, K1, TILES, shares, H, V: tl.constexpr, BV: tl.constexpr, NS: tl.constexpr, BS: tl.constexpr,
    SIZE: tl.constexpr, SLOTS: tl.constexpr, FLAGGED: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (value block, h, request) writes ``out (B, H, V)`` in its dtype, zeros where the request has no rows, and
    adds rows to ``counts (B, 4)`` int64: routed, of the union, of the suffix, and read densely. EACH above 0: routing
    scored a parent per EACH teams for K1, and the teams ``teams_scored (B, TILES)`` for K; for K or fewer, none."""
    i_h = tl.program_id(1)
    i_b = tl.program_id(2)
    n, teams = request(seq_lens, dense, i_b, K, dense_below, SIZE=SIZE, SLOTS=SLOTS, FLAGGED=FLAGGED)
    i_dim = tl.program_id(0) * BV + tl.arange(0, BV)  # [BV]
    p_out = out + i_b.to(tl.int64) * out_strides[0] + i_h * out_strides[1] + i_dim
    wait(PDL)
    if n > 0:
        i_bh = i_b.to(tl.int64) * H + i_h
        b_total, mass, _ = weighed_shares(part_out, part_max, part_sum, i_bh, i_dim, shares, V=V, NS=NS, BS=BS)
        tl.store(p_out, (b_total / mass).to(out.dtype.element_ty), mask=i_dim < V)
        if (tl.program_id(0) == 0) & (i_h == 0):
            i_share = tl.arange(0, NS)
            b_union = tl.load(part_rows + i_b * shares + i_share, mask=i_share < shares, other=0)  # [NS]
            p_counts = counts + i_b.to(tl.int64) * counts_stride
            routed = teams
            if EACH > 0:
                routed = tl.where(teams // EACH > K1, teams // EACH, 0)
                scored = teams * 0
                for start in range(0, TILES, NS):
                    i_tile = start + i_share
                    scored += tl.sum(tl.load(teams_scored + i_b * TILES + i_tile, mask=i_tile < TILES, other=0), 0)
                routed += tl.where(scored > K, scored, 0)
            tl.store(p_counts, tl.load(p_counts) + routed)
            tl.store(p_counts + 1, tl.load(p_counts + 1) + tl.sum(b_union, 0))
            sampled = teams > 0
            tl.store(p_counts + 2, tl.load(p_counts + 2) + tl.where(sampled, n - teams // SLOTS * SIZE, 0))
            tl.store(p_counts + 3, tl.load(p_counts + 3) + tl.where(sampled, 0, n))
    else:
        tl.store(p_out, tl.zeros((BV,), tl.float32).to(out.dtype.element_ty), mask=i_dim < V)
