"""Products of routing keys and queries in integer codes (:mod:`latent_santa.routing_keys`), on 8-bit tensor cores.

A query is coded in 14 bits and a sign, times a power of two, and enters as two 8-bit parts: coding it, the products and
their sums over one group of dimensions are exact. Only the sum over groups, each times its scale, is rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .interpreter import INTERPRETED
from .maths import load_query

# four bytes of two 4-bit codes, each plus 8, to four codes times 16 in 8 bits: those in the low halves, and in the high
NIBBLES = tl.constexpr(
    "{.reg .b32 low; shl.b32 low, $2, 4; lop3.b32 $0, low, 0x80808080, 0xF0F0F0F0, 0x28; "
    "lop3.b32 $1, $2, 0x80808080, 0xF0F0F0F0, 0x28;}"
)


@triton.jit
def nibbles(codes):
    """Bytes as 16 times the codes in their low and in their high halves, int8."""
    if INTERPRETED:
        low, high = (codes & 15).to(tl.int32), (codes >> 4).to(tl.int32)
        return ((low - 8) * 16).to(tl.int8), ((high - 8) * 16).to(tl.int8)
    else:
        return tl.inline_asm_elementwise(NIBBLES, "=r,=r,r", [codes], dtype=(tl.int8, tl.int8), is_pure=True, pack=4)


@triton.jit
def half_float(word):
    """The float16 in a word's lower half, as float32."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.constexpr_function
def words_of_scales(dims, group, bits):
    """Words of 32 bits that hold one key part's scales: one float32, or in 4 bits the float16 of two groups each."""
    return 1 if bits == 8 else dims // group // 2


@triton.jit
def code_query(p_query, i_head, H, stride, D: tl.constexpr, DC: tl.constexpr):
    """Codes of the queries of heads ``[HB]`` in one key part: int8 ``[2 HB, dims]`` per DC dimensions, the high and the
    low part of every head beside one another; and what a code counts, ``[HB]``."""
    HB: tl.constexpr = i_head.shape[0]
    # an 8-bit product has at least 32 dimensions; fewer are padded with zeros
    i_dim = tl.arange(0, DC if DC > 32 else 32)
    b_most = tl.zeros((HB, i_dim.shape[0]), tl.float32)
    for i in tl.static_range(D // DC):
        b_query = load_query(p_query + i * DC, i_head, i_dim, H, DC, stride)
        b_most = tl.maximum(b_most, tl.abs(b_query.to(tl.float32)))
    # float32's exponent of the largest; below 14 one of the two powers would be no float32
    b_exponent = tl.maximum(tl.max(b_most, 1).to(tl.int32, bitcast=True) >> 23, 14)  # [HB]
    b_power = ((267 - b_exponent) << 23).to(tl.float32, bitcast=True)  # takes the largest to 2^13 .. 2^14
    codes: tl.tuple = ()
    for i in tl.static_range(D // DC):
        b_query = load_query(p_query + i * DC, i_head, i_dim, H, DC, stride).to(tl.float32) * b_power[:, None]
        # 1.5 x 2^23 is added: the sum's last bits are the nearest integer, of two the even one
        b_code = (b_query + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # [HB, dims]
        b_high = (b_code + 128) >> 8
        b_both = tl.join(b_high.to(tl.int8), (b_code - (b_high << 8)).to(tl.int8))  # [HB, dims, 2]
        codes += (tl.reshape(tl.permute(b_both, (0, 2, 1)), (2 * HB, i_dim.shape[0])),)
    return codes, ((b_exponent - 13) << 23).to(tl.float32, bitcast=True)


@triton.jit
def product(b_codes, b_query, b_before):
    """b_before plus keys ``[T, dims]`` times both parts of the queries ``[2 HB, dims]``, all codes: ``[T, 2 HB]``."""
    return tl.dot(b_codes, tl.trans(b_query), b_before, out_dtype=tl.int32)


@triton.jit
def whole(b_both):
    """The products with both parts of a query as one number: ``[T, HB]`` float32."""
    b_high, b_low = tl.split(tl.reshape(b_both, (b_both.shape[0], b_both.shape[1] // 2, 2)))
    return (b_high * 256 + b_low).to(tl.float32)


@triton.jit
def coded_scores(
    p_codes, p_scales, codes, b_unit, i_team, m_team, stride, D: tl.constexpr, BITS: tl.constexpr, DC: tl.constexpr
):
    """Scores ``[T, HB]`` of teams ``i_team [T]`` in one key part; ``codes`` and ``b_unit`` as :func:`code_query` gives.

    ``p_scales`` points to a float32 per team, or in 4 bits to words that hold the float16 scales of two groups.
    """
    T: tl.constexpr = i_team.shape[0]
    HB: tl.constexpr = b_unit.shape[0]
    i_dim = tl.arange(0, DC if DC > 32 else 32)
    m_codes = m_team[:, None]
    if DC < 32:
        m_codes = m_codes & (i_dim < DC)[None, :]
    p_team = p_codes + i_team.to(tl.int64)[:, None] * stride + i_dim[None, :]
    b_both = tl.zeros((T, 2 * HB), tl.int32)
    if BITS == 8:
        b_scale = tl.load(p_scales + i_team, mask=m_team, other=0.0)  # [T]
        held: tl.tuple = ()
        for i in tl.static_range(D // DC):
            held += (tl.load(p_team + i * DC, mask=m_codes, other=0),)
        for i in tl.static_range(D // DC):
            b_both = product(held[i], codes[i], b_both)
        return whole(b_both) * b_scale[:, None] * b_unit[None, :]
    else:
        # loaded pair by pair: all at once, they take 255 registers instead of 173
        PAIRS: tl.constexpr = words_of_scales(D, DC, BITS)
        acc = tl.zeros((T, HB), tl.float32)
        for i in tl.static_range(PAIRS):
            b_scale = tl.load(p_scales + i_team * PAIRS + i, mask=m_team, other=0)  # [T]
            b_first, b_second = nibbles(tl.load(p_team + i * DC, mask=m_codes, other=0))
            acc += whole(product(b_first, codes[2 * i], b_both)) * half_float(b_scale)[:, None]
            acc += whole(product(b_second, codes[2 * i + 1], b_both)) * half_float(b_scale >> 16)[:, None]
        return acc * (b_unit * 0.0625)[None, :]
