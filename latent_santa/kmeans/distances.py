"""Squared distances as matrix products: rows and centers as factors that hold their norms beside them.

Symbols: Q problems, N or R rows, D dimensions, k centers, W columns of a row's factors.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF_TYPES = (torch.bfloat16, torch.float16)

_NORM_SCALE = 256.0
# Bytes of one block of distances.
_DISTANCE_BYTES = 512 * 2**20


def products(a: Tensor, b: Tensor) -> Tensor:
    """Batched ``a @ b`` in float32; half types multiply exactly and accumulate in float32."""
    if a.is_cuda and a.dtype in HALF_TYPES:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def _pieces(dtype: torch.dtype) -> tuple[int, float]:
    """Numbers that hold one squared norm, and its scale.

    A half type holds a norm as three numbers, scaled so that float16 does not overflow; together they have float32's
    precision.
    """
    return (3, _NORM_SCALE) if dtype in HALF_TYPES else (1, 1.0)


def copies_of(table: Tensor) -> int:
    """Times that a row's factors stand side by side: the halves of a center are two rows of factors."""
    return 2 if table.dtype in HALF_TYPES else 1


def row_factors(x: Tensor, norms: Tensor) -> Tensor:
    """(Q, N, W): rows (Q, N, D), squared norms (Q, N), units in as many columns, and two zeros that align the width.

    Squared distances become one matrix product: ``|a|^2 + |b|^2 - 2 a.b``, in which a norm meets the other's unit.
    """
    count, scale = _pieces(x.dtype)
    columns, rest = [], norms / scale
    for _ in range(count):
        columns.append(rest.to(x.dtype))
        rest = rest - columns[-1]
    unit = torch.full_like(columns[0], scale)
    zero = torch.zeros_like(unit)
    return torch.cat((x, torch.stack((*columns, *[unit] * count, zero, zero), dim=-1)), dim=-1)


def opposite_factors(right: Tensor, width: int) -> Tensor:
    """For row factors (R, W), the factors whose products with row factors are squared distances."""
    count, _ = _pieces(right.dtype)
    x, norm, unit, pad = right.split((width, count, count, right.shape[1] - width - 2 * count), dim=1)
    return torch.cat((-2 * x, unit, norm, pad), dim=1)


def center_factors(centers: Tensor, real: Tensor, table: Tensor) -> Tensor:
    """(Q, k, copies, W): factors whose products with those of rows are minus half the squared distances.

    With half rows, a center is the sum of two half numbers: more exact than TF32 at the same cost, and without touching
    a global flag. Its norm is that of the sum, so distances are those to one point.
    """
    width, (count, scale) = centers.shape[2], _pieces(table.dtype)
    facing = table.new_zeros(*centers.shape[:2], copies_of(table), table.shape[2])
    facing[:, :, 0, width : width + count] = -0.5 * scale
    write_centers(facing, centers, real)
    return facing


def write_centers(facing: Tensor, centers: Tensor, real: Tensor) -> None:
    """Bring ``centers`` (Q, k, D) float32 into their factors ``facing``, in place."""
    width, (count, scale) = centers.shape[2], _pieces(facing.dtype)
    high, whole = facing[:, :, 0, :width], centers
    high.copy_(centers)
    if facing.shape[2] > 1:
        low = facing[:, :, 1, :width]
        torch.sub(centers, high, out=low)
        whole = high.float().add_(low)
    norms = facing[:, :, 0, width + count : width + 2 * count]
    rest = whole.square().sum(-1).mul_(-0.5 / scale)
    for piece in norms.unbind(-1):
        piece.copy_(rest)
        rest = rest - piece
    norms[:, :, 0].masked_fill_(~real, -torch.inf)


def nearest_centers(factors: Tensor, facing: Tensor) -> tuple[Tensor, Tensor]:
    """For row factors (Q, R, copies W): the smallest squared distance (Q, R) float32, and its center (Q, R) int64.

    facing: as of :func:`center_factors`. The lowest of equally near centers is taken.
    """
    columns = facing.flatten(2).transpose(1, 2)
    chunk = max(1, _DISTANCE_BYTES // (4 * columns.shape[0] * columns.shape[2]))
    scores, labels = zip(*(products(part, columns).max(dim=-1) for part in factors.split(chunk, dim=1)), strict=True)
    return torch.cat(scores, dim=1).mul_(-2).clamp_(min=0.0), torch.cat(labels, dim=1)
