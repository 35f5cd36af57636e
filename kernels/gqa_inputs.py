"""What GQA attention makes of its three projections, in one launch: rotated queries, and the new row of the cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import current
from .mla_inputs import Angles, rotate
from .plan import power


@triton.jit
def gqa_inputs_kernel(
    query, key, value, cos, sin, place, keys, values, query_stride, key_stride, value_stride, angle_strides,
    keys_strides, values_strides, H, G, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """Program (h, sequence) rotates head h of ``query (B, H D)`` in place. Program (H + g, sequence) rotates head g of
    ``key (B, G D)`` and writes it and ``value (B, G D)`` to row ``place`` of ``keys`` and ``values`` (row 0 if not
    PLACED), whose strides are (sequence, head, row)."""
    i_head, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_row = 0
    if PLACED:
        i_row = tl.load(place)
    i_g = i_head - H
    if i_head < H:
        p_in = query + i_b * query_stride + i_head * D
        p_out = p_in
    else:
        p_in = key + i_b * key_stride + i_g * D
        p_out = keys + i_b * keys_strides[0] + i_g * keys_strides[1] + i_row * keys_strides[2]
    rotate(p_in, p_out, cos, sin, i_b, angle_strides, D, BH, PAIRS_IN, PAIRS_OUT)
    if i_head >= H:
        i_dim = tl.arange(0, BD)
        b_value = tl.load(value + i_b * value_stride + i_g * D + i_dim, mask=i_dim < D, other=0.0)
        p_value = values + i_b * values_strides[0] + i_g * values_strides[1] + i_row * values_strides[2]
        tl.store(p_value + i_dim, b_value, mask=i_dim < D)


def gqa_inputs(
    query: Tensor, key: Tensor, value: Tensor, angles: Angles, keys: Tensor, values: Tensor, place: Tensor | None
) -> None:
    """Rotate a decoding step's queries in place, and write its row of the cache.

    Args:
        query: ``(B, H, D)``, heads one behind the other.
        key, value: ``(B, G, D)``, likewise.
        angles: of all D dimensions.
        keys, values: ``(B, G, N, D)``, of which one row is written.
        place: ``(1,)`` int64, that row, or None for the first one.
    """
    batch, heads, width = query.shape
    one = angles.cos.shape[0] == 1  # the same position in every sequence
    with current(query.device):
        gqa_inputs_kernel[(heads + key.shape[1], batch)](
            query=query,
            key=key,
            value=value,
            cos=angles.cos,
            sin=angles.sin,
            place=key if place is None else place,
            keys=keys,
            values=values,
            query_stride=query.stride(0),
            key_stride=key.stride(0),
            value_stride=value.stride(0),
            angle_strides=(0 if one else angles.cos.stride(0), angles.cos.stride(-1)),
            keys_strides=keys.stride()[:3],
            values_strides=values.stride()[:3],
            H=heads,
            G=key.shape[1],
            D=width,
            BH=power(width // 2),
            BD=power(width),
            PAIRS_IN=angles.pairs_in,
            PAIRS_OUT=angles.pairs_out,
            PLACED=place is not None,
            num_warps=1,
            enable_fp_fusion=False,  # or a product in the model's dtype would not be rounded before it is added
        )
