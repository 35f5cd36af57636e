"""An RMSNorm of few tokens with the bits of PyTorch's own launches: three in place of eight.

Casts, squares, roots and products give the same bits wherever they stand. A sum does not, so the mean stays PyTorch's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from latent_santa.integers import ceil_div

from .launch import current


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
