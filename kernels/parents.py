"""Parents in two-stage routing: the delta of their scores, their teams, and the ones that any head sampled."""

from __future__ import annotations

import triton
import triton.language as tl

from .maths import add_product, load_query


@triton.jit
def add_half_variances(
    b_phi, query, spread, i_parent, m_parent, i_head, i_b, i_g, H, scale, query_strides, spread_strides,
    D: tl.constexpr, DC: tl.constexpr, dtype: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """b_phi ``[T, HB]`` plus half the variance of the parents' scores in one key part, DC dimensions at a time.

    ``spread`` holds variances in the rows' dtype ("diagonal"), or one mean squared distance per parent in float32
    ("isotropic").
    """
    HB: tl.constexpr = i_head.shape[0]
    p_query = query + i_b.to(tl.int64) * query_strides[0] + i_g.to(tl.int64) * query_strides[1]
    p_spread = spread + i_b.to(tl.int64) * spread_strides[0] + i_g.to(tl.int64) * spread_strides[1]
    o_parent = i_parent.to(tl.int64) * spread_strides[2]
    b_total = tl.zeros((HB,), tl.float32)  # [HB]
    for o_dim in range(0, D, DC):
        i_dim = o_dim + tl.arange(0, DC)
        b_query = load_query(p_query, i_head, i_dim, H, D, query_strides[2]).to(tl.float32) * scale  # [HB, DC]
        b_half = 0.5 * b_query * b_query
        if SPREAD == "diagonal":
            m_spread = m_parent[:, None] & (i_dim < D)[None, :]
            b_spread = tl.load(p_spread + o_parent[:, None] + i_dim[None, :], mask=m_spread, other=0)  # [T, DC]
            # squares have twice a query's digits, whatever its dtype
            b_phi = add_product(b_phi, b_spread, b_half, dtype, SPLIT=dtype != tl.float32)
        else:
            b_total += tl.sum(b_half, 1)
    if SPREAD == "isotropic":
        b_spread = tl.load(p_spread + o_parent, mask=m_parent, other=0.0)  # [T]
        b_phi += b_spread[:, None] * (b_total / D)[None, :]
    return b_phi


@triton.jit
def prepare_teams(p_of_team, p_first_team, p_flags, M, MP, WORDS, i_program, programs, LANES: tl.constexpr):
    """Write every parent's first team (its others follow it) and clear the teams' flags: one program's part of it."""
    for start in range(i_program * LANES, M, programs * LANES):
        i_team = start + tl.arange(0, LANES)  # [LANES]
        m_team = i_team < M
        b_parent = tl.load(p_of_team + i_team, mask=m_team, other=-1)  # [LANES]
        b_before = tl.load(p_of_team + i_team - 1, mask=m_team & (i_team > 0), other=-1)  # [LANES]
        tl.store(p_first_team + b_parent, i_team, mask=(b_parent >= 0) & (b_parent != b_before))
        for i_word in range(WORDS):
            tl.store(p_flags + i_word * MP + i_team, tl.zeros((LANES,), tl.int32), mask=m_team)


@triton.jit
def ones(word):
    """How many bits of the int32 ``word`` are set."""
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def parents_in(p_union, words, LANES: tl.constexpr):
    """How many parents are sampled: bits that are set in so many words."""
    b_ones = tl.zeros((LANES,), tl.int32)
    for start in range(0, words, LANES):
        i_word = start + tl.arange(0, LANES)
        b_ones += ones(tl.load(p_union + i_word, mask=i_word < words, other=0))
    return tl.sum(b_ones, 0)


@triton.jit
def parents_at(p_union, words, i_rank, LANES: tl.constexpr):
    """The sampled parents ``i_rank [PT]`` in rising order, and how many there are; beyond that number they are
    meaningless.

    ``p_union`` points to ``words`` words with a bit for every sampled parent.
    """
    PT: tl.constexpr = i_rank.shape[0]
    total = 0
    b_word = tl.zeros((PT,), tl.int32)  # words before the parent's
    b_before = tl.zeros((PT,), tl.int32)  # parents in them
    for start in range(0, words, LANES):
        i_word = start + tl.arange(0, LANES)
        b_ones = ones(tl.load(p_union + i_word, mask=i_word < words, other=0))  # [LANES]
        m_before = (total + tl.cumsum(b_ones, 0))[:, None] <= i_rank[None, :]  # [LANES, PT]
        b_word += tl.sum(m_before.to(tl.int32), 0)
        b_before += tl.sum(tl.where(m_before, b_ones[:, None], 0), 0)
        total += tl.sum(b_ones, 0)
    b_bits = tl.load(p_union + b_word, mask=i_rank < total, other=0)  # [PT]
    i_bit = tl.arange(0, 32)
    b_bit = (b_bits[:, None] >> i_bit[None, :]) & 1  # [PT, 32]
    m_wanted = (b_bit != 0) & (tl.cumsum(b_bit, 1) == (i_rank - b_before + 1)[:, None])
    return b_word * 32 + tl.sum(tl.where(m_wanted, i_bit[None, :], 0), 1), total
