"""Exact attention over every visible row, split over the rows: the dense baseline where no library's kernel is there.

It is what :mod:`~.attend` is without teams: rows are neighbours, no list is made, and where a sequence's rows begin and
end is read on the device. Products of the same in PyTorch are :class:`latent_santa.dense.Products`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from latent_santa.integers import ceil_div
from latent_santa.step import DecodeStep

from .attend import add_products, add_values, by_head, by_row, load_rows
from .combine import weighed_shares
from .device import launches_early, processors, shared_memory, wait
from .launch import ELEMENT, current
from .maths import load_query
from .plan import power


@dataclass(frozen=True)
class Tiles:
    """A tile is ``rows`` rows by ``heads`` heads, in this order if ``tall``; ``resident`` programs run on a processor
    at a time."""

    rows: int
    heads: int
    stages: int
    warps: int
    tall: bool
    resident: int


@triton.jit(do_not_specialize=["N"])
def dense_kernel(
    query0, query1, keys0, keys1, values, start, stop, visible, part_out, part_max, part_sum, scale, query0_strides,
    query1_strides, keys0_strides, keys1_strides, values_strides, visible_stride, N, G, H, D0: tl.constexpr,
    D1: tl.constexpr, BD0: tl.constexpr, BD1: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, HB: tl.constexpr,
    BN: tl.constexpr, TALL: tl.constexpr, LATENT: tl.constexpr, STARTS: tl.constexpr, STOPS: tl.constexpr,
    HOLES: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (head block, share, sequence * G + group) attends its share of the rows from ``start (B)``, if STARTS, to
    ``stop (B)``, if STOPS, both int32; if HOLES only those of ``visible (B, N)`` int8. LATENT: two key parts, of which
    the first is the value too.

    Writes what ``attend_kernel`` writes: ``part_max, part_sum (B G, H, shares)`` and ``part_out (B G, H, shares, V)``.
    """
    i_share, shares = tl.program_id(1), tl.num_programs(1)
    i_bg = tl.program_id(2)
    i_b, i_g = i_bg // G, i_bg % G
    i_head = tl.program_id(0) * HB + tl.arange(0, HB)  # [HB]
    p_query0 = query0 + i_b.to(tl.int64) * query0_strides[0] + i_g.to(tl.int64) * query0_strides[1]
    p_query1 = query1 + i_b.to(tl.int64) * query1_strides[0] + i_g.to(tl.int64) * query1_strides[1]
    b_query0 = load_query(p_query0, i_head, tl.arange(0, BD0), H, D0, query0_strides[2]).to(DTYPE)
    b_query1 = load_query(p_query1, i_head, tl.arange(0, BD1), H, D1, query1_strides[2]).to(DTYPE)
    p_keys0 = keys0 + i_b.to(tl.int64) * keys0_strides[0] + i_g.to(tl.int64) * keys0_strides[1]
    p_keys1 = keys1 + i_b.to(tl.int64) * keys1_strides[0] + i_g.to(tl.int64) * keys1_strides[1]
    p_values = values + i_b.to(tl.int64) * values_strides[0] + i_g.to(tl.int64) * values_strides[1]
    p_visible = visible + i_b.to(tl.int64) * visible_stride
    first, last = 0, N
    if STARTS:
        first = tl.load(start + i_b)
    if STOPS:
        last = tl.load(stop + i_b)
    # whole tiles, as equal shares of them as there are
    tiles = tl.cdiv(tl.maximum(last - first, 0), BN)
    begin = first + tiles * i_share // shares * BN
    end = tl.minimum(first + tiles * (i_share + 1) // shares * BN, last)

    b_top = tl.full((HB,), float("-inf"), tl.float32)  # [HB], of scores times log2(e)
    b_mass = tl.zeros((HB,), tl.float32)  # [HB]
    axis: tl.constexpr = 0 if TALL else 1
    b_out = tl.zeros((BV, HB) if TALL else (HB, BV), tl.float32)  # [HB, BV], if TALL [BV, HB]
    zero = tl.zeros((BN, HB) if TALL else (HB, BN), tl.float32)  # [HB, BN], if TALL [BN, HB], as scores
    for at in tl.range(begin, end, BN, num_stages=STAGES):
        i_row = at + tl.arange(0, BN)
        m_row = i_row < end
        m_seen = m_row
        if HOLES:
            m_seen = tl.load(p_visible + i_row, mask=m_row, other=0) != 0  # [BN]
        b_key0 = load_rows(p_keys0, i_row, m_row, keys0_strides[2], D0, BD0)  # [BN, BD0]
        b_score = add_products(zero, b_key0, b_query0, TALL)
        if LATENT:
            b_key1 = load_rows(p_keys1, i_row, m_row, keys1_strides[2], D1, BD1)  # [BN, BD1]
            b_score = add_products(b_score, b_key1, b_query1, TALL)
        b_value = b_key0 if LATENT else load_rows(p_values, i_row, m_row, values_strides[2], V, BV)  # [BN, BV]
        b_score = tl.where(by_row(m_seen, TALL), b_score * (scale * 1.4426950408889634), float("-inf"))
        b_new = tl.maximum(b_top, tl.max(b_score, axis))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_shrink = tl.exp2(b_top - b_safe)
        b_weight = tl.exp2(b_score - by_head(b_safe, TALL))
        b_mass = b_mass * b_shrink + tl.sum(b_weight, axis)
        b_out = add_values(b_out * by_head(b_shrink, TALL), b_weight.to(DTYPE), b_value, TALL)
        b_top = b_new

    m_head = i_head < H
    o_part = (i_bg.to(tl.int64) * H + i_head) * shares + i_share
    tl.store(part_max + o_part, b_top * 0.6931471805599453, mask=m_head)
    tl.store(part_sum + o_part, b_mass, mask=m_head)
    if begin < end:
        i_dim = tl.arange(0, BV)
        m_out = by_head(m_head, TALL) & by_row(i_dim < V, TALL)
        tl.store(part_out + by_head(o_part, TALL) * V + by_row(i_dim, TALL), b_out, mask=m_out)


@triton.jit(do_not_specialize=["shares"])
def join_kernel(
    part_out, part_max, part_sum, out, lse, shares, H, V: tl.constexpr, BV: tl.constexpr, NS: tl.constexpr,
    BS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (value block, h, sequence * G + group) writes ``out (B G, H, V)`` and ``lse (B G, H)``."""
    i_bgh = tl.program_id(2).to(tl.int64) * H + tl.program_id(1)
    i_dim = tl.program_id(0) * BV + tl.arange(0, BV)  # [BV]
    wait(PDL)
    b_total, mass, safe = weighed_shares(part_out, part_max, part_sum, i_bgh, i_dim, shares, V=V, NS=NS, BS=BS)
    # a sequence without any row (all padding) gets zeros, as in PyTorch
    tl.store(out + i_bgh * V + i_dim, b_total / tl.where(mass == 0.0, 1.0, mass), mask=i_dim < V)
    if tl.program_id(0) == 0:
        tl.store(lse + i_bgh, safe + tl.log(mass))


def tiles_for(step: DecodeStep) -> Tiles:
    """Block sizes by shapes alone, the best of about twelve on an H200. Tall ones were never."""
    rows, heads = step.rows, max(16, power(step.heads))
    roomy = shared_memory(rows.values.device) >= 222 << 10
    if rows.values.dtype == torch.float32:
        return Tiles(16, 16, 2, 8, False, 1)
    if len(rows.keys) == 1:
        return Tiles(64, min(heads, 64), 3, 4, False, 2)
    if not roomy:
        return Tiles(32, min(heads, 32), 3, 4, False, 1)
    return Tiles(64, 64, 2, 8, False, 1) if heads > 16 else Tiles(64, 16, 3, 4, False, 1)


def dense_attention(
    step: DecodeStep, start: Tensor | None, stop: Tensor | None, holes: bool, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """Exact attention over visible rows (Equation 1), in two launches. Nothing waits for the device, and a captured
    CUDA graph follows lengths and masks that change in place.

    Args:
        step: rows with a contiguous last dimension and any other strides; the query is rounded to the rows' dtype.
        start: ``(B,)`` int32, each sequence's first visible row, or None for 0.
        stop: ``(B,)`` int32, the row after its last visible one, or None for N.
        holes: whether rows between them may be invisible, so that ``step.visible`` has to be looked at row by row.
        tiles: block sizes; None for those chosen by shapes.

    Returns:
        ``out (B, G, H, V)`` and ``lse (B, G, H)``, float32; zeros and -inf for a sequence without a visible row.
    """
    rows, query = step.rows, tuple(part if part.stride(-1) == 1 else part.contiguous() for part in step.query)
    keys, values, device = rows.keys, rows.values, rows.values.device
    tiles = tiles_for(step) if tiles is None else tiles
    sequences, blocks = step.batch * step.groups, ceil_div(step.heads, tiles.heads)
    most = ceil_div(rows.length, tiles.rows)
    shares = max(1, min(most, 256, tiles.resident * processors(device) // (sequences * blocks)))
    width = values.shape[-1]

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    part_out, part_max, part_sum = (floats(sequences, step.heads, shares, n) for n in (width, 1, 1))
    out, lse = floats(step.batch, step.groups, step.heads, width), floats(step.batch, step.groups, step.heads)
    nothing = part_max
    visible = nothing if step.visible is None else step.visible.view(torch.int8)
    early = launches_early(device)
    with current(device):
        dense_kernel[(blocks, shares, sequences)](
            query0=query[0],
            query1=query[-1],
            keys0=keys[0],
            keys1=keys[-1],
            values=values,
            start=nothing if start is None else start,
            stop=nothing if stop is None else stop,
            visible=visible,
            part_out=part_out,
            part_max=part_max,
            part_sum=part_sum,
            scale=step.scale,
            query0_strides=query[0].stride()[:3],
            query1_strides=query[-1].stride()[:3],
            keys0_strides=keys[0].stride()[:3],
            keys1_strides=keys[-1].stride()[:3],
            values_strides=values.stride()[:3],
            visible_stride=visible.stride(0),
            N=rows.length,
            G=step.groups,
            H=step.heads,
            D0=query[0].shape[-1],
            D1=query[-1].shape[-1],
            BD0=power(query[0].shape[-1], 16),
            BD1=power(query[-1].shape[-1], 16),
            V=width,
            BV=power(width, 16),
            HB=tiles.heads,
            BN=tiles.rows,
            TALL=tiles.tall,
            LATENT=len(keys) == 2,
            STARTS=start is not None,
            STOPS=stop is not None,
            HOLES=holes,
            DTYPE=ELEMENT[values.dtype],
            STAGES=tiles.stages,
            num_warps=tiles.warps,
        )
        join_kernel[(ceil_div(width, 64), step.heads, sequences)](
            part_out=part_out,
            part_max=part_max,
            part_sum=part_sum,
            out=out,
            lse=lse,
            shares=shares,
            H=step.heads,
            V=width,
            BV=min(power(width, 16), 64),
            NS=power(shares),
            BS=min(power(shares), 128),
            PDL=early,
            num_warps=4,
            **({"launch_pdl": True} if early else {}),
        )
    return out, lse
