"""Which modules of a loaded model are attention layers that can be patched, found by their structure."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .gqa import GqaAdapter
from .mla import MlaAdapter

Adapter = MlaAdapter | GqaAdapter

MLA_PARTS = ("kv_b_proj", "kv_a_layernorm", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
GQA_PARTS = ("q_proj", "k_proj", "v_proj", "num_key_value_groups")
SUPPORTED = (
    "supported are native transformers models whose attention caches MLA latents (DeepSeek-V2/V3 and others with "
    "`expand_kv`) or goes through the attention interface with q_proj, k_proj and v_proj (Qwen2, Qwen3, Llama, Mistral)"
)


def base_model(model: PreTrainedModel) -> PreTrainedModel:
    """The module that turns tokens into hidden states, below any head."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return decoder if decoder is not None else model.base_model


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
    adapters = [_adapter(name, module) for name, module in model.named_modules() if _is_attention(module)]
    if not adapters:
        raise NotImplementedError(f"{type(model).__name__} has no attention layer that latent_santa knows; {SUPPORTED}")
    adapters.sort(key=lambda adapter: adapter.module.layer_idx)
    found = [adapter.module.layer_idx for adapter in adapters]
    layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", len(found))
    if found != list(range(max(layers, len(found)))):
        missing = sorted(set(range(layers)) - set(found))
        raise NotImplementedError(
            f"{type(model).__name__} has attention that latent_santa can patch in layers {found}, but not in "
            f"{missing}: a half-patched model is refused; {SUPPORTED}"
        )
    return adapters


def _is_attention(module: nn.Module) -> bool:
    return hasattr(module, "layer_idx") and (
        hasattr(module, "expand_kv") or all(hasattr(module, part) for part in GQA_PARTS)
    )


def _adapter(name: str, module: Any) -> Adapter:
    """The adapter of one attention module, or the reason why it cannot have one."""
    kind = type(module).__name__
    # some classes read the window from their configuration when they are called
    window = getattr(module, "sliding_window", getattr(getattr(module, "config", None), "sliding_window", None))
    scope = vars(sys.modules[type(module).__module__])
    reason = None
    if "ALL_ATTENTION_FUNCTIONS" not in scope:
        reason = "does not go through transformers' attention interface"
    elif getattr(module, "indexer", None) is not None or any(
        hasattr(module, part) for part in ("index_topk", "skip_topk")
    ):
        reason = "selects rows with an indexer of its own"
    elif window is not None:
        reason = f"attends through a sliding window of {window} rows"
    elif getattr(module, "attention_chunk_size", getattr(module.config, "attention_chunk_size", None)) is not None:
        reason = "attends in chunks of the sequence"
    elif getattr(module, "sinks", None) is not None:
        reason = "has attention sinks, which are no cache rows"
    elif getattr(module, "attn_logit_softcapping", None) is not None:
        reason = "caps its scores (softcap)"
    elif hasattr(module, "expand_kv") and not all(hasattr(module, part) for part in MLA_PARTS):
        reason = f"has expand_kv but not all of {', '.join(MLA_PARTS)}"
    if reason:
        raise NotImplementedError(f"{name} ({kind}) {reason}; {SUPPORTED}")
    return MlaAdapter(module) if hasattr(module, "expand_kv") else GqaAdapter(module)
