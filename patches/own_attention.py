"""Attention modules in sampled calls of one token: what comes between projections and attention in one launch."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .control import CACHE_NAMES

if TYPE_CHECKING:
    from latent_santa.kernels.mla_inputs import Angles

log = logging.getLogger("latent_santa")
PROBE = "latent_santa_probe"
Pair: TypeAlias = "tuple[Tensor, Tensor]"
# (states ``(B, 1, D)``, position embeddings, where rows lie and which one to write, or None and None for new ones of
# one row) to (query states ``(B, heads, 1, D)``, both of the cache layer's rows)
Inputs: TypeAlias = "Callable[[Tensor, Any, Pair | None, Tensor | None], tuple[Tensor, Tensor, Tensor]]"


def own_attention(
    module: Any,
    base: Any,
    alike: Callable[[Any, Any], bool],
    states: Callable[[Tensor, int], Tensor],
    tokens: int = 1,
    own_norm: bool = True,
) -> Callable[..., Any] | None:
    """A ``forward`` for an attention module, or None where our kernels compute something else than its own forward.

    Args:
        alike: whether two results are near enough.
        states: random hidden states ``(1, tokens, D)`` for a weight and a number of tokens.
        tokens: on how many random states the two are compared, each in a sequence and at a place of its own.
        own_norm: norm the latent in our launch; otherwise the model's norm does it.
    """
    if not hasattr(module, "o_proj") or not hasattr(module, "scaling") or not hasattr(base, "rotary_emb"):
        return None
    inputs = _mla(module, own_norm) or _gqa(module)
    if inputs is None:
        return None
    original, norm = module.forward, getattr(module, "kv_a_layernorm", None)
    cache_name = next((n for n in CACHE_NAMES if n in inspect.signature(type(module).forward).parameters), "")

    def project(out: Tensor) -> Tensor:
        """Attention output ``(B, 1, heads, D)`` as hidden states ``(B, 1, D)``."""
        projected: Tensor = module.o_proj(out.reshape(len(out), 1, -1))
        return projected

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        states: Any = kwargs.get("hidden_states", args[0] if args else None)
        embeddings, patched = kwargs.get("position_embeddings"), module.__dict__.get("_latent_santa")
        call = patched and patched.control.thread.call
        one = isinstance(states, Tensor) and states.shape[1] == 1 and embeddings is not None and len(args) < 2
        one = one and (norm is None or module.kv_a_layernorm is norm) and not hooked(module.children())
        if not one or not call or not call.kind.sampled or torch.is_grad_enabled() or autocasts(states):
            return original(*args, **kwargs)
        layer = call.layers[module.layer_idx]
        if layer.place is not None:  # a step with fixed addresses
            query, *rows = inputs(states, embeddings, layer.buffers, layer.place)
        else:
            query, *new = inputs(states, embeddings, None, None)
            rows = kwargs[cache_name].update(*new, module.layer_idx)
        return project(patched(query, *rows, None, scaling=module.scaling)[0]), None

    try:
        hidden, attended = (states(w, tokens).transpose(0, 1) for w in (module.o_proj.weight.T, module.o_proj.weight))
        # low ones, as some embeddings keep frequencies for the longest text that they have seen
        place = 5 + torch.arange(tokens, device=hidden.device)[:, None] % 27
        embeddings = base.rotary_emb(hidden, place)
        wanted = _handed_over(module, hidden, embeddings, cache_name, attended)
        with torch.no_grad():
            found = (*inputs(hidden, embeddings, None, None), project(attended))
            agree = all(alike(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    except Exception as error:  # it takes other arguments or gives something else, or its kernels cannot be made here
        log.debug("%s keeps its own launches: %s", type(module).__name__, error)
        return None
    return forward if agree else None


def hooked(modules: Iterable[Any]) -> bool:
    """Whether somebody looks at what a module takes or gives; our kernels work in place, or leave modules out."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def as_seen(now: Any, seen: Any) -> bool:
    """Whether a module whose ``forward`` our kernels leave out is still the one they were compared with."""
    return now is seen and not hooked([now])


def autocasts(states: Tensor) -> bool:
    """Whether a call's products may be in another dtype than that of its weights."""
    return torch.is_autocast_enabled(states.device.type)


