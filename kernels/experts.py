"""Routed experts for the few tokens of a decoding step: every expert that is hit is read once, in three launches.

A grouped product sorts tokens by expert and starts tiles for all experts; at one to some tens of tokens that takes
longer than reading the weights. Here a program takes one expert and some of its columns, and multiplies with a tile of
all tokens, of which those count that are routed to it. Roundings are those of transformers' own experts: products, gate
and activation are rounded to the weights' dtype, and the weighted sum is formed in float32.

A shared expert, which every token passes, joins in: it is cut into slices as wide as a routed expert, which come first
in every launch. Alone it would take as many launches again, too short to reach the memory's speed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from latent_santa.integers import ceil_div

from .launch import current
from .plan import power
from .support import unavailable, unsupported_dtype

MOST_TOKENS = 64


class Shared(NamedTuple):
    """Weights of an expert that every token passes, ``(S, D)``, ``(S, D)`` and ``(D, S)``."""

    gate: Tensor
    up: Tensor
    down: Tensor


@triton.jit
def expert_of(index, i_pair, PAIRS: tl.constexpr, PP: tl.constexpr):
    """The expert of a (token, choice) pair, and whether no earlier pair has it."""
    i_all = tl.arange(0, PP)
    b_all = tl.load(index + i_all, mask=i_all < PAIRS, other=-1)  # [PP]
    i_expert = tl.load(index + i_pair)
    return i_expert, tl.min(tl.where(b_all == i_expert, i_all, PP), 0) == i_pair


@triton.jit
def tokens_of(index, i_expert, T: tl.constexpr, TB: tl.constexpr, TOP: tl.constexpr, TP: tl.constexpr):
    """Which tokens ``[TB]`` chose the expert, and the pair with which each did."""
    i_token, i_choice = tl.arange(0, TB), tl.arange(0, TP)
    i_pair = i_token[:, None] * TOP + i_choice[None, :]  # [TB, TP]
    m_pair = (i_token < T)[:, None] & (i_choice < TOP)[None, :]
    m_hit = tl.load(index + i_pair, mask=m_pair, other=-1) == i_expert
    return tl.sum(m_hit.to(tl.int32), 1) > 0, tl.sum(tl.where(m_hit, i_pair, 0), 1)


@triton.jit
def up_kernel(
    states, index, weights, shared_gate, shared_up, hidden, D: tl.constexpr, F: tl.constexpr, S: tl.constexpr,
    T: tl.constexpr, TOP: tl.constexpr, SLICES: tl.constexpr, PAIRS: tl.constexpr, PP: tl.constexpr, TB: tl.constexpr,
    TP: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (block of F, slice or pair). ``states (T, D)``, ``index (T, TOP)``, ``weights (E, 2 F, D)``: gate over
    up. Writes ``hidden (SLICES T + PAIRS, F)``, silu(gate) * up, of the shared expert's slices first."""
    i_slice = tl.program_id(1)
    i_token = tl.arange(0, TB)
    i_col = tl.program_id(0) * BF + tl.arange(0, BF)  # [BF]
    m_col = i_col < F
    if i_slice < SLICES:
        present = True
        m_token, i_pair = i_token < T, i_slice * T + i_token
        m_col = m_col & (i_slice * F + i_col < S)
        p_gate = shared_gate + i_slice * F * D
        p_up = shared_up + i_slice * F * D
    else:
        i_expert, present = expert_of(index, i_slice - SLICES, PAIRS, PP)
        m_token, i_pair = tokens_of(index, i_expert, T, TB, TOP, TP)
        i_pair += SLICES * T
        p_gate = weights + i_expert * 2 * F * D
        p_up = p_gate + F * D
    if present:
        i_dim = tl.arange(0, BD)
        o_col = i_col[:, None] * D
        b_gate = tl.zeros((BF, TB), tl.float32)
        b_up = tl.zeros((BF, TB), tl.float32)
        for start in tl.range(0, D, BD, num_stages=STAGES):
            m_dim = start + i_dim < D
            m_state = m_dim[:, None] & m_token[None, :]
            m_weight = m_col[:, None] & m_dim[None, :]
            o_weight = o_col + (start + i_dim)[None, :]
            b_state = tl.load(states + i_token[None, :] * D + (start + i_dim)[:, None], mask=m_state, other=0.0)
            b_weight = tl.load(p_gate + o_weight, mask=m_weight, other=0.0)  # [BF, BD]
            b_gate = tl.dot(b_weight, b_state, b_gate, input_precision="ieee")
            b_weight = tl.load(p_up + o_weight, mask=m_weight, other=0.0)  # [BF, BD]
            b_up = tl.dot(b_weight, b_state, b_up, input_precision="ieee")
        dtype: tl.constexpr = hidden.dtype.element_ty
        b_gate = b_gate.to(dtype).to(tl.float32)
        b_act = (b_gate / (1 + tl.exp(-b_gate))).to(dtype).to(tl.float32)
        b_hidden = b_act * b_up.to(dtype).to(tl.float32)
        m_hidden = m_col[:, None] & m_token[None, :]
        tl.store(hidden + i_pair[None, :] * F + i_col[:, None], b_hidden.to(dtype), mask=m_hidden)


