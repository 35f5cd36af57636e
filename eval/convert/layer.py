"""A Qwen2 checkpoint (GQA) written again as DeepSeek-V2 (MLA): the same function of its input, for testing MLA paths.

What it is for: running the MLA side of a program on real weights where only a Qwen2 checkpoint is available. It is no
learned latent compression. The latent holds what the KV heads hold, so a row is wider than the source's, and few of its
dimensions take part in content scores.

How one layer is re-expressed, with H query heads, G KV heads of d dimensions, C of which also score through the
latent:

- The latent is every KV head's key before rotation, every KV head's value, then constant lanes. `kv_b_proj` picks from
  it C key dimensions and the d value dimensions of a head's own KV head, with ones and zeros.
- The rotary part of a row is every KV head's key, G * d dimensions, and G * C dimensions that do not turn. A query head
  is zero outside its own KV head's share.
- The C slowest dimensions also score through the latent, or content scores would all be zero. The dimensions that do
  not turn subtract the same score again.
- A query latent is the layer's input, then constant lanes. One of them carries the biases of `q_proj`.

What is exact: every weight, which is copied, negated or halved; every frequency; and, but for the norms, the sums in
exact arithmetic. What rounds:

- RMSNorm of the latents divides by the root mean square of lanes that are 2**24 (2**12 in float16). A sixteenth of the
  dimensions are lanes, so that it divides by a power of two. Contents below about 1,000 change the divisor by less
  than float32 resolves; in float16 they change it by up to 8 * (content / lane)**2, and small ones lose bits.
- The scale of the scores comes out of a float64 product, where the source's is one root.
- Sums run in another order, and DeepSeek-V2 rotates in float32 where Qwen2 rotates in the model's dtype.
- Routing keys in integer codes round the two parts of a key apart, so that what is subtracted again is not quite equal.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CONTENT_PAIRS = 8  # unless the caller says otherwise
CONTENT_SHARE = 0.5
LANES_IN = 16  # one dimension of so many is a lane: lanes of size L make a root mean square of L / 4
LANE = {torch.float32: 2.0**24, torch.bfloat16: 2.0**24, torch.float16: 2.0**12}
STILL = 1e24  # a wavelength at which a rotary pair does not turn
SCALE_FACTOR = 2.0
PROJECTIONS = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias",
               "o_proj.weight")  # fmt: skip


@dataclass(frozen=True)
class Shapes:
    """Sizes of a Qwen2 attention layer, and of the MLA layer that expresses it."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    content_pairs: int = CONTENT_PAIRS

    @property
    def keys(self) -> int:
        """Key dimensions of all KV heads together, G * d."""
        return self.kv_heads * self.head_dim

    @property
    def pairs(self) -> Tensor:
        """A head's dimensions in DeepSeek-V2's order: it turns neighbours, Qwen2 dimension j with j + d / 2."""
        return torch.arange(self.head_dim).view(2, -1).T.flatten()

    @property
    def slow(self) -> Tensor:
        """The C dimensions of a head's slowest rotary pairs, pair by pair."""
        return self.pairs[max(0, self.head_dim - 2 * self.content_pairs) :]

    @property
    def nope(self) -> int:
        return len(self.slow)

    @property
    def rope(self) -> int:
        return self.keys + self.kv_heads * self.nope

    @property
    def rank(self) -> int:
        """Dimensions of the latent: keys, values and lanes."""
        return _with_lanes(2 * self.keys)

    @property
    def query_rank(self) -> int:
        return _with_lanes(self.hidden)


def _with_lanes(content: int) -> int:
    """The least multiple of `LANES_IN` that has room for the content beside its lanes."""
    return LANES_IN * math.ceil(content / (LANES_IN - 1))


