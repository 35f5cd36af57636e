"""Decoder layers in calls of one token: each residual sum and the norm behind it in one launch.

A layer's last sum goes with the next layer's first norm, whose result travels on the tensor of hidden states. A layer
is taken over only where its own forward is seen to be two norms, attention, an MLP and two sums.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .own_attention import as_seen

MOST_TOKENS = 64
CARRIED = "_latent_santa_normed"


class Normed(NamedTuple):
    """What a norm makes of hidden states: the norm, its output, and how often the states had been written."""

    norm: Any
    states: Tensor
    version: int | None


def own_layer(
    module: Any, base: Any, alike: Callable[[Any, Any], bool], states: Callable[[Tensor, int], Tensor]
) -> Callable[..., Any] | None:
    """A ``forward`` for a decoder layer, or None where ours computes something else than its own.

    Args:
        alike: whether two results differ by rounding.
        states: random hidden states for a weight and a number of tokens.
    """
    names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    if {name for name, _ in module.named_children()} != set(names):
        return None
    first, second = module.input_layernorm, module.post_attention_layernorm
    if not (_rms_norm(first) and _rms_norm(second)):
        return None
    following = _following_norm(module, base)
    original = module.forward

    @wraps(original)
    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        one = (
            not args and hidden_states.dim() == 3 and hidden_states.shape[1] == 1 and len(hidden_states) <= MOST_TOKENS
        )
        same = as_seen(module.input_layernorm, first) and as_seen(module.post_attention_layernorm, second)
        if not one or not same or hidden_states.dtype != second.weight.dtype or torch.is_grad_enabled():
            return original(hidden_states, *args, **kwargs)
        normed = carried(hidden_states, first)
        attended, _ = module.self_attn(hidden_states=first(hidden_states) if normed is None else normed, **kwargs)
        hidden_states, normed = _add_norm(hidden_states, attended, second)
        more = module.mlp(normed)
        if following is None or following._forward_hooks or following._forward_pre_hooks or module._forward_hooks:
            return hidden_states + more
        hidden_states, normed = _add_norm(hidden_states, more, following)
        setattr(hidden_states, CARRIED, Normed(following, normed, _version(hidden_states)))
        return hidden_states

    hidden = states(second.weight[None], 1)
    try:
        with torch.no_grad(), _stand_ins(module, states) as seen:
            options = {"attention_mask": None, "position_ids": None, "use_cache": True, "position_embeddings": None}
            wanted = original(hidden, **options)
            found = forward(hidden, **options)
            theirs, ours = seen
            same_options = all(theirs.pop(name, seen) is value for name, value in ours.items())
            same_options = same_options and not any(theirs.values())  # what was left out has defaults
            norms = following is None or alike(getattr(found, CARRIED).states, following(wanted))
            return forward if same_options and norms and alike(found, wanted) else None
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        return None  # it takes other arguments, or gives something else


def _rms_norm(norm: Any) -> bool:
    weight = getattr(norm, "weight", None)
    named = type(norm).__name__.endswith("RMSNorm") and _eps(norm) is not None
    return named and isinstance(weight, Tensor) and weight.dim() == 1


def _eps(norm: Any) -> float | None:
    found = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return found if isinstance(found, float) else None


def _add_norm(states: Tensor, more: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    from latent_santa.kernels.norm import add_norm

    eps = _eps(norm)
    assert eps is not None
    return add_norm(states, more, norm.weight, eps)


def _following_norm(module: Any, base: Any) -> Any:
    """The norm that the layer's output goes through first: the next layer's, or None behind the last one."""
    layers = list(getattr(base, "layers", ()))
    place = next((number for number, layer in enumerate(layers) if layer is module), len(layers))
    norm = getattr(layers[place + 1], "input_layernorm", None) if place + 1 < len(layers) else None
    return norm if _rms_norm(norm) else None


def carried(states: Tensor, norm: Any) -> Tensor | None:
    """What the norm makes of the states, where the layer before computed it already."""
    found = getattr(states, CARRIED, None)
    if found is None or found.norm is not norm or found.version != _version(states):
        return None
    return found.states  # type: ignore[no-any-return]


def _version(states: Tensor) -> int | None:
    """How often a tensor was written; in inference mode nobody counts."""
    return None if states.is_inference() else states._version


@contextmanager
def _stand_ins(module: Any, states: Callable[[Tensor, int], Tensor]) -> Any:
    """For a moment attention and MLP are products with numbers; yields the arguments of attention, call by call."""
    seen: list[dict[str, Any]] = []
    weight = module.post_attention_layernorm.weight
    scale = states(weight[None], 1)[0, 0].roll(1)

    def attention(hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        seen.append(kwargs)
        return hidden_states.roll(1, -1) * scale, None

    def mlp(hidden_states: Tensor) -> Tensor:
        return hidden_states.roll(3, -1) * scale

    before = {part: vars(part).get("forward") for part in (module.self_attn, module.mlp)}
    module.self_attn.forward, module.mlp.forward = attention, mlp
    try:
        yield seen
    finally:
        for part, own in before.items():
            if own is None:
                del part.forward
            else:
                part.forward = own
