"""Parts of a model that have kernels of our own in calls of one token, under ``patch(compile=True)``.

No compiler can use which experts are hit, and none joins an MLA layer's norm, rotation and cache row. Every class does
a little otherwise, so a part is taken over only where, on random inputs, it computes what the class's own forward does
up to rounding; another part is left to the compiler, or as it is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from latent_santa.kernels import unavailable

from .control import CACHE_NAMES

Forward = Callable[..., Any]
# relative; a wrong formula is off by as much as the numbers are large
MOST_ERROR = 0.05
PROBE = "latent_santa_probe"


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
    return _mla(module, base)


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
        few = hidden_states.dim() == 2 and len(hidden_states) <= MOST_TOKENS and hidden_states.dtype == gate_up.dtype
        if few and not torch.is_grad_enabled():
            return routed_experts(hidden_states, top_k_index, top_k_weights, gate_up, down)
        return original(hidden_states, top_k_index, top_k_weights)

    return forward


def _experts_with_shared(module: Any) -> Forward | None:
    """Of a module that adds the outputs of routed experts and of one MLP for all tokens."""
    if {name for name, _ in module.named_children()} != {"experts", "gate", "shared_experts"}:
        return None
    from latent_santa.kernels.experts import MOST_TOKENS, Shared, reason_not, routed_experts

    experts, mlp, original = module.experts, module.shared_experts, module.forward
    linear = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    plain = all(type(part) is nn.Linear and part.bias is None and part.weight.is_contiguous() for part in linear)
    if not plain or not hasattr(experts, "gate_up_proj") or reason_not(experts) is not None:
        return None

    @wraps(original)
    def forward(hidden_states: Tensor) -> Tensor:
        flat, gate_up = hidden_states.view(-1, hidden_states.shape[-1]), experts.gate_up_proj
        shared = Shared(*(getattr(mlp, name).weight for name in ("gate_proj", "up_proj", "down_proj")))
        alike = {flat.dtype, gate_up.dtype, *(weight.dtype for weight in shared)}
        if len(flat) > MOST_TOKENS or len(alike) > 1 or torch.is_grad_enabled():
            return original(hidden_states)  # type: ignore[no-any-return]
        _, shares, index = module.gate(hidden_states)
        return routed_experts(flat, index, shares, gate_up, experts.down_proj, shared).view(hidden_states.shape)

    return _seen_to_agree(original, forward, _states(experts.gate_up_proj, 1))


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


def _mla(module: Any, base: Any) -> Forward | None:
    """Of an MLA module: norm, rotation and cache row in one launch."""
    parts = ("kv_a_proj_with_mqa", "kv_a_layernorm", "o_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    if not all(hasattr(module, name) for name in parts) or not hasattr(base, "rotary_emb"):
        return None
    from latent_santa.kernels.linear import linear, plain
    from latent_santa.kernels.mla_inputs import Angles, mla_inputs

    norm, original = module.kv_a_layernorm, module.forward
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if eps is None or not isinstance(getattr(norm, "weight", None), Tensor):
        return None
    rank, rope = module.kv_lora_rank, module.qk_rope_head_dim
    width = module.qk_nope_head_dim + rope
    cache_name = next((n for n in CACHE_NAMES if n in inspect.signature(type(module).forward).parameters), "")

    def angles_of(embeddings: Any) -> Angles:
        if isinstance(embeddings, Tensor):
            whole = torch.view_as_real(embeddings)
            return Angles(whole[..., 0], whole[..., 1], True, True)
        return Angles(*embeddings, bool(getattr(module.config, "rope_interleave", False)), False)

    def inputs(states: Tensor, embeddings: Any, rows: tuple[Tensor, Tensor] | None, place: Tensor | None) -> Any:
        """Query states ``(B, H, 1, nope + rope)``, and the rows, into which a new one was written."""
        first, last = module.q_proj if module.q_lora_rank is None else module.q_a_proj, module.kv_a_proj_with_mqa
        if plain(states[:, 0], first, last):
            both = linear(states[:, 0], first.weight, last.weight)
            query, compressed = both.split((first.out_features, last.out_features), -1)
        else:
            query, compressed = first(states)[:, 0], last(states)[:, 0]
        if module.q_lora_rank is not None:
            query = module.q_b_proj(module.q_a_layernorm(query))
        query = query.unflatten(-1, (-1, width))
        if rows is None:
            rows = tuple(states.new_empty(len(states), 1, 1, n) for n in (rank, rope))  # type: ignore[assignment]
        assert rows is not None
        mla_inputs(query, compressed, norm.weight, eps, angles_of(embeddings), rope, *rows, place)
        return query[:, :, None], *rows

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        states: Any = kwargs.get("hidden_states", args[0] if args else None)
        embeddings, patched = kwargs.get("position_embeddings"), module.__dict__.get("_latent_santa")
        call = patched and patched.control.thread.call
        one = isinstance(states, Tensor) and states.shape[1] == 1 and embeddings is not None and len(args) < 2
        if not one or not call or not call.kind.sampled or torch.is_grad_enabled():
            return original(*args, **kwargs)
        cache, layer = kwargs[cache_name], call.layers[module.layer_idx]
        if layer.place is not None:
            query, *rows = inputs(states, embeddings, layer.buffers, layer.place)
        else:
            query, *new = inputs(states, embeddings, None, None)
            rows = cache.update(*new, module.layer_idx)
        out, _ = patched(query, *rows, None, scaling=module.scaling)
        out, project = out.reshape(len(states), -1), module.o_proj
        return (linear(out, project.weight) if plain(out, project) else project(out))[:, None], None

    weight = module.kv_a_proj_with_mqa.weight
    states, place = _states(weight, 1), torch.full((1, 1), 5, device=weight.device)
    try:
        embeddings = base.rotary_emb(states, place)
        wanted = _handed_over(module, states, embeddings, cache_name)
        found = inputs(states, embeddings, None, None) if isinstance(embeddings, (Tensor, tuple)) else ()
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError):
        return None  # it takes other arguments
    return forward if len(found) == 3 and all(map(_alike, found, wanted)) else None


def _handed_over(module: Any, states: Tensor, embeddings: Any, cache_name: str) -> tuple[Tensor, ...]:
    """What the module's own forward hands to attention and to the cache: query states, latent and rotated key."""
    seen: list[Tensor] = []

    class Rows:
        def update(self, *rows: Any, **options: Any) -> tuple[Tensor, Tensor]:
            seen.extend(rows[:2])
            return rows[0], rows[1]

    def probe(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        seen.insert(0, query)
        return value.transpose(1, 2), None

    config = copy.copy(module.config)
    config._attn_implementation_internal = PROBE
    before = module.config
    ALL_ATTENTION_FUNCTIONS[PROBE] = probe
    module.config = config
    try:
        with torch.no_grad():
            options = {cache_name: Rows(), "position_embeddings": embeddings, "attention_mask": None}
            module(hidden_states=states, **options)
    finally:
        module.config = before
        del ALL_ATTENTION_FUNCTIONS[PROBE]
    return tuple(seen)


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