def shapes_of(config: Any, content_pairs: int = CONTENT_PAIRS) -> Shapes:
    """Sizes of the source's attention layers, and of what expresses them."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Shapes(config.hidden_size, heads, config.num_key_value_heads, head_dim, content_pairs)


def target_config(config: Any, s: Shapes) -> Any:
    """The `DeepseekV2Config` that re-expresses a `Qwen2Config`. No layer has experts."""
    from transformers import DeepseekV2Config

    # DeepSeek-V2 multiplies its scale (nope + rope)**-0.5 by (0.1 * mscale_all_dim * ln(factor) + 1)**2
    growth = ((s.nope + s.rope) / s.head_dim) ** 0.25 - 1
    # with a base of 1, the factor of a wavelength is the wavelength
    factors = _wavelengths(s, config.rope_parameters["rope_theta"])
    return DeepseekV2Config(
        vocab_size=config.vocab_size,
        hidden_size=s.hidden,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.heads,
        hidden_act=config.hidden_act,
        max_position_embeddings=config.max_position_embeddings,
        initializer_range=config.initializer_range,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        attention_bias=True,
        attention_dropout=config.attention_dropout,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        first_k_dense_replace=config.num_hidden_layers,
        n_routed_experts=1,
        num_experts_per_tok=1,
        n_shared_experts=1,
        moe_intermediate_size=1,
        q_lora_rank=s.query_rank,
        kv_lora_rank=s.rank,
        qk_nope_head_dim=s.nope,
        qk_rope_head_dim=s.rope,
        v_head_dim=s.head_dim,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1.0,
            "long_factor": factors,
            "short_factor": factors,
            "factor": SCALE_FACTOR,
            "attention_factor": 1.0,
            "mscale_all_dim": growth / (0.1 * math.log(SCALE_FACTOR)),
            "original_max_position_embeddings": config.max_position_embeddings,
        },
        architectures=["DeepseekV2ForCausalLM"],
        dtype=config.dtype,
    )


def _wavelengths(s: Shapes, theta: float) -> list[float]:
    """The wavelength of every rotary pair over 2 pi, KV head by KV head, then of those that do not turn."""
    turning = theta ** (torch.arange(0, s.head_dim, 2, dtype=torch.float) / s.head_dim)
    return turning.repeat(s.kv_heads).tolist() + [STILL] * (s.kv_heads * s.nope // 2)


def latent_attention(source: dict[str, Tensor], s: Shapes) -> dict[str, Tensor]:
    """The MLA layer's weights, by name below `self_attn.`, from a Qwen2 layer's (`q_proj.weight`, ...)."""
    dtype = source["q_proj.weight"].dtype
    lane = LANE[dtype]

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    pairs, slow = s.pairs, s.slow

    def rotary(part: Tensor) -> Tensor:
        """Dimensions (G, d, ...) of keys as (rope, ...): all of them in turning order, then those that do not turn."""
        return torch.cat((part[:, pairs].flatten(0, 1), part[:, slow].flatten(0, 1)))

    found: dict[str, Tensor] = {}
    query_in, query_bias = zeros(s.query_rank, s.hidden), zeros(s.query_rank)
    query_in[: s.hidden] = torch.eye(s.hidden, dtype=dtype)
    query_bias[s.hidden : s.hidden + s.query_rank // LANES_IN] = lane
    query_norm = zeros(s.query_rank)
    query_norm[: s.hidden] = lane / 4
    query_norm[s.hidden] = 1 / 4  # the lane is 4 after the division, so this makes it 1
    found |= {"q_a_proj.weight": query_in, "q_a_proj.bias": query_bias, "q_a_layernorm.weight": query_norm}

    affine = torch.cat((source["q_proj.weight"], source["q_proj.bias"][:, None]), 1).view(s.heads, s.head_dim, -1)
    query = zeros(s.heads, s.nope + s.rope, s.query_rank)
    up = zeros(s.heads, s.nope + s.head_dim, s.rank)
    for head in range(s.heads):
        group = head // (s.heads // s.kv_heads)
        columns = slice(0, s.hidden + 1)
        moved = CONTENT_SHARE * affine[head, slow]
        turning = s.nope + group * s.head_dim
        still = s.nope + s.keys + group * s.nope
        query[head, : s.nope, columns] = moved
        query[head, turning : turning + s.head_dim, columns] = affine[head, pairs]
        query[head, still : still + s.nope, columns] = -moved
        up[head, torch.arange(s.nope), group * s.head_dim + slow] = 1
        values = s.keys + group * s.head_dim
        up[head, s.nope :, values : values + s.head_dim] = torch.eye(s.head_dim, dtype=dtype)
    found |= {"q_b_proj.weight": query.flatten(0, 1), "kv_b_proj.weight": up.flatten(0, 1)}

    for kind in ("weight", "bias"):
        k, v = source[f"k_proj.{kind}"], source[f"v_proj.{kind}"]
        rest = zeros(s.rank - 2 * s.keys, *k.shape[1:])
        if kind == "bias":
            rest[: s.rank // LANES_IN] = lane
        turned = rotary(k.view(s.kv_heads, s.head_dim, *k.shape[1:]))
        found[f"kv_a_proj_with_mqa.{kind}"] = torch.cat((k, v, rest, turned))
    latent_norm = zeros(s.rank)
    latent_norm[: 2 * s.keys] = lane / 4
    found["kv_a_layernorm.weight"] = latent_norm
    return found | {"o_proj.weight": source["o_proj.weight"], "o_proj.bias": zeros(s.hidden)}


def difference(attention: dict[str, Tensor], s: Shapes, config: Any, target: Any) -> float:
    """Largest difference of the attention outputs of both expressions of one layer, relative to the largest output.

    In float32, on 64 random inputs ``(1, 64, hidden)`` at positions spread over the model's whole context.
    """
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as mla
    from transformers.models.qwen2 import modeling_qwen2 as gqa

    states = torch.randn(1, 64, s.hidden, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(64)[None] * (config.max_position_embeddings // 64)
    outputs = []
    for made, weights, attention_class, rotary_class in (
        (config, attention, gqa.Qwen2Attention, gqa.Qwen2RotaryEmbedding),
        (target, latent_attention(attention, s), mla.DeepseekV2Attention, mla.DeepseekV2RotaryEmbedding),
    ):
        made = copy.deepcopy(made)
        made._attn_implementation = "eager"
        with torch.device("meta"):
            layer = attention_class(made, 0)
        layer.load_state_dict({name: weight.float() for name, weight in weights.items()}, assign=True)
        with torch.no_grad():
            turned = rotary_class(made)(states, positions)
            outputs.append(layer.eval()(states, position_embeddings=turned, attention_mask=None)[0])
    return ((outputs[0] - outputs[1]).abs().max() / outputs[0].abs().max()).item()
