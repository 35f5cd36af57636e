"""Arithmetic that several kernels share: queries and products in two precisions, logarithms, Equation 7."""

from __future__ import annotations

import triton
import triton.language as tl

from .interpreter import INTERPRETED


@triton.jit
def load_query(p_query, i_head, i_dim, H, D, stride):
    """Queries ``[heads, dims]`` in their own dtype, zero beyond head H or dimension D."""
    m_query = (i_head < H)[:, None] & (i_dim < D)[None, :]
    return tl.load(p_query + i_head[:, None] * stride + i_dim[None, :], mask=m_query, other=0.0)


@triton.jit
def split(x, dtype: tl.constexpr):
    """float32 as two parts of ``dtype``, high and low, whose sum keeps about twice the precision of ``dtype``."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in float32; float32 operands take three tf32 passes, which keeps float32's accuracy."""
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def add_product(acc, b_key, b_query, dtype: tl.constexpr, SPLIT: tl.constexpr):
    """acc ``[T, HB]`` plus keys ``[T, dims]`` times queries ``[HB, dims]``; SPLIT feeds float32 queries as two parts
    of the keys' dtype."""
    if SPLIT:
        b_high, b_low = split(b_query.to(tl.float32), dtype)
        acc = dot(b_key, tl.trans(b_high), acc)
        return dot(b_key, tl.trans(b_low), acc)
    else:
        return dot(b_key, tl.trans(b_query.to(dtype)), acc)


@triton.jit
def quick_log(x):
    """log(x) by the hardware's base-2 logarithm: absolute error about 2**-22, a fifth of libdevice's instructions."""
    if INTERPRETED:
        return tl.log(x)
    y = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y * 0.6931471805599453


@triton.jit
def minus_log1p_minus(u):
    """-log(1 - u) for u in (0, 1), float32, to a relative 1e-6.

    The largest draws come from small u, where the logarithm of a rounded 1 - u would lose everything: there its series
    is summed. Above 1/8 the logarithm is large enough for an absolute error.
    """
    p = 1.0 / 7.0 + u * (1.0 / 8.0)
    p = 1.0 / 6.0 + u * p
    p = 0.2 + u * p
    p = 0.25 + u * p
    p = 1.0 / 3.0 + u * p
    p = 0.5 + u * p
    p = 1.0 + u * p
    return tl.where(u < 0.125, u * p, -quick_log(1.0 - u))


@triton.jit
def log_inclusion(x):
    """log(1 - exp(-exp(x))), Equation 7 in the log domain; x may be -inf or +inf.

    Below e = exp(x) = 1/2 the factor (1 - exp(-e)) / e comes from its alternating series, so tiny corrections keep
    their precision.
    """
    e = tl.exp(tl.minimum(x, 5.0))
    s = tl.minimum(e, 0.5)
    p = 1.0 - s / 8.0
    p = 1.0 - s / 7.0 * p
    p = 1.0 - s / 6.0 * p
    p = 1.0 - s / 5.0 * p
    p = 1.0 - s / 4.0 * p
    p = 1.0 - s / 3.0 * p
    p = 1.0 - s / 2.0 * p
    return tl.where(e <= 0.5, x + tl.log(p), tl.log(1.0 - tl.exp(-e)))
