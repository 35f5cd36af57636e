"""What stands around the grouped products of routed experts, for few tokens and with the same bits: two launches.

transformers sorts (token, choice) pairs by expert, gathers their states, masks, weighs, sorts back and adds up: more
than twenty launches of PyTorch's beside the products, each shorter than the time between launches.
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
