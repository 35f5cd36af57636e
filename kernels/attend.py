"""Attention over the union's rows and the suffix (Algorithm 1, lines 13-18), split over the rows.

Rows are read from the cache by row number. A row's bias is minus its team's log correction: per head where the head
selected the team, or one for all heads of the group (pooled). U-hat and Z-hat are kept as a running softmax.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import wait
from .maths import dot, load_query, split
from .rowlist import (
    PIECES,
    RUN,
    append_runs,
    append_suffix,
    append_union,
    joined_pieces,
    list_runs,
    share_rows,
    sum_of,
)


@triton.jit
def query_parts(
    p_query, i_head, H, stride, D: tl.constexpr, BD: tl.constexpr, dtype: tl.constexpr, SPLIT: tl.constexpr
):
    """Queries ``[HB, BD]`` as high and low parts of the rows' dtype; without SPLIT the low part is not to be used."""
    b_query = load_query(p_query, i_head, tl.arange(0, BD), H, D, stride)
    if SPLIT:
        return split(b_query.to(tl.float32), dtype)
    b_high = b_query.to(dtype)
    return b_high, b_high


@triton.jit
def load_rows(p_rows, i_row, m_row, stride, D: tl.constexpr, BD: tl.constexpr):
    """Cache rows ``[BN, BD]``, zero where not ``m_row``."""
    i_dim = tl.arange(0, BD)
    m_dims = m_row[:, None]
    if D < BD:
        m_dims = m_dims & (i_dim < D)[None, :]
    return tl.load(p_rows + i_row.to(tl.int64)[:, None] * stride + i_dim[None, :], mask=m_dims, other=0.0)


@triton.jit
def by_row(x, TALL: tl.constexpr):
    """A vector over rows beside the scores: the scores are ``[BN, HB]`` if TALL, else ``[HB, BN]``."""
    return x[:, None] if TALL else x[None, :]


@triton.jit
def by_head(x, TALL: tl.constexpr):
    """A vector over heads beside the scores."""
    return x[None, :] if TALL else x[:, None]


@triton.jit
def add_products(b_score, b_key, b_query, TALL: tl.constexpr):
    """The scores plus keys ``[BN, dims]`` times queries ``[HB, dims]``."""
    return dot(b_key, tl.trans(b_query), b_score) if TALL else dot(b_query, tl.trans(b_key), b_score)


@triton.jit
def add_values(b_out, b_weight, b_value, TALL: tl.constexpr):
    """The outputs, ``[dims, HB]`` if TALL, else ``[HB, dims]``, plus weights times values ``[BN, dims]``."""
    return dot(tl.trans(b_value), b_weight, b_out) if TALL else dot(b_weight, b_value, b_out)


