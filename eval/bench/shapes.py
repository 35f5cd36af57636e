"""Models of known sizes with random weights, for measurements in which only sizes matter."""

from __future__ import annotations

import copy
from typing import Any

import torch

# positions of every shape: beyond some models' own, so that 128K and what is generated behind it fit
POSITIONS = 163840
LITE = dict(
    vocab_size=102400, hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=27,
    num_attention_heads=16, num_key_value_heads=16, n_shared_experts=2, n_routed_experts=64, num_experts_per_tok=6,
    first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128,
    v_head_dim=128, max_position_embeddings=POSITIONS,
)  # fmt: skip
# (configuration class, its fields); sizes are those of each model's config.json
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2-lite": ("DeepseekV2Config", LITE),
    "qwen2.5-7b": (
        "Qwen2Config",
        dict(
            vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
            num_key_value_heads=4, max_position_embeddings=POSITIONS, rms_norm_eps=1e-6, tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        ),
    ),
    "deepseek-v2-236b-layer": (
        "DeepseekV2Config",
        dict(
            vocab_size=102400, hidden_size=5120, intermediate_size=12288, moe_intermediate_size=1536,
            num_hidden_layers=60, num_attention_heads=128, num_key_value_heads=128, n_shared_experts=2,
            n_routed_experts=160, num_experts_per_tok=6, first_k_dense_replace=1, n_group=8, topk_group=3,
            topk_method="group_limited_greedy", routed_scaling_factor=16.0, kv_lora_rank=512, q_lora_rank=1536,
            qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=POSITIONS,
        ),
    ),
    "small": (
        "DeepseekV2Config",
        {
            **LITE, "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "kv_lora_rank": 64, "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 32, "v_head_dim": 32,
        },
    ),
}  # fmt: skip
# shapes that no device holds whole: as many of their layers as fit
IN_PART = ("deepseek-v2-236b-layer",)


def shape_config(shape: str, layers: int | None, dtype: torch.dtype) -> Any:
    """The configuration of a known shape; ``layers`` replaces its number of layers."""
    import transformers

    kind, fields = SHAPES[shape]
    changed = {"num_hidden_layers": layers} if layers else {}
    return getattr(transformers, kind)(**{**fields, **changed}, dtype=dtype)


def weight_bytes(config: Any) -> int:
    """Memory of the model's weights, from models of few layers; nothing is allocated."""

    def of(layers: int) -> int:
        few = copy.deepcopy(config)
        few.num_hidden_layers = layers
        if getattr(few, "layer_types", None):
            few.layer_types = few.layer_types[:layers]
        model = random_model(few, config.dtype, "meta")
        return sum(weight.numel() * weight.element_size() for weight in model.parameters())

    all_kinds = getattr(config, "first_k_dense_replace", 0) + 1
    more = config.num_hidden_layers - all_kinds
    if more <= 1:
        return of(config.num_hidden_layers)
    return of(all_kinds) + more * (of(all_kinds + 1) - of(all_kinds))


def fitting_layers(shape: str, dtype: torch.dtype, row_bytes: int, rows: int, free: int) -> int:
    """Layers of a shape whose weights and ``rows`` cached rows of ``row_bytes`` per layer fit into ``free`` bytes.

    At least two, of which one has routed experts; at most the shape's own.
    """
    whole = shape_config(shape, None, dtype)
    first = weight_bytes(shape_config(shape, 2, dtype))
    layer = weight_bytes(shape_config(shape, 3, dtype)) - first + rows * row_bytes
    return max(2, min(whole.num_hidden_layers, 2 + int((free - first - 2 * rows * row_bytes) // layer)))


def random_model(config: Any, dtype: torch.dtype, device: str) -> Any:
    """A causal language model with random weights and biases, made on its device."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for name, weight in model.named_parameters():
            if name.endswith("bias"):  # zeros multiply faster than numbers do on some devices
                torch.nn.init.normal_(weight, std=config.initializer_range)
    return model.eval()
