"""Parts of a model that have kernels of our own in calls of one token, under ``patch(compile=True)``.

No compiler can use which experts are hit, and none joins an attention layer's rotation and cache row. Classes differ,
so a part is taken over only where, on random inputs, our kernels compute what the class's own forward does up to
rounding; another part is left to the compiler, or as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from latent_santa.kernels import unavailable

from .own_attention import as_seen, own_attention
from .own_layers import own_layer

Forward = Callable[..., Any]
# relative; a wrong formula is off by as much as the numbers are large
MOST_ERROR = 0.05


def own_forward(module: nn.Module, base: nn.Module) -> Forward | None:
    """A ``forward`` for the module that launches our kernels for few tokens, and its own otherwise; None where it has
    none. Outputs differ by rounding."""
    weight = next(module.parameters(), None)
    if weight is None or unavailable(weight.device) is not None:
        return None
    from latent_santa.kernels.support import unsupported_dtype  # after `unavailable`: kernels import triton

    if unsupported_dtype(weight.dtype) is not None:
        return None
    for make in (_experts, _experts_with_shared, _router):
        found = make(module)
        if found is not None:
            return found
    return own_attention(module, base, _alike, _states) or own_layer(module, base, _alike, _states)


def _experts(module: Any) -> Forward | None:
    if not isinstance(getattr(module, "gate_up_proj", None), Tensor):
        return None
    from latent_santa.kernels.experts import MOST_TOKENS, reason_not, routed_experts

    if reason_not(module) is not None:
        return None
    original = module.forward

    @wraps(original)
    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        gate_up, down = module.gate_up_proj, module.down_proj
        few = hidden_states.dim() == 2 and len(hidden_states) <= MOST_TOKENS
        # an adapter replaces the weights with tensors of its own
        alike = hidden_states.dtype == gate_up.dtype == down.dtype and gate_up.is_contiguous() and down.is_contiguous()
        if few and alike and not torch.is_grad_enabled():
            return routed_experts(hidden_states, top_k_index, top_k_weights, gate_up, down)
        return original(hidden_states, top_k_index, top_k_weights)

    return forward


def _experts_with_shared(module: Any) -> Forward | None:
    """Of a module that adds the outputs of routed experts and of one MLP for all tokens."""
    if {name for name, _ in module.named_children()} != {"experts", "gate", "shared_experts"}:
        return None
    from latent_santa.kernels.experts import MOST_TOKENS, Shared, reason_not, routed_experts

    experts, mlp, original = module.experts, module.shared_experts, module.forward
    if not hasattr(experts, "gate_up_proj") or reason_not(experts) is not None:
        return None

    @wraps(original)
    def forward(hidden_states: Tensor) -> Tensor:
        flat, gate_up = hidden_states.view(-1, hidden_states.shape[-1]), experts.gate_up_proj
        # adapters and hooks may have come since
        same = as_seen(module.experts, experts) and as_seen(module.shared_experts, mlp)
        linear = [getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")]
        alike = same and flat.dtype == gate_up.dtype and _plain(flat, *linear)
        if len(flat) > MOST_TOKENS or not alike or torch.is_grad_enabled():
            return original(hidden_states)  # type: ignore[no-any-return]
        _, shares, index = module.gate(hidden_states)
        shared = Shared(*(part.weight for part in linear))
        return routed_experts(flat, index, shares, gate_up, experts.down_proj, shared).view(hidden_states.shape)

    return _seen_to_agree(original, forward, _states(experts.gate_up_proj, 1))


def _plain(states: Tensor, *layers: Any) -> bool:
    """Whether these linear layers are products with their weights, of the states' dtype, and nothing else."""
    return all(
        type(layer) is nn.Linear
        and layer.bias is None
        and layer.weight.dtype == states.dtype
        and layer.weight.is_contiguous()
        and not (layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))
        for layer in layers
    )


def _router(module: Any) -> Forward | None:
    """Of a router that takes the largest probabilities of a softmax, and returns logits, probabilities and experts."""
    weight, original = getattr(module, "weight", None), module.forward
    named = type(module).__name__.endswith("Router") and hasattr(module, "top_k")
    if not named or not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_contiguous():
        return None
    from latent_santa.kernels.experts import MOST_TOKENS
    from latent_santa.kernels.router import softmax_router

    scale = float(getattr(module, "routed_scaling_factor", 1.0))

    @wraps(original)
    def forward(hidden_states: Tensor) -> Any:
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        if len(flat) > MOST_TOKENS or torch.is_grad_enabled():
            return original(hidden_states)
        return softmax_router(flat, module.weight, module.top_k, scale)

    def in_order(run: Forward) -> Forward:
        """Shares of all experts, 0 where not chosen."""

        def dense(states: Tensor) -> Tensor:
            logits, shares, index = run(states)
            return torch.cat((logits, torch.zeros_like(logits).scatter(-1, index, shares.to(logits.dtype))), -1)

        return dense

    return _seen_to_agree(in_order(original), in_order(forward), _states(weight, 8)[0]) and forward


def _states(weight: Tensor, tokens: int) -> Tensor:
    """Random hidden states ``(1, tokens, D)`` in a weight's dtype."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, tokens, weight.shape[-1], generator=generator)
    return states.to(device=weight.device, dtype=weight.dtype)


def _seen_to_agree(original: Forward, forward: Forward, states: Tensor) -> Forward | None:
    """``forward``, where it computes what ``original`` does."""
    try:
        with torch.no_grad():
            return forward if _alike(forward(states), original(states)) else None
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None  # it takes or gives something else


def _alike(found: Any, wanted: Any) -> bool:
    if not isinstance(found, Tensor) or not isinstance(wanted, Tensor) or found.shape != wanted.shape:
        return False
    found, wanted = found.float(), wanted.float()
    return bool((found - wanted).norm() <= MOST_ERROR * wanted.norm())