@triton.jit
def attend_listed(
    p_keys0, p_keys1, p_values, p_list_rows, p_list_teams, p_list_bits, corrections, total, first_team, i_head, b_high0,
    b_low0, b_high1, b_low1, scale, H, keys0_stride, keys1_stride, values_stride, D0: tl.constexpr, D1: tl.constexpr,
    BD0: tl.constexpr, BD1: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, TALL: tl.constexpr,
    LATENT: tl.constexpr, SPLIT: tl.constexpr, POOLED: tl.constexpr, ALL: tl.constexpr, DTYPE: tl.constexpr,
    STAGES: tl.constexpr, p_list_bias=0, p_flags=0, first_head=0, MP=0, WORDS: tl.constexpr = 1,
    JOINED: tl.constexpr = False,
):  # fmt: skip
    """Lines 14-18 over ``total`` listed rows: per head the largest score ``[HB]``, the mass and the sum of values under
    exp(score - largest). The sequence's corrections follow those of ``first_team`` others; strides are of a row.

    JOINED: the list (:func:`~.rowlist.joined_pieces`) has pooled corrections itself, and no bits: these are read from
    the flags."""
    HB: tl.constexpr = i_head.shape[0]
    # U-hat is exp(b_top) times b_out, Z-hat exp(b_top) times b_mass
    b_top = tl.full((HB,), float("-inf"), tl.float32)  # [HB]
    b_mass = tl.zeros((HB,), tl.float32)  # [HB]
    axis: tl.constexpr = 0 if TALL else 1
    b_out = tl.zeros((BV, HB) if TALL else (HB, BV), tl.float32)  # [HB, BV], if TALL [BV, HB]
    zero = tl.zeros((BN, HB) if TALL else (HB, BN), tl.float32)  # [HB, BN], if TALL [BN, HB], as scores and biases
    for start in tl.range(0, total, BN, num_stages=STAGES):
        i_slot = start + tl.arange(0, BN)
        m_slot = i_slot < total
        i_row = tl.load(p_list_rows + i_slot, mask=m_slot, other=0)  # [BN]
        if not (JOINED and POOLED):
            i_team = tl.load(p_list_teams + i_slot, mask=m_slot, other=-1)  # [BN]
        b_key0 = load_rows(p_keys0, i_row, m_slot, keys0_stride, D0, BD0)  # [BN, BD0]
        b_bias = zero
        if JOINED and POOLED:
            b_bias += by_row(tl.load(p_list_bias + i_slot, mask=m_slot, other=0.0), TALL)
        elif not ALL:
            m_sampled = m_slot & (i_team >= 0)
            i_known = first_team + tl.maximum(i_team, 0)
            if POOLED:
                b_bias += by_row(tl.load(corrections + i_known, mask=m_sampled, other=0.0), TALL)
            else:
                # a head that did not select the row's team has no correction for it, and the row counts for nothing
                if JOINED:
                    b_bits = flags_of(p_flags, i_team, m_sampled, first_head, MP, HB=HB, WORDS=WORDS, TALL=TALL)
                else:
                    b_bits = by_row(tl.load(p_list_bits + i_slot, mask=m_sampled, other=0), TALL)
                o_log_c = by_row(i_known, TALL) * H + by_head(i_head, TALL)
                m_log_c = by_row(m_sampled, TALL) & by_head(i_head < H, TALL)
                b_log_c = tl.load(corrections + o_log_c, mask=m_log_c, other=0.0)
                m_picked = ((b_bits >> by_head(tl.arange(0, HB) % 32 if HB > 32 else tl.arange(0, HB), TALL)) & 1) != 0
                b_bias = tl.where(by_row(m_sampled, TALL), tl.where(m_picked, b_log_c, float("inf")), 0.0)
        b_bias = tl.where(by_row(m_slot, TALL), b_bias, float("inf"))
        b_score = add_products(zero, b_key0, b_high0, TALL)
        if SPLIT:
            b_score = add_products(b_score, b_key0, b_low0, TALL)
        if LATENT:
            b_key1 = load_rows(p_keys1, i_row, m_slot, keys1_stride, D1, BD1)  # [BN, BD1]
            b_score = add_products(b_score, b_key1, b_high1, TALL)
            if SPLIT:
                b_score = add_products(b_score, b_key1, b_low1, TALL)
        b_value = b_key0 if LATENT else load_rows(p_values, i_row, m_slot, values_stride, V, BV)  # [BN, BV]
        b_score = b_score * scale - b_bias
        b_new = tl.maximum(b_top, tl.max(b_score, axis))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_shrink = tl.exp(b_top - b_safe)
        b_weight = tl.exp(b_score - by_head(b_safe, TALL))
        b_mass = b_mass * b_shrink + tl.sum(b_weight, axis)
        b_out = b_out * by_head(b_shrink, TALL)
        if SPLIT:
            b_weight_high, b_weight_low = split(b_weight, DTYPE)
            b_out = add_values(b_out, b_weight_high, b_value, TALL)
            b_out = add_values(b_out, b_weight_low, b_value, TALL)
        else:
            b_out = add_values(b_out, b_weight.to(DTYPE), b_value, TALL)
        b_top = b_new
    return b_top, b_mass, b_out


