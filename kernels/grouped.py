"""Routed experts of few tokens, with the bits of PyTorch's grouped products and of what stands around them.

transformers sorts (token, choice) pairs by expert, gathers their states, masks, weighs, sorts back and adds up: more
than twenty launches of PyTorch's beside the products, each shorter than the time between launches. Here they are two.
And a grouped product of a few rows per expert reads weights at half of the memory's speed. :func:`grouped_product` has
narrower tiles; tensor cores add up along D in the same steps whatever the tile, so the bits were seen to be the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from latent_santa.integers import ceil_div

from .launch import current
from .plan import power

# (states by expert, where each expert's rows end) to outputs by expert
Products = Callable[[Tensor, Tensor], Tensor]


@triton.jit
def order_kernel(
    states, index, sorted_states, place, ends, D, TOP, PAIRS, PP: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Program (pair): where ``index (PAIRS,)`` puts the pair in order of experts, and its token's states there. Program
    (PAIRS + e): ``ends (E,)``, pairs of experts up to e."""
    i_pair = tl.program_id(0)
    i_all = tl.arange(0, PP)
    m_all = i_all < PAIRS
    b_all = tl.load(index + i_all, mask=m_all, other=0)  # [PP]
    if i_pair < PAIRS:
        i_expert = tl.load(index + i_pair)
        before = m_all & ((b_all < i_expert) | ((b_all == i_expert) & (i_all < i_pair)))
        rank = tl.sum(before.to(tl.int32), 0)
        tl.store(place + i_pair, rank)
        for start in range(0, D, BD):
            i_dim = start + tl.arange(0, BD)
            b_state = tl.load(states + i_pair // TOP * D + i_dim, mask=i_dim < D)
            tl.store(sorted_states + rank * D + i_dim, b_state, mask=i_dim < D)
    else:
        i_end = i_pair - PAIRS
        tl.store(ends + i_end, tl.sum((m_all & (b_all <= i_end)).to(tl.int32), 0))


@triton.jit
def weigh_kernel(outputs, place, shares, out, D, TOP: tl.constexpr, BD: tl.constexpr):
    """Program (token, block of D): ``outputs (PAIRS, D)`` of the token's choices times ``shares (T, TOP)``, added up in
    the order of PyTorch's sum: every fourth one into one of four sums, which come together at the end."""
    i_token = tl.program_id(0)
    i_dim = tl.program_id(1) * BD + tl.arange(0, BD)
    m_dim = i_dim < D
    b_0 = tl.zeros((BD,), tl.float32)
    b_1 = tl.zeros((BD,), tl.float32)
    b_2 = tl.zeros((BD,), tl.float32)
    b_3 = tl.zeros((BD,), tl.float32)
    for i_choice in tl.static_range(TOP):
        rank = tl.load(place + i_token * TOP + i_choice)
        b_output = tl.load(outputs + rank * D + i_dim, mask=m_dim, other=0.0).to(tl.float32)
        share = tl.load(shares + i_token * TOP + i_choice)
        b_output = b_output * share.to(tl.float32)
        if shares.dtype.element_ty == outputs.dtype.element_ty:
            b_output = b_output.to(outputs.dtype.element_ty).to(tl.float32)
        if i_choice % 4 == 0:
            b_0 += b_output
        elif i_choice % 4 == 1:
            b_1 += b_output
        elif i_choice % 4 == 2:
            b_2 += b_output
        else:
            b_3 += b_output
    tl.store(out + i_token * D + i_dim, (b_0 + b_1 + b_2 + b_3).to(out.dtype.element_ty), mask=m_dim)


@triton.jit
def product_kernel(
    states, ends, weights, out, N: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program (block of N, expert): its rows of ``states (PAIRS, D)``, BT at a time, times ``weights (E, N, D)``, which
    come first, so that few rows are the narrow side. Writes ``out (PAIRS, N)``."""
    i_expert = tl.program_id(1)
    stop = tl.load(ends + i_expert)
    first = tl.load(ends + i_expert - 1, mask=i_expert > 0, other=0)
    i_col = tl.program_id(0) * BN + tl.arange(0, BN)
    i_dim = tl.arange(0, BD)
    p_weight = weights + i_expert.to(tl.int64) * N * D
    for i_first in range(first, stop, BT):
        i_row = i_first + tl.arange(0, BT)
        b_out = tl.zeros((BN, BT), tl.float32)
        for start in tl.range(0, D, BD, num_stages=STAGES):
            m_dim = start + i_dim < D
            o_weight = i_col[:, None] * D + (start + i_dim)[None, :]
            b_weight = tl.load(p_weight + o_weight, mask=(i_col < N)[:, None] & m_dim[None, :], other=0.0)  # [BN, BD]
            o_state = i_row[None, :] * D + (start + i_dim)[:, None]
            b_state = tl.load(states + o_state, mask=(i_row < stop)[None, :] & m_dim[:, None], other=0.0)  # [BD, BT]
            b_out = tl.dot(b_weight, b_state, b_out, input_precision="ieee")
        m_out = (i_row < stop)[None, :] & (i_col < N)[:, None]
        tl.store(out + i_row[None, :] * N + i_col[:, None], b_out.to(out.dtype.element_ty), mask=m_out)


def grouped_product(states: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """``(PAIRS, N)``: each expert's rows times its weight, in the states' dtype.

    Args:
        states: ``(PAIRS, D)``, rows by expert.
        weights: ``(E, N, D)``, contiguous, of the states' dtype.
        ends: ``(E,)`` int32, where each expert's rows stop.
    """
    experts, number, width = weights.shape
    out = torch.empty(len(states), number, dtype=states.dtype, device=states.device)
    with current(states.device):
        product_kernel[(ceil_div(number, 64), experts)](
            states=states, ends=ends, weights=weights, out=out, N=number, D=width, BT=16, BN=64,
            BD=min(128, power(width, 16)), STAGES=3, num_warps=4,
        )  # fmt: skip
    return out


def grouped_experts(states: Tensor, index: Tensor, shares: Tensor, experts: int, products: Products) -> Tensor:
    """Sum over a token's chosen experts e of ``share * expert_e(state)``.

    Args:
        states: ``(T, D)``.
        index: ``(T, TOP)`` int64, chosen experts, each below ``experts``.
        shares: ``(T, TOP)``, in float32 or in the states' dtype.
        products: all experts on ``(T TOP, D)`` states in their order, whose ends ``(experts,)`` int32 say where each
            one's stop.

    Returns:
        ``(T, D)`` in the states' dtype.
    """
    (tokens, width), top = states.shape, index.shape[1]
    pairs, device = tokens * top, states.device
    index, shares, states = index.contiguous(), shares.contiguous(), states.contiguous()
    by_expert = torch.empty(pairs, width, dtype=states.dtype, device=device)
    place = torch.empty(pairs, dtype=torch.int32, device=device)
    ends = torch.empty(experts, dtype=torch.int32, device=device)
    out = torch.empty_like(states)
    with current(device):
        order_kernel[(pairs + experts,)](
            states=states, index=index, sorted_states=by_expert, place=place, ends=ends, D=width, TOP=top, PAIRS=pairs,
            PP=power(pairs), BD=1024, num_warps=4,
        )  # fmt: skip
        outputs = products(by_expert, ends)
        # a product and the sum that it goes into would be rounded once, and PyTorch rounds both
        weigh_kernel[(tokens, ceil_div(width, 512))](
            outputs=outputs, place=place, shares=shares, out=out, D=width, TOP=top, BD=512, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out
