"""RMSNorms of few tokens.

:func:`rms_norm` has the bits of PyTorch's own launches, three in place of eight: casts, squares, roots and products
give the same bits wherever they stand, and the mean, which does not, stays PyTorch's. :func:`add_norm` adds up and
norms in one launch, and differs by rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from latent_santa.integers import ceil_div

from .device import launches_early, wait
from .launch import current
from .plan import power


@triton.jit
def squares_kernel(states, squares, stride, D, BD: tl.constexpr):
    """Program (token, block of D): squares of ``states (T, D)`` in float32."""
    i_token = tl.program_id(0).to(tl.int64)
    i_dim = tl.program_id(1) * BD + tl.arange(0, BD)
    b_state = tl.load(states + i_token * stride + i_dim, mask=i_dim < D, other=0.0).to(tl.float32)
    tl.store(squares + i_token * D + i_dim, b_state * b_state, mask=i_dim < D)


@triton.jit
def scaled_kernel(states, mean, weight, out, stride, eps, D, BD: tl.constexpr):
    """Program (token, block of D): ``weight * (states / sqrt(mean + eps))``, rounded after each product."""
    i_token = tl.program_id(0).to(tl.int64)
    i_dim = tl.program_id(1) * BD + tl.arange(0, BD)
    m_dim = i_dim < D
    dtype: tl.constexpr = out.dtype.element_ty
    b_state = tl.load(states + i_token * stride + i_dim, mask=m_dim, other=0.0).to(tl.float32)
    b_state = (b_state * tl.rsqrt(tl.load(mean + i_token) + eps)).to(dtype).to(tl.float32)
    b_weight = tl.load(weight + i_dim, mask=m_dim, other=0.0).to(tl.float32)
    tl.store(out + i_token * D + i_dim, (b_weight * b_state).to(dtype), mask=m_dim)


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (states * rsqrt(mean(states^2) + eps))`` as transformers' RMSNorms compute it.

    Args:
        states: ``(..., D)``, the last dimension in one piece; all others count tokens.
        weight: ``(D,)`` in the states' dtype.
    """
    width = states.shape[-1]
    flat = states.reshape(-1, width)
    squares = torch.empty(states.shape, dtype=torch.float32, device=states.device)
    out = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    grid = (len(flat), ceil_div(width, 1024))
    with current(states.device):
        squares_kernel[grid](states=flat, squares=squares, stride=flat.stride(0), D=width, BD=1024, num_warps=4)
        mean = squares.mean(-1, keepdim=True)
        scaled_kernel[grid](
            states=flat, mean=mean, weight=weight, out=out, stride=flat.stride(0), eps=eps, D=width, BD=1024,
            num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def add_norm_kernel(states, more, weight, sums, out, eps, D, BD: tl.constexpr, PDL: tl.constexpr):
    """Program (token): ``sums = states + more`` and its norm, ``(T, D)``."""
    i_token = tl.program_id(0).to(tl.int64)
    i_dim = tl.arange(0, BD)
    m_dim = i_dim < D
    dtype: tl.constexpr = out.dtype.element_ty
    b_weight = tl.load(weight + i_dim, mask=m_dim, other=0.0).to(tl.float32)
    wait(PDL)
    b_sum = tl.load(states + i_token * D + i_dim, mask=m_dim, other=0.0).to(tl.float32)
    b_sum += tl.load(more + i_token * D + i_dim, mask=m_dim, other=0.0).to(tl.float32)
    b_sum = b_sum.to(dtype)
    tl.store(sums + i_token * D + i_dim, b_sum, mask=m_dim)
    b_sum = b_sum.to(tl.float32)
    b_out = b_sum * tl.rsqrt(tl.sum(b_sum * b_sum, 0) / D + eps)
    tl.store(out + i_token * D + i_dim, (b_weight * b_out.to(dtype).to(tl.float32)).to(dtype), mask=m_dim)


def add_norm(states: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``states + more``, both ``(..., D)``, and its RMSNorm with ``weight (D,)``, all of one dtype."""
    width, device = states.shape[-1], states.device
    states, more = states.contiguous(), more.contiguous()
    sums, out = torch.empty_like(states), torch.empty_like(states)
    early = launches_early(device)
    with current(device):
        add_norm_kernel[(states.numel() // width,)](
            states=states, more=more, weight=weight, sums=sums, out=out, eps=eps, D=width, BD=power(width), PDL=early,
            num_warps=8, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return sums, out
