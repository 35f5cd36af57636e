"""Noise and corrections inside the kernels: the formulas of latent_santa.noise and latent_santa.sampling."""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


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
def gumbel(word):
    """Standard Gumbel draws from 32-bit words: -log(-log1p(-u)), u clamped to [2^-33, 1 - 2^-24]."""
    u = word.to(tl.float32) * 2.3283064365386963e-10
    u = tl.minimum(tl.maximum(u, 1.1641532182693481e-10), 0.99999994039535522)
    return -quick_log(minus_log1p_minus(u))


@triton.jit
def sequence_key(key_ptr, b):
    """The 64-bit Philox key of sequence ``b``, from its two int64 words."""
    return tl.load(key_ptr + 2 * b) | (tl.load(key_ptr + 2 * b + 1) << 32)


@triton.jit
def words(key, team, counter, step, layer):
    """Philox4x32-10 of the counter (team, counter, step, layer), broadcast to one shape: four uint32 tensors."""
    c0 = team.to(tl.uint32) + tl.zeros_like(counter).to(tl.uint32)
    c1 = counter.to(tl.uint32) + tl.zeros_like(team).to(tl.uint32)
    zero = tl.zeros_like(c0)
    return tl.philox(key, c0, c1, zero + step.to(tl.uint32), zero + layer.to(tl.uint32))


@triton.jit
def gumbel_tile(key, team, group, head, step, layer, HEADS: tl.constexpr, SHARED: tl.constexpr):
    """Draws ``(T, HEADS)`` of teams ``(T,)`` and heads ``head .. head + HEADS - 1``, ``head`` a multiple of 4.

    One Philox call serves the four heads of a quad. SHARED gives every head the group's first draw.
    """
    T: tl.constexpr = team.shape[0]
    if SHARED:
        first = tl.zeros((T, 1), tl.int32) + group * 65536
        w, _, _, _ = words(key, team[:, None], first, step, layer)
        return gumbel(w) + tl.zeros((T, HEADS), tl.float32)
    quad = group * 65536 + head // 4 + tl.arange(0, HEADS // 4)
    w0, w1, w2, w3 = words(key, team[:, None], quad[None, :], step, layer)
    w = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return gumbel(tl.reshape(w, (T, HEADS)))


@triton.jit
def gumbel_head(key, team, group, head, step, layer, SHARED: tl.constexpr):
    """Draws of one head for a tensor of teams of any shape."""
    if SHARED:
        head = head * 0
    w0, w1, w2, w3 = words(key, team, tl.zeros_like(team) + (group * 65536 + head // 4), step, layer)
    place = head % 4
    return gumbel(tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3)))


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


@triton.jit
def split(x, dtype: tl.constexpr):
    """float32 as two parts of ``dtype`` whose sum keeps about twice its precision."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in float32; float32 operands take three tf32 passes, which keeps float32's accuracy."""
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def wait(PDL: tl.constexpr):
    """Programmatic dependent launch: let the next kernel start, then wait for the previous one's writes."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
