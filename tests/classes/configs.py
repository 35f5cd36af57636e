"""A tiny configuration of any class, made by shrinking the default one, and inputs for it."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 160
# ids of special tokens: text is below them
FIRST_SPECIAL = 100
TABLES = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
)
# every width is 64 and every head has 16 numbers, so that parts of a model fit together
SMALL: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "embedding_size", "out_hidden_size"), 64),
    **dict.fromkeys(
        ("projection_dim", "projector_hidden_size", "mlp_hidden_size", "output_dim", "text_hidden_size"), 64
    ),
    **dict.fromkeys(("projector_intermediate_size", "encoder_hidden_size", "audio_hidden_size", "input_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("depth", "encoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_head_kv"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "rotary_dim"), 16),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"), 2),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("image_size", "tile_size", "force_image_size"), 16),
    "patch_size": 4,
    "spatial_patch_size": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 32,
    "v_head_dim": 16,
    "ffn_hidden_size": 96,
    "zero_expert_num": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "num_mel_bins": 16,
    "max_source_positions": 64,
    "num_codebooks": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_expand": 2,
}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
# of a class's default configuration: as it is; with full attention in every layer; and with no window either
FULL: dict[str, Any] = {"layer_types": ["full_attention"] * 2}
NO_WINDOW: dict[str, Any] = {**FULL, "sliding_window": None, "use_sliding_window": False}
VARIANTS: tuple[dict[str, Any], ...] = ({}, FULL, NO_WINDOW)


def classes() -> dict[str, type[PreTrainedConfig]]:
    """Every causal language model, image-text and multimodal class with its configuration's class, by name."""
    found: dict[str, type[PreTrainedConfig]] = {}
    for table in TABLES:
        for kind, names in getattr(modeling_auto, table, {}).items():
            for name in [names] if isinstance(names, str) else names:
                found.setdefault(name, kind)
    return dict(sorted(found.items()))


def model_class(name: str) -> Any:
    return getattr(transformers, name)


def config_class(name: str) -> type[PreTrainedConfig]:
    own = getattr(model_class(name), "config_class", None)
    return own if isinstance(own, type) else CONFIG_MAPPING[classes()[name]]


class Ids:
    """Ids of special tokens: one per name, the same in every part of a model."""

    def __init__(self) -> None:
        self.given: dict[str, int] = {}

    def of(self, name: str) -> int:
        base = name.removesuffix("_id").removesuffix("_index")
        return self.given.setdefault(base, FIRST_SPECIAL + len(self.given))


def shrunk(
    kind: type[PreTrainedConfig], changes: dict[str, Any], variant: dict[str, Any], ids: Ids
) -> PreTrainedConfig:
    """The default configuration with small sizes, and so its parts; ``changes`` may name a part's fields in a dict."""
    default = kind()
    fields = default.to_dict()
    made: dict[str, Any] = {name: size for name, size in SMALL.items() if type(fields.get(name)) is int}
    for name, value in fields.items():
        plain = name in ("pad_token_id", "bos_token_id", "eos_token_id")
        if plain:
            made[name] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}[name]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            made[name] = ids.of(name)
    depth = next((fields[name] for name in LAYERS if type(fields.get(name)) is int), None)
    for name, value in fields.items():
        if isinstance(value, (list, tuple)) and len(value) == depth and name not in made and "token" not in name:
            made[name] = list(value[:2])
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        share = 4 if rope.get("partial_rotary_factor", 1) == 1 else 2
        made["rope_parameters"] = {**rope, "mrope_section": [share, share // 2, share // 2]}
    if "kv_lora_rank" in made:
        made["num_key_value_heads"] = made["num_attention_heads"]
    if fields.get("head_dim", 0) is None:
        made["head_dim"] = SMALL["head_dim"]
    made.update({name: value for name, value in variant.items() if name in fields})
    for name in getattr(kind, "sub_configs", {}):
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig):
            inner = changes.get(name, {})
            made[name] = shrunk(type(part), inner, variant, ids) if isinstance(inner, dict) else inner
    made.update({name: value for name, value in changes.items() if name not in made or not isinstance(value, dict)})
    return kind(**made)


def tiny(name: str, changes: dict[str, Any], variant: dict[str, Any]) -> PreTrainedModel:
    """A class's tiny model with weights that spread attention, float32 on the CPU."""
    config = shrunk(config_class(name), changes, variant, Ids())
    model = model_class(name)(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            draw = torch.randn(weight.shape, generator=generator)
            if weight.dim() < 2:
                weight.copy_(1 + 0.1 * draw if "norm" in weight_name else 0.1 * draw)
            elif "embed" in weight_name and weight.dim() == 2:
                weight.copy_(draw)
            else:
                gain = 1.6 if any(part in weight_name for part in ("q_", "k_", "kv_", "lm_head")) else 1.0
                weight.copy_(gain * draw / math.prod(weight.shape[1:]) ** 0.5)
    settings = model.generation_config
    settings.eos_token_id, settings.pad_token_id, settings.bos_token_id = None, 0, 1
    return model.eval()


def text(length: int, seed: int = 0) -> Tensor:
    """Ids ``(1, length)`` of plain text."""
    return torch.randint(3, FIRST_SPECIAL, (1, length), generator=torch.Generator().manual_seed(seed))
