"""Gumbel noise inside the kernels: the words and the formulas of latent_santa.noise."""

from __future__ import annotations

import triton
import triton.language as tl

from .maths import minus_log1p_minus, quick_log


@triton.jit
def gumbel(bits):
    """Standard Gumbel draws from 32-bit words: -log(-log1p(-u)), u clamped to [2^-33, 1 - 2^-24]."""
    u = bits.to(tl.float32) * 2.3283064365386963e-10
    u = tl.minimum(tl.maximum(u, 1.1641532182693481e-10), 0.99999994039535522)
    return -quick_log(minus_log1p_minus(u))


@triton.jit
def sequence_key(p_key, i_b):
    """The 64-bit Philox key of sequence ``i_b``, from its two int64 words."""
    return tl.load(p_key + 2 * i_b) | (tl.load(p_key + 2 * i_b + 1) << 32)


@triton.jit
def philox_words(key, i_team, counter, step, layer):
    """Philox4x32-10 of the counter (team, counter, step, layer), broadcast to one shape: four uint32 tensors."""
    c0 = i_team.to(tl.uint32) + tl.zeros_like(counter).to(tl.uint32)
    c1 = counter.to(tl.uint32) + tl.zeros_like(i_team).to(tl.uint32)
    zero = tl.zeros_like(c0)
    return tl.philox(key, c0, c1, zero + step.to(tl.uint32), zero + layer.to(tl.uint32))


@triton.jit
def gumbel_tile(key, i_team, quad, i_head, step, layer, HEADS: tl.constexpr, SHARED: tl.constexpr):
    """Draws ``[T, HEADS]`` of teams ``[T]`` and heads ``i_head .. i_head + HEADS - 1``, ``i_head`` a multiple of 4.

    ``quad`` is the counter of the group's first quad here; one Philox call serves the four heads of a quad. SHARED
    gives every head the group's first draw.
    """
    T: tl.constexpr = i_team.shape[0]
    if SHARED:
        first = tl.zeros((T, 1), tl.int32) + quad
        w, _, _, _ = philox_words(key, i_team[:, None], first, step, layer)  # [T, 1]
        return gumbel(w) + tl.zeros((T, HEADS), tl.float32)
    quads = quad + i_head // 4 + tl.arange(0, HEADS // 4)
    w0, w1, w2, w3 = philox_words(key, i_team[:, None], quads[None, :], step, layer)  # [T, HEADS / 4] each
    w = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [T, HEADS / 4, 2, 2]
    return gumbel(tl.reshape(w, (T, HEADS)))


@triton.jit
def gumbel_head(key, i_team, quad, i_head, step, layer, SHARED: tl.constexpr):
    """Draws of one head for a tensor of teams of any shape; ``quad`` as above."""
    if SHARED:
        i_head = i_head * 0
    w0, w1, w2, w3 = philox_words(key, i_team, tl.zeros_like(i_team) + (quad + i_head // 4), step, layer)
    place = i_head % 4
    return gumbel(tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3)))