def _mla(module: Any, own_norm: bool) -> Inputs | None:
    parts = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    norm: Any = getattr(module, "kv_a_layernorm", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not all(hasattr(module, name) for name in parts) or eps is None or getattr(norm, "weight", None) is None:
        return None
    from latent_santa.kernels.mla_inputs import mla_inputs

    rank, rope = module.kv_lora_rank, module.qk_rope_head_dim
    width = module.qk_nope_head_dim + rope

    def inputs(states: Tensor, embeddings: Any, rows: Pair | None, place: Tensor | None) -> Any:
        query = (module.q_proj if module.q_lora_rank is None else module.q_a_proj)(states)
        compressed = module.kv_a_proj_with_mqa(states)
        if module.q_lora_rank is not None:
            query = module.q_b_proj(module.q_a_layernorm(query))
        query = query[:, 0].unflatten(-1, (-1, width))
        normed = None if own_norm else module.kv_a_layernorm(compressed[..., :rank]).contiguous()
        new = (states.new_empty(len(states), 1, 1, part) for part in (rank, rope))
        latents, keys = rows or new
        angles = _angles(module, embeddings)
        mla_inputs(query, compressed[:, 0], norm.weight, eps, angles, rope, latents, keys, place, normed)
        return query[:, :, None], latents, keys

    return inputs


def _gqa(module: Any) -> Inputs | None:
    if not all(hasattr(module, name) for name in ("q_proj", "k_proj", "v_proj", "head_dim")) or module.head_dim % 2:
        return None
    from latent_santa.kernels.gqa_inputs import gqa_inputs

    def inputs(states: Tensor, embeddings: Any, rows: Pair | None, place: Tensor | None) -> Any:
        parts = (part(states)[:, 0] for part in (module.q_proj, module.k_proj, module.v_proj))
        query, key, value = (part.unflatten(-1, (-1, module.head_dim)) for part in parts)
        if hasattr(module, "q_norm"):
            # with a dimension for tokens, by which a compiled norm knows that they are few
            query, key = module.q_norm(query[:, None])[:, 0], module.k_norm(key[:, None])[:, 0]
        angles = _angles(module, embeddings)
        if angles.cos.shape[-1] != module.head_dim:
            raise ValueError("a part of the dimensions is rotated")
        keys, values = rows or (torch.empty_like(key)[:, :, None], torch.empty_like(value)[:, :, None])
        gqa_inputs(query, key, value, angles, keys, values, place)
        return query[:, :, None], keys, values

    return inputs


def _angles(module: Any, embeddings: Any) -> Angles:
    from latent_santa.kernels.mla_inputs import Angles

    if isinstance(embeddings, Tensor):  # complex numbers
        whole = torch.view_as_real(embeddings)
        return Angles(whole[..., 0], whole[..., 1], True, True)
    return Angles(*embeddings, bool(getattr(module.config, "rope_interleave", False)), False)


def _handed_over(
    module: Any, states: Tensor, embeddings: Any, cache_name: str, attended: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the module's own forward hands to attention and to the cache, and what it makes of ``attended (B, 1, D)``:
    query states, both rows, and its output."""
    seen: list[Tensor] = []

    class Rows:
        def update(self, *rows: Any, **options: Any) -> Pair:
            seen.extend(rows[:2])
            return rows[0], rows[1]

    def probe(module: Any, query: Tensor, *args: Any, scaling: float, **options: Any) -> Any:
        if scaling != module.scaling:
            raise ValueError("it scales by something else")
        seen.insert(0, query)
        return attended.unflatten(-1, (query.shape[1], -1)), None

    before, config = module.config, copy.copy(module.config)
    config._attn_implementation_internal = PROBE
    ALL_ATTENTION_FUNCTIONS[PROBE] = probe
    module.config = config
    try:
        with torch.no_grad():
            options = {cache_name: Rows(), "position_embeddings": embeddings, "attention_mask": None}
            output, _ = module.forward(hidden_states=states, **options)  # nobody's hooks see it
    finally:
        module.config = before
        del ALL_ATTENTION_FUNCTIONS[PROBE]
    query, first, second = seen
    return query, first, second, output
