"""What MLA attention computes from its two projections, in one launch: rotated queries, and the new row of the cache.

PyTorch's kernels for it, a norm, complex products, casts and copies, are a dozen, each shorter than the time between
launches.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .launch import current
from .plan import power


class Angles(NamedTuple):
    """Cosines and sines of a rotary embedding, ``(1 or B, 1, at least R / 2)`` with equal strides, and how the R
    numbers that they turn lie before and after: as pairs of neighbours, or as a first and a second half."""

    cos: Tensor
    sin: Tensor
    pairs_in: bool
    pairs_out: bool


@triton.jit
def halves(HALF: tl.constexpr, BH: tl.constexpr, PAIRS: tl.constexpr):
    """Where the two numbers ``[BH]`` of each rotated pair lie."""
    i = tl.arange(0, BH)
    if PAIRS:
        return 2 * i, 2 * i + 1
    return i, HALF + i


@triton.jit
def rotate(
    p_in, p_out, cos, sin, i_b, angle_strides, D: tl.constexpr, BH: tl.constexpr, PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
):  # fmt: skip
    """Write the D numbers at ``p_in``, rotated by the angles of sequence i_b, to ``p_out``, which may be the same."""
    HALF: tl.constexpr = D // 2
    dtype: tl.constexpr = p_in.dtype.element_ty
    i_half = tl.arange(0, BH)
    m_half = i_half < HALF
    o_angle = i_b * angle_strides[0] + i_half * angle_strides[1]
    b_cos = tl.load(cos + o_angle, mask=m_half, other=0.0)  # [BH]
    b_sin = tl.load(sin + o_angle, mask=m_half, other=0.0)  # [BH]
    o_first, o_second = halves(HALF, BH, PAIRS_IN)
    b_first = tl.load(p_in + o_first, mask=m_half, other=0.0).to(tl.float32)
    b_second = tl.load(p_in + o_second, mask=m_half, other=0.0).to(tl.float32)
    tl.debug_barrier()  # what is written may lie where another thread reads
    if b_cos.dtype == dtype:  # a model that rotates in its dtype rounds each product
        b_cos, b_sin = b_cos.to(tl.float32), b_sin.to(tl.float32)
        b_left = (b_first * b_cos).to(dtype).to(tl.float32) - (b_second * b_sin).to(dtype).to(tl.float32)
        b_right = (b_second * b_cos).to(dtype).to(tl.float32) + (b_first * b_sin).to(dtype).to(tl.float32)
    else:  # as PyTorch's products of complex numbers are rounded on a GPU
        b_cos, b_sin = b_cos.to(tl.float32), b_sin.to(tl.float32)
        b_left = tl.fma(b_first, b_cos, -(b_second * b_sin))
        b_right = tl.fma(b_first, b_sin, b_second * b_cos)
    o_first, o_second = halves(HALF, BH, PAIRS_OUT)
    tl.store(p_out + o_first, b_left.to(dtype), mask=m_half)
    tl.store(p_out + o_second, b_right.to(dtype), mask=m_half)


@triton.jit
def mla_inputs_kernel(
    query, compressed, normed, weight, cos, sin, place, latents, keys, eps, query_stride, compressed_stride,
    angle_strides, latents_strides, keys_strides, H, NOPE: tl.constexpr, ROPE: tl.constexpr, BH: tl.constexpr,
    RANK: tl.constexpr, BR: tl.constexpr, PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr, PLACED: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """Program (h, sequence) rotates the last ROPE numbers of head h's ``query (B, H (NOPE + ROPE))`` in place. Program
    (H, sequence) norms the first RANK numbers of ``compressed (B, RANK + ROPE)``, or takes ``normed (B, RANK)`` if
    NORMED, rotates the others, and writes both to row ``place`` of ``latents`` and ``keys`` (row 0 if not PLACED),
    whose strides are (sequence, row)."""
    i_head, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_row = 0
    if PLACED:
        i_row = tl.load(place)
    p_latent = latents + i_b * latents_strides[0] + i_row * latents_strides[1]
    if i_head < H:
        p_in = query + i_b * query_stride + i_head * (NOPE + ROPE) + NOPE
        p_out = p_in
    else:
        p_in = compressed + i_b * compressed_stride + RANK
        p_out = keys + i_b * keys_strides[0] + i_row * keys_strides[1]
    rotate(p_in, p_out, cos, sin, i_b, angle_strides, ROPE, BH, PAIRS_IN, PAIRS_OUT)
    if i_head == H:
        i_dim = tl.arange(0, BR)
        m_dim = i_dim < RANK
        dtype: tl.constexpr = query.dtype.element_ty
        if NORMED:
            b_latent = tl.load(normed + i_b * RANK + i_dim, mask=m_dim, other=0.0)
        else:
            b_latent = tl.load(compressed + i_b * compressed_stride + i_dim, mask=m_dim, other=0.0).to(tl.float32)
            b_latent = b_latent * tl.rsqrt(tl.sum(b_latent * b_latent, 0) / RANK + eps)
            b_weight = tl.load(weight + i_dim, mask=m_dim, other=0.0).to(tl.float32)
            b_latent = (b_latent.to(dtype).to(tl.float32) * b_weight).to(dtype)
        tl.store(p_latent + i_dim, b_latent, mask=m_dim)


def mla_inputs(
    query: Tensor,
    compressed: Tensor,
    weight: Tensor,
    eps: float,
    angles: Angles,
    rope: int,
    latents: Tensor,
    keys: Tensor,
    place: Tensor | None,
    normed: Tensor | None = None,
) -> None:
    """Rotate a decoding step's queries in place, and write its row of the cache.

    Args:
        query: ``(B, H, nope + rope)``, one behind the other.
        compressed: ``(B, rank + rope)``, the latent before its norm, and the key before its rotation.
        weight, eps: of the latents' RMSNorm, ``(rank,)``.
        rope: R, rotated dimensions.
        latents, keys: ``(B, 1, N, rank)`` and ``(B, 1, N, rope)``, of which one row is written.
        place: ``(1,)`` int64, that row, or None for the first one.
        normed: ``(B, rank)``, the latent after its norm, or None to norm it here.
    """
    batch, heads, width = query.shape
    one = angles.cos.shape[0] == 1  # the same position in every sequence
    with current(query.device):
        mla_inputs_kernel[(heads + 1, batch)](
            query=query,
            compressed=compressed,
            normed=compressed if normed is None else normed,
            weight=weight,
            cos=angles.cos,
            sin=angles.sin,
            place=weight if place is None else place,
            latents=latents,
            keys=keys,
            eps=eps,
            query_stride=query.stride(0),
            compressed_stride=compressed.stride(0),
            angle_strides=(0 if one else angles.cos.stride(0), angles.cos.stride(-1)),
            latents_strides=(latents.stride(0), latents.stride(2)),
            keys_strides=(keys.stride(0), keys.stride(2)),
            H=heads,
            NOPE=width - rope,
            ROPE=rope,
            BH=power(rope // 2),
            RANK=weight.shape[0],
            BR=power(weight.shape[0]),
            PAIRS_IN=angles.pairs_in,
            PAIRS_OUT=angles.pairs_out,
            PLACED=place is not None,
            NORMED=normed is not None,
            num_warps=1,
            enable_fp_fusion=False,  # or a product in the model's dtype would not be rounded before it is added
        )