@triton.jit
def down_kernel(
    hidden, index, shares, weights, shared_down, parts, D: tl.constexpr, F: tl.constexpr, S: tl.constexpr,
    T: tl.constexpr, TOP: tl.constexpr, SLICES: tl.constexpr, PAIRS: tl.constexpr, PP: tl.constexpr, TB: tl.constexpr,
    TP: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (block of D, slice or pair). ``weights (E, D, F)``; ``shares (T, TOP)`` are the routing weights. Writes
    ``parts (SLICES T + PAIRS, D)`` float32, each slice's output and each pair's weighted one."""
    i_slice = tl.program_id(1)
    i_token = tl.arange(0, TB)
    i_col = tl.program_id(0) * BN + tl.arange(0, BN)  # [BN]
    width = tl.where(i_slice < SLICES, tl.minimum(S - i_slice * F, F), F)
    if i_slice < SLICES:
        present = True
        m_token, i_pair = i_token < T, i_slice * T + i_token
        p_weight = shared_down + i_slice * F + i_col * S
    else:
        i_expert, present = expert_of(index, i_slice - SLICES, PAIRS, PP)
        m_token, i_pair = tokens_of(index, i_expert, T, TB, TOP, TP)
        i_pair += SLICES * T
        p_weight = weights + i_expert * D * F + i_col * F
    if present:
        i_dim = tl.arange(0, BF)
        b_out = tl.zeros((BN, TB), tl.float32)
        for start in tl.range(0, F, BF, num_stages=STAGES):
            m_dim = start + i_dim < width
            m_hidden = m_dim[:, None] & m_token[None, :]
            m_weight = (i_col < D)[:, None] & m_dim[None, :]
            b_hidden = tl.load(hidden + i_pair[None, :] * F + (start + i_dim)[:, None], mask=m_hidden, other=0.0)
            b_weight = tl.load(p_weight[:, None] + (start + i_dim)[None, :], mask=m_weight, other=0.0)  # [BN, BF]
            b_out = tl.dot(b_weight, b_hidden, b_out, input_precision="ieee")
        # slices are rounded when they are added, as one product of the whole shared expert would be
        if i_slice >= SLICES:
            b_share = tl.load(shares + i_pair - SLICES * T, mask=m_token, other=0.0).to(tl.float32)  # [TB]
            b_out = b_out.to(hidden.dtype.element_ty).to(tl.float32) * b_share[None, :]
        m_part = (i_col < D)[:, None] & m_token[None, :]
        tl.store(parts + i_pair[None, :] * D + i_col[:, None], b_out, mask=m_part)


@triton.jit
def sum_kernel(parts, out, D: tl.constexpr, T: tl.constexpr, TOP: tl.constexpr, SLICES: tl.constexpr, BD: tl.constexpr):
    """Program (block of D, token): the token's outputs, added in the order of its choices, and the shared expert's."""
    i_token = tl.program_id(1)
    i_dim = tl.program_id(0) * BD + tl.arange(0, BD)
    b_out = tl.zeros((BD,), tl.float32)
    for i_choice in tl.static_range(TOP):
        i_pair = SLICES * T + i_token * TOP + i_choice
        b_out += tl.load(parts + i_pair * D + i_dim, mask=i_dim < D, other=0.0)
    dtype: tl.constexpr = out.dtype.element_ty
    if SLICES > 0:
        b_shared = tl.zeros((BD,), tl.float32)
        for i_slice in tl.static_range(SLICES):
            b_shared += tl.load(parts + (i_slice * T + i_token) * D + i_dim, mask=i_dim < D, other=0.0)
        b_out = b_out.to(dtype).to(tl.float32) + b_shared.to(dtype).to(tl.float32)
    tl.store(out + i_token * D + i_dim, b_out.to(dtype), mask=i_dim < D)


def reason_not(module: Any) -> str | None:
    """Why the kernels cannot stand in for an experts module of transformers, or None when they can."""
    if not all(isinstance(getattr(module, name, None), Tensor) for name in ("gate_up_proj", "down_proj")):
        return "its weights are no stacked gate_up_proj and down_proj"
    gate_up, down = module.gate_up_proj, module.down_proj
    if gate_up.dim() != 3 or not gate_up.is_contiguous() or not down.is_contiguous() or gate_up.dtype != down.dtype:
        return "its weights do not lie one expert behind the other"
    if getattr(module, "is_transposed", False):
        return "its weights are transposed"
    if getattr(module, "has_bias", False):
        return "its experts have biases"
    if getattr(module, "has_post_expert_norm", False):
        return "its experts end in a norm"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are spread over processes"
    if type(getattr(module, "act_fn", None)).__name__ not in ("SiLU", "SiLUActivation"):
        return f"its activation is {type(getattr(module, 'act_fn', None)).__name__}, and the kernels have SiLU"
    own_gate = getattr(type(module), "_apply_gate", None)
    if own_gate is not None and own_gate.__module__ != "transformers.integrations.moe":
        return "its experts have a gate of their own"
    return unavailable(gate_up.device) or unsupported_dtype(gate_up.dtype)


def routed_experts(
    states: Tensor, index: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor, shared: Shared | None = None
) -> Tensor:
    """Sum over a token's chosen experts e of ``share * down_e(silu(gate_e x) * up_e x)``, and the shared expert's.

    Args:
        states: ``(T, D)``, at most ``MOST_TOKENS`` tokens.
        index: ``(T, TOP)`` int64, chosen experts, each below E.
        shares: ``(T, TOP)``, their routing weights.
        gate_up: ``(E, 2 F, D)``, in the states' dtype.
        down: ``(E, D, F)``.
        shared: in the same dtype, or None where there is none.

    Returns:
        ``(T, D)`` in the states' dtype.
    """
    (tokens, width), choices, inner = states.shape, index.shape[1], down.shape[2]
    pairs = tokens * choices
    own = 0 if shared is None else shared.gate.shape[0]
    slices = ceil_div(own, inner)
    kept = slices * tokens + pairs
    hidden = torch.empty(kept, inner, dtype=states.dtype, device=states.device)
    parts = torch.empty(kept, width, dtype=torch.float32, device=states.device)
    out = torch.empty_like(states)
    shape = {
        "D": width, "F": inner, "S": own, "T": tokens, "TOP": choices, "SLICES": slices, "PAIRS": pairs,
        "PP": power(pairs), "TB": power(tokens, 16), "TP": power(choices),
    }  # fmt: skip
    gate, up, last = (gate_up, gate_up, down) if shared is None else shared
    index, shares, states = index.contiguous(), shares.contiguous(), states.contiguous()
    with current(states.device):
        up_kernel[(ceil_div(inner, 64), slices + pairs)](
            states=states, index=index, weights=gate_up, shared_gate=gate, shared_up=up, hidden=hidden, **shape, BF=64,
            BD=min(64, power(width, 16)), STAGES=4 if states.element_size() == 2 else 2, num_warps=4,
        )  # fmt: skip
        down_kernel[(ceil_div(width, 64), slices + pairs)](
            hidden=hidden, index=index, shares=shares, weights=down, shared_down=last, parts=parts, **shape, BN=64,
            BF=min(128, power(inner, 16)), STAGES=3, num_warps=4,
        )  # fmt: skip
        sum_kernel[(ceil_div(width, 512), tokens)](
            parts=parts, out=out, D=width, T=tokens, TOP=choices, SLICES=slices, BD=512, num_warps=4
        )
    return out
