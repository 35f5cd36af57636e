"""Which modules of a loaded model are attention layers that can be patched, found by their structure."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .adapter import Adapter
from .gqa import GqaAdapter
from .mla import MlaAdapter
from .spread import SUPPORTED_SPREAD, refused_spread

# a layout per row: attributes that a module of it has, and its adapter; the first row that fits is taken
LAYOUTS: list[tuple[tuple[str, ...], Callable[[Any], Adapter]]] = [
    (("expand_kv",), MlaAdapter),
    (("q_proj", "k_proj", "v_proj", "num_key_value_groups"), GqaAdapter),
]
# arguments of forward that bring rows of another source
CROSS = {"cross_attention_states", "encoder_hidden_states", "key_value_states"}
SUPPORTED = (
    "supported are native transformers models whose attention caches MLA latents (DeepSeek-V2/V3 and others with "
    "`expand_kv`) or goes through the attention interface with q_proj, k_proj and v_proj (Qwen2, Qwen3, Llama, Mistral)"
)


def find_adapters(model: nn.Module) -> list[Adapter]:
    """Adapters of every attention layer, in layer order.

    Raises:
        TypeError: not a transformers model.
        NotImplementedError: remote code, an encoder-decoder, or a layer of a kind that is not supported.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"got {type(model).__name__}, which is no transformers PreTrainedModel; {SUPPORTED}. Of a PEFT or compiled "
            "wrapper, patch the model inside it"
        )
    if type(model).__module__.startswith("transformers_modules"):
        raise NotImplementedError(
            f"{type(model).__name__} is remote code from the checkpoint; {SUPPORTED}: load it without trust_remote_code"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise NotImplementedError(f"{type(model).__name__} is an encoder-decoder; {SUPPORTED}")
    adapters, encoders = [], []  # an encoder, of an image or of a whole prompt, caches no row
    for name, module in model.named_modules():
        kind = _adapter_class(module)
        if kind is not None and getattr(module, "is_causal", True) is False:
            encoders.append(f"{name} ({type(module).__name__})")
        elif kind is not None:
            adapters.append(_adapter(name, module, kind))
    if not adapters:
        known = f"; {encoders[0]} attends in both directions" if encoders else ""
        raise NotImplementedError(
            f"{type(model).__name__} has no causal attention layer that latent_santa knows{known}; {SUPPORTED}"
        )
    adapters.sort(key=lambda adapter: adapter.module.layer_idx)
    _check_stack(model, [adapter.module.layer_idx for adapter in adapters])
    _check_cache(base_model(model, adapters))
    return adapters


def _check_stack(model: PreTrainedModel, found: list[int]) -> None:
    """Every layer of one stack, each once; ``found`` are the sorted numbers of those that have an adapter."""
    if len(set(found)) < len(found):
        raise NotImplementedError(
            f"{type(model).__name__} has several stacks of attention layers (numbers {found}); {SUPPORTED}, in one "
            "stack: patch the language model inside it if it is used alone"
        )
    layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", len(found))
    missing = sorted(set(range(max(layers, found[-1]))) - set(found))
    if missing:
        raise NotImplementedError(
            f"{type(model).__name__} has attention that latent_santa can patch in layers {found}, but not in "
            f"{missing}: a half-patched model is refused; {SUPPORTED}"
        )


def _check_cache(base: PreTrainedModel) -> None:
    """The model's cache holds attention rows and nothing else."""
    name = type(base).__name__
    for kind in vars(sys.modules[type(base).__module__]).values():
        if isinstance(kind, type) and issubclass(kind, Cache) and kind.__module__ == type(base).__module__:
            raise NotImplementedError(f"{name} keeps a cache of its own ({kind.__name__}); {SUPPORTED}")
    for layer in DynamicCache(config=base.config).layers:
        if type(layer) is not DynamicLayer:
            raise NotImplementedError(f"{name} caches more than attention rows ({type(layer).__name__}); {SUPPORTED}")


def base_model(model: PreTrainedModel, adapters: Sequence[Adapter]) -> PreTrainedModel:
    """The innermost model around all attention layers: it turns tokens into hidden states and has no head.

    Raises:
        NotImplementedError: that model has a head, so that it gives logits only.
    """
    layers = {adapter.module for adapter in adapters}
    around = [
        module
        for module in model.modules()  # outer modules come before inner ones
        if isinstance(module, PreTrainedModel) and layers <= set(module.modules())
    ]
    if around[-1].get_output_embeddings() is not None:
        raise NotImplementedError(
            f"{type(around[-1]).__name__} keeps its attention layers in no transformers model of their own, but beside "
            f"its head; {SUPPORTED}"
        )
    return around[-1]


def _adapter_class(module: nn.Module) -> Callable[[Any], Adapter] | None:
    """The adapter of a module's layout, or None where it is no attention layer that caches rows."""
    if getattr(module, "layer_idx", None) is None:
        return None
    return next((kind for marks, kind in LAYOUTS if all(hasattr(module, mark) for mark in marks)), None)


def _adapter(name: str, module: Any, kind: Callable[[Any], Adapter]) -> Adapter:
    """The adapter of one attention module, or the reason why it cannot have one."""
    reason = _reason_not(module)
    if reason is None:
        try:
            return kind(module)
        except NotImplementedError as error:
            reason = str(error)
    raise NotImplementedError(f"{name} ({type(module).__name__}) {reason}; {SUPPORTED}")


def _reason_not(module: Any) -> str | None:
    """Why sampling the module's rows would not estimate what it computes, or None."""
    # some classes read the window from their configuration when they are called
    window = getattr(module, "sliding_window", getattr(getattr(module, "config", None), "sliding_window", None))
    interface = vars(sys.modules[type(module).__module__]).get("ALL_ATTENTION_FUNCTIONS")
    if interface is None:
        return "does not go through transformers' attention interface"
    if interface is not ALL_ATTENTION_FUNCTIONS:
        return "has an attention interface of its own"
    arguments = set(inspect.signature(module.forward).parameters)
    if getattr(module, "is_cross_attention", False) or CROSS & arguments:
        return "can attend to rows that are no tokens of the text (cross-attention)"
    if "cache_offset" in arguments:
        return "runs several times per token, each time on another layer of the cache"
    if getattr(module, "is_kv_shared_layer", False):
        return "attends to the rows of another layer"
    if (times := _interface_calls(type(module).forward)) > 1:
        return f"calls the attention interface {times} times per token"
    if getattr(module, "indexer", None) is not None or any(
        hasattr(module, part) for part in ("index_topk", "skip_topk")
    ):
        return "selects rows with an indexer of its own"
    if window:  # some configurations say 0 for none
        return f"attends through a sliding window of {window} rows"
    if getattr(module, "attention_chunk_size", getattr(module.config, "attention_chunk_size", None)) is not None:
        return "attends in chunks of the sequence"
    if getattr(module, "sinks", None) is not None:
        return "has attention sinks, which are no cache rows"
    if getattr(module, "attn_logit_softcapping", None) is not None:
        return "caps its scores (softcap)"
    return None


@functools.cache
def _interface_calls(forward: Callable[..., Any]) -> int:
    """How often a module's forward calls what it got from the attention interface, as far as its source tells."""
    try:
        return inspect.getsource(forward).count("attention_interface(")
    except (OSError, TypeError):
        return 1  # made without a source file, as in a notebook


def check(model: PreTrainedModel, adapters: Sequence[Adapter]) -> None:
    """See that every weight is available, and that each adapter computes what its module computes.

    Raises:
        NotImplementedError: weights without values or spread over processes, or a module that differs.
    """
    offloaded = tuple(f"{name}." if name else "" for name, part in model.named_modules() if hasattr(part, "_hf_hook"))
    for name, weight in model.named_parameters():
        if refused_spread(weight, getattr(model, "tp_size", None)):
            raise NotImplementedError(
                f"{name} is spread over processes (a {type(weight).__name__}, as FSDP makes); {SUPPORTED_SPREAD}"
            )
        if weight.is_meta and not name.startswith(offloaded):
            raise NotImplementedError(
                f"{name} is on the meta device, where weights have no values; supported are models with loaded weights "
                "(those that accelerate offloads included): load them first, for example with from_pretrained"
            )
    for adapter in adapters:
        adapter.check()
