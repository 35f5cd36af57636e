"""A router that takes the softmax of its logits and the largest probabilities, for the few tokens of a decoding step.

Two launches instead of two casts, a product in parts, a softmax and a selection, each of which is shorter than the
time between launches.
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
def logits_kernel(states, weight, logits, D: tl.constexpr, E: tl.constexpr, EB: tl.constexpr, BD: tl.constexpr):
    """Program (block of E, token): ``logits (T, E)`` of ``states (T, D)`` and ``weight (E, D)``, summed in float32."""
    i_token = tl.program_id(1)
    i_expert = tl.program_id(0) * EB + tl.arange(0, EB)  # [EB]
    b_sum = tl.zeros((EB,), tl.float32)
    for start in range(0, D, BD):
        i_dim = start + tl.arange(0, BD)
        b_state = tl.load(states + i_token * D + i_dim, mask=i_dim < D, other=0.0).to(tl.float32)  # [BD]
        m_weight = (i_expert < E)[:, None] & (i_dim < D)[None, :]
        b_weight = tl.load(weight + i_expert[:, None] * D + i_dim[None, :], mask=m_weight, other=0.0)
        b_sum += tl.sum(b_weight.to(tl.float32) * b_state[None, :], 1)
    tl.store(logits + i_token * E + i_expert, b_sum, mask=i_expert < E)


@triton.jit
def choose_kernel(
    logits, shares, index, scale, E: tl.constexpr, EP: tl.constexpr, TOP: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program (token): the TOP largest of softmax(logits), times ``scale``, and whose they are."""
    i_token = tl.program_id(0)
    i_expert = tl.arange(0, EP)
    wait(PDL)
    b_logit = tl.load(logits + i_token * E + i_expert, mask=i_expert < E, other=float("-inf"))  # [EP]
    b_mass = tl.exp(b_logit - tl.max(b_logit, 0))
    b_mass = b_mass / tl.sum(b_mass, 0)
    b_left = tl.where(i_expert < E, b_mass, -1.0)
    for i_choice in tl.static_range(TOP):
        most = tl.max(b_left, 0)
        chosen = tl.min(tl.where(b_left == most, i_expert, EP), 0)
        tl.store(shares + i_token * TOP + i_choice, most * scale)
        tl.store(index + i_token * TOP + i_choice, chosen.to(tl.int64))
        b_left = tl.where(i_expert == chosen, -1.0, b_left)


def softmax_router(states: Tensor, weight: Tensor, top: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits ``(T, E)`` in float32, and of each token's ``top`` largest probabilities, largest first, the value times
    ``scale``, ``(T, top)`` float32, and the expert, ``(T, top)`` int64. Of equal ones the first expert's counts.

    Args:
        states: ``(T, D)``.
        weight: ``(E, D)``, contiguous, in any floating dtype.
    """
    (tokens, width), experts, device = states.shape, weight.shape[0], states.device
    states = states.contiguous()
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=device)
    shares = torch.empty(tokens, top, dtype=torch.float32, device=device)
    index = torch.empty(tokens, top, dtype=torch.int64, device=device)
    early = launches_early(device)
    with current(device):
        logits_kernel[(ceil_div(experts, 4), tokens)](
            states=states, weight=weight, logits=logits, D=width, E=experts, EB=4, BD=min(power(width), 2048),
            num_warps=4,
        )  # fmt: skip
        choose_kernel[(tokens,)](
            logits=logits, shares=shares, index=index, scale=scale, E=experts, EP=power(experts), TOP=top, PDL=early,
            num_warps=1, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return logits, shares, index
