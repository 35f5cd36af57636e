"""Tiny random models of every supported kind, and what the tests of the patches do with them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from latent_santa import SantaConfig

VOCABULARY = 97
PAD = 0
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}
COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rope_parameters": DEFAULT_ROPE,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
LATENT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
# two experts of which both are taken, since a routing flip would hide a small difference or make one large
EXPERTS = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 2,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
DENSE_FFN = {**EXPERTS, "first_k_dense_replace": 2}
GROUPED = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}

# name: (configuration class, model class, settings)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {**LATENT, **DENSE_FFN}),
    "deepseek_v2-q_lora": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {**LATENT, **DENSE_FFN, "q_lora_rank": 12}),
    "deepseek_v2-yarn": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {**LATENT, **DENSE_FFN, "rope_parameters": YARN}),
    "deepseek_v2-bias": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {**LATENT, **DENSE_FFN, "attention_bias": True}),
    "deepseek_v2-experts": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**LATENT, **EXPERTS, "first_k_dense_replace": 1},
    ),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**LATENT, **DENSE_FFN, "rope_interleave": True}),
    "deepseek_v3-plain_rope": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**LATENT, **DENSE_FFN, "q_lora_rank": 12, "rope_interleave": False, "rope_parameters": YARN},
    ),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", {**LATENT, **EXPERTS, "q_lora_rank": 12}),
    "minicpm3": ("MiniCPM3Config", "MiniCPM3ForCausalLM", {**LATENT, "q_lora_rank": 12, "dim_model_base": 32}),
    "youtu": ("YoutuConfig", "YoutuForCausalLM", {**LATENT, "q_lora_rank": 12}),
    "mistral4": (
        "Mistral4Config",
        "Mistral4ForCausalLM",
        {
            **LATENT,
            **EXPERTS,
            "q_lora_rank": 12,
            "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "max_position_embeddings": 256},
        },
    ),
    "longcat_flash": (
        "LongcatFlashConfig",
        "LongcatFlashForCausalLM",
        {
            **{k: v for k, v in LATENT.items() if k not in ("intermediate_size", "num_hidden_layers")},
            "q_lora_rank": 12,
            "head_dim": 8,
            "num_layers": 1,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 16,
            "n_routed_experts": 2,
            "zero_expert_num": 1,
            "moe_topk": 3,
        },
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GROUPED),
    "qwen2-7_heads_per_group": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {**GROUPED, "hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1},
    ),
    "qwen2-1_head_per_group": ("Qwen2Config", "Qwen2ForCausalLM", {**GROUPED, "num_key_value_heads": 4}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", GROUPED),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**GROUPED, "rope_parameters": YARN}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**GROUPED, "sliding_window": None}),
}


def tiny_model(name: str = "deepseek_v2", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A float32 model of a family on the CPU, in eval mode, with weights large enough that attention is far from flat.

    Args:
        name: key of :data:`FAMILIES`.
        seed: weights are a function of it alone.
        **changes: fields of the model's configuration.
    """
    config_class, model_class, settings = FAMILIES[name]
    config = getattr(transformers, config_class)(**{**COMMON, **settings, **changes})
    model = getattr(transformers, model_class)(config)
    return scaled_up(model, seed)


def scaled_up(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Draw every weight so that activations keep their size and attention scores spread over a few nats."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            draw = torch.randn(weight.shape, generator=generator)
            if weight.dim() < 2:
                weight.copy_(1 + 0.1 * draw if "norm" in name else 0.1 * draw)
            elif "embed" in name:
                weight.copy_(draw)
            else:
                gain = 1.6 if any(part in name for part in ("q_", "k_", "kv_", "lm_head")) else 1.0
                weight.copy_(gain * draw / weight.shape[-1] ** 0.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model.eval()


def cache_name(model: PreTrainedModel) -> str:
    """What this version of transformers calls the cache argument: ``cache`` or ``past_key_values``."""
    names = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def cache_of(output: Any) -> Cache:
    """The cache in a model's or generation's output."""
    cache = getattr(output, "cache", None)
    return cache if cache is not None else output.past_key_values


def prompt(length: int, batch: int = 1, seed: int = 0) -> Tensor:
    """Random token ids ``(batch, length)`` without the padding token."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Left-padded ids and attention mask ``(batch, longest)``; sequence b is ``prompt(lengths[b], seed=seed + b)``."""
    longest = max(lengths)
    ids, mask = torch.full((len(lengths), longest), PAD), torch.zeros(len(lengths), longest, dtype=torch.long)
    for b, length in enumerate(lengths):
        ids[b, longest - length :] = prompt(length, seed=seed + b)[0]
        mask[b, longest - length :] = 1
    return ids, mask


def generate(
    model: PreTrainedModel, ids: Tensor | None, new: int = 6, cache: Cache | None = None, **kwargs: Any
) -> Any:
    """Greedy generation unless ``kwargs`` say otherwise; an output with ``sequences``, ``scores`` and the cache."""
    if cache is not None:
        kwargs[cache_name(model)] = cache
    if ids is not None and "attention_mask" not in kwargs:
        kwargs["attention_mask"] = torch.ones_like(ids)
    settings = {"do_sample": False, "max_new_tokens": new, "return_dict_in_generate": True, "output_scores": True}
    return model.generate(ids, **{**settings, **kwargs})


def decode_by_hand(
    model: PreTrainedModel, ids: Tensor, new: int, cache: Cache | None = None, **kwargs: Any
) -> tuple[Tensor, list[Tensor], Cache]:
    """Greedy decoding by calling the model itself: new tokens ``(batch, new)``, each step's scores, and the cache.

    The first call asks for the last logits only, as one that decodes does: a call that asks for all is scored densely.
    """
    name, tokens, scores = cache_name(model), [], []
    with torch.no_grad():
        given = {name: cache} if cache is not None else {}
        output = model(ids, use_cache=True, logits_to_keep=1, **given, **kwargs)
        for step in range(new):
            scores.append(output.logits[:, -1])
            tokens.append(scores[-1].argmax(-1, keepdim=True))
            cache = cache_of(output)
            if step + 1 < new:
                output = model(tokens[-1], use_cache=True, **{name: cache})
    assert cache is not None
    return torch.cat(tokens, 1), scores, cache


def filled_cache(model: PreTrainedModel, ids: Tensor) -> DynamicCache:
    """A plain dynamic cache with the rows of ``ids``, as the model itself fills it."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, use_cache=True, **{cache_name(model): cache})
    return cache


def assert_same(found: Any, wanted: Any, tolerance: float = 1e-4) -> None:
    """Same tokens, and scores equal to ``tolerance`` relative to their size (infinite ones exactly)."""
    assert found.sequences.tolist() == wanted.sequences.tolist()
    assert_close(found.scores, wanted.scores, tolerance)


def assert_close(found: Any, wanted: Any, tolerance: float = 1e-4) -> None:
    """Equal numbers of score tensors, each equal to ``tolerance``."""
    assert len(found) == len(wanted) > 0
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def settings_for(method: str = "santa++", **settings: Any) -> SantaConfig:
    """Those of the settings that the method uses."""
    return SantaConfig(method="dense", **settings).for_method(method)