@triton.jit
def store_share(
    part_out, part_max, part_sum, b_top, b_mass, b_out, i_bgh, i_head, i_share, shares, H, total, V: tl.constexpr,
    BV: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """Write what :func:`attend_listed` found in one share; without rows, no sum of values."""
    m_head = i_head < H
    o_part = (i_bgh + i_head) * shares + i_share
    tl.store(part_max + o_part, b_top, mask=m_head)
    tl.store(part_sum + o_part, b_mass, mask=m_head)
    if total > 0:
        i_dim = tl.arange(0, BV)
        m_out = by_head(m_head, TALL) & by_row(i_dim < V, TALL)
        tl.store(part_out + by_head(o_part, TALL) * V + by_row(i_dim, TALL), b_out, mask=m_out)


@triton.jit
def flags_of(p_flags, i_team, m_team, first_head, MP, HB: tl.constexpr, WORDS: tl.constexpr, TALL: tl.constexpr):
    """The rows' teams' words of flags beside the scores: the block's only word, or each head's of two."""
    i_word = first_head // 32
    b_first = by_row(tl.load(p_flags + i_word * MP + i_team, mask=m_team, other=0), TALL)
    if HB > 32:
        tl.static_assert(HB == 64, "two words hold the flags of 64 heads")
        m_team = m_team & (tl.zeros_like(i_team) + i_word < WORDS - 1)
        b_second = by_row(tl.load(p_flags + (i_word + 1) * MP + i_team, mask=m_team, other=0), TALL)
        return tl.where(by_head(tl.arange(0, HB) < 32, TALL), b_first, b_second)
    else:
        return b_first >> (first_head % 32)


@triton.jit(do_not_specialize=["E", "visible_stride"])
def attend_kernel(
    query0, query1, keys0, keys1, values, team_of_row, flags, corrections, index, visible, list_rows, list_teams,
    list_bits, list_bias, list_run_numbers, piece_rows, piece_teams, piece_counts, part_out, part_max, part_sum,
    part_rows, scale, query0_strides, query1_strides, keys0_strides, keys1_strides, values_strides, visible_stride, N,
    E, MP, G, H, CAPACITY, PIECE_CAPACITY, D0: tl.constexpr, D1: tl.constexpr, BD0: tl.constexpr, BD1: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, HB: tl.constexpr, BN: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr,
    TALL: tl.constexpr, LATENT: tl.constexpr, SPLIT: tl.constexpr, POOLED: tl.constexpr, ALL: tl.constexpr,
    LISTED: tl.constexpr, MASKED: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr, BY_RUNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (share, head block, sequence * G + group). ``corrections`` are per head, or the pooled ones. LATENT: two
    key parts, of which the first is the value too.

    Writes ``part_max, part_sum (B G, H, shares)`` and, where it had rows, ``part_out (B G, H, shares, V)``, the sum of
    values under exp(score - part_max); ``part_rows (B G, shares, 2)``, union and suffix rows. The lists are scratch;
    LISTED: they are what :func:`~.rowlist.list_kernel` wrote.
    Strides are (sequence, group, head) of a query and (sequence, group, row) of keys and values.
    """
    i_share, shares = tl.program_id(0), tl.num_programs(0)
    i_bg = tl.program_id(2)
    i_b, i_g = i_bg // G, i_bg % G
    first_head = tl.program_id(1) * HB
    i_head = first_head + tl.arange(0, HB)  # [HB]
    b_high0, b_low0 = query_parts(
        query0 + i_b.to(tl.int64) * query0_strides[0] + i_g.to(tl.int64) * query0_strides[1], i_head, H,
        query0_strides[2], D0, BD0, DTYPE, SPLIT,
    )  # fmt: skip
    b_high1, b_low1 = query_parts(
        query1 + i_b.to(tl.int64) * query1_strides[0] + i_g.to(tl.int64) * query1_strides[1], i_head, H,
        query1_strides[2], D1, BD1, DTYPE, SPLIT,
    )  # fmt: skip
    p_keys0 = keys0 + i_b.to(tl.int64) * keys0_strides[0] + i_g.to(tl.int64) * keys0_strides[1]
    p_keys1 = keys1 + i_b.to(tl.int64) * keys1_strides[0] + i_g.to(tl.int64) * keys1_strides[1]
    p_values = values + i_b.to(tl.int64) * values_strides[0] + i_g.to(tl.int64) * values_strides[1]
    i_bgh = i_bg.to(tl.int64) * H
    o_list = ((i_bg.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * shares + i_share) * CAPACITY
    p_list_rows = list_rows + o_list
    p_list_teams = list_teams + o_list
    p_list_bits = list_bits + o_list
    p_team_of_row = team_of_row + i_bg.to(tl.int64) * N
    p_flags = flags + i_bg.to(tl.int64) * WORDS * MP
    # line 13: the index set, as a list
    if LISTED:
        i_piece = ((i_bg if POOLED else i_bg * tl.num_programs(1) + tl.program_id(1)) * shares + i_share) * PIECES
        p_counts = piece_counts + i_piece * 3
        o_pieces = i_piece.to(tl.int64) * PIECE_CAPACITY
        wait(PDL)
        total = joined_pieces(
            p_counts, piece_rows + o_pieces, piece_teams + o_pieces, corrections, p_list_rows, p_list_teams,
            list_bias + o_list, i_bg.to(tl.int64) * MP, PIECE_CAPACITY, POOLED=POOLED, LANES=256,
        )  # fmt: skip
    else:
        per_share = tl.cdiv(tl.cdiv(N, RUN), shares) * RUN
        i_first_rows, i_first_teams = share_rows(p_team_of_row, 0, N, per_share, i_share, shares, LANES)
        wait(PDL)
        if BY_RUNS and not ALL:
            p_runs = list_run_numbers + o_list // RUN
            found = list_runs(
                i_first_teams, p_team_of_row, p_flags, p_runs, N, per_share, i_share, shares, MP, first_head, HB=HB,
                WORDS=WORDS, POOLED=POOLED, LANES=LANES,
            )  # fmt: skip
            listed, union = append_runs(
                found, p_runs, p_team_of_row, p_flags, p_list_rows, p_list_teams, p_list_bits, N, i_share, shares, MP,
                first_head, HB=HB, WORDS=WORDS, POOLED=POOLED, LANES=512,
            )  # fmt: skip
        else:
            listed, union = append_union(
                i_first_rows, i_first_teams, p_team_of_row, p_flags, p_list_rows, p_list_teams, p_list_bits, N,
                per_share, i_share, shares, MP, first_head, HB=HB, WORDS=WORDS, POOLED=POOLED, ALL=ALL, BITS=HB <= 32,
                LANES=LANES,
            )  # fmt: skip
        total = append_suffix(
            index, visible, visible_stride, p_list_rows, p_list_teams, listed, E, i_b, i_share, shares, MASKED=MASKED,
            LANES=LANES,
        )  # fmt: skip
        tl.debug_barrier()

    b_top, b_mass, b_out = attend_listed(
        p_keys0, p_keys1, p_values, p_list_rows, p_list_teams, p_list_bits, corrections, total,
        i_bg.to(tl.int64) * MP, i_head, b_high0, b_low0, b_high1, b_low1, scale, H, keys0_strides[2],
        keys1_strides[2], values_strides[2], D0=D0, D1=D1, BD0=BD0, BD1=BD1, V=V, BV=BV, BN=BN, TALL=TALL,
        LATENT=LATENT, SPLIT=SPLIT, POOLED=POOLED, ALL=ALL, DTYPE=DTYPE, STAGES=STAGES,
        p_list_bias=list_bias + o_list, p_flags=p_flags, first_head=first_head, MP=MP, WORDS=WORDS, JOINED=LISTED,
    )  # fmt: skip

    store_share(
        part_out, part_max, part_sum, b_top, b_mass, b_out, i_bgh, i_head, i_share, shares, H, total, V=V, BV=BV,
        TALL=TALL,
    )  # fmt: skip
    if tl.program_id(1) == 0:
        p_count = part_rows + (i_bg.to(tl.int64) * shares + i_share) * 2
        if LISTED:
            tl.store(p_count, sum_of(p_counts + 1))
            tl.store(p_count + 1, sum_of(p_counts + 2))
        else:
            tl.store(p_count, union)
            tl.store(p_count + 1, total - listed)
