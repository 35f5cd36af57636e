"""Products of a few tokens with one or two weights, in one launch.

Libraries give such a product a few dozen programs, each with a long sum: 1.4 to 2.1 of 4.3 TB/s for the projections of
DeepSeek-V2-Lite on an H200. Here programs are narrow, so that there are more than processors, and two projections of
the same states start together.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from latent_santa.integers import ceil_div

from .device import ask_for, launches_early, wait
from .launch import current
from .plan import power

MOST_TOKENS = 16


@triton.jit
def linear_kernel(
    states, first, second, out, D: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, T: tl.constexpr, TB: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of N0, then block of N1). ``states (T, D)``, ``first (N0, D)``, ``second (N1, D)``; writes
    ``out (T, N0 + N1)``."""
    blocks: tl.constexpr = (N0 + BN - 1) // BN
    i_block = tl.program_id(0)
    i_token, i_dim = tl.arange(0, TB), tl.arange(0, BD)
    if i_block < blocks:
        i_col = i_block * BN + tl.arange(0, BN)  # [BN]
        m_col = i_col < N0
        p_weight = first + tl.minimum(i_col, N0 - 1) * D
        i_out = i_col
    else:
        i_col = (i_block - blocks) * BN + tl.arange(0, BN)
        m_col = i_col < N1
        p_weight = second + tl.minimum(i_col, N1 - 1) * D
        i_out = N0 + i_col
    ask_for(p_weight, D, D, PDL)
    wait(PDL)
    b_out = tl.zeros((TB, BN), tl.float32)
    for start in tl.range(0, D, BD, num_stages=STAGES):
        m_dim = start + i_dim < D
        m_state = (i_token < T)[:, None] & m_dim[None, :]
        b_state = tl.load(states + i_token[:, None] * D + (start + i_dim)[None, :], mask=m_state, other=0.0)
        m_weight = m_dim[:, None] & m_col[None, :]
        b_weight = tl.load(p_weight[None, :] + (start + i_dim)[:, None], mask=m_weight, other=0.0)  # [BD, BN]
        b_out = tl.dot(b_state, b_weight, b_out, input_precision="ieee")
    m_out = (i_token < T)[:, None] & m_col[None, :]
    o_out = i_token[:, None] * (N0 + N1) + i_out[None, :]
    tl.store(out + o_out, b_out.to(out.dtype.element_ty), mask=m_out)


def plain(states: Tensor, *layers: Any) -> bool:
    """Whether :func:`linear` computes what these linear layers do to the states ``(T, D)``."""
    return len(states) <= MOST_TOKENS and all(
        type(layer) is nn.Linear
        and layer.bias is None
        and layer.weight.dtype == states.dtype
        and layer.weight.is_contiguous()
        and not (layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))
        for layer in layers
    )


def linear(states: Tensor, first: Tensor, second: Tensor | None = None) -> Tensor:
    """``states (T, D)``, at most 16 tokens, times ``first (N0, D)`` and ``second (N1, D)``, all of one dtype: both
    products beside each other, ``(T, N0 + N1)``."""
    (tokens, width), others = states.shape, 0 if second is None else second.shape[0]
    out = torch.empty(tokens, first.shape[0] + others, dtype=states.dtype, device=states.device)
    early = launches_early(states.device)
    with current(states.device):
        linear_kernel[(ceil_div(first.shape[0], 16) + ceil_div(others, 16),)](
            states=states.contiguous(), first=first, second=first if second is None else second, out=out, D=width,
            N0=first.shape[0], N1=others, T=tokens, TB=power(tokens, 16), BN=16, BD=min(256, power(width, 16)),
            STAGES=4, PDL=early, num_warps=2, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return out
