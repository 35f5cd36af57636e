"""The embedded model's fast training twin: DeepSeek-V2 with dense MLPs in plain PyTorch.

Parameter names are those of transformers' DeepseekV2ForCausalLM, so the weights load there unchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the network (defaults: the shipped model). `positions` is the longest trained sequence in tokens."""

    vocabulary: int = 4096
    hidden: int = 256
    mlp: int = 640
    layers: int = 6
    heads: int = 8
    latent: int = 128
    nope: int = 32
    rope: int = 32
    value: int = 64
    positions: int = 8704
    rope_theta: float = 1000.0
    eps: float = 1e-6


SMALL = Shape(hidden=64, mlp=128, layers=2, heads=2, latent=32, nope=16, rope=16, value=32, positions=544)


class Scale(nn.Module):
    """The weight of an RMS norm (computed inside the fused functions below)."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))


def _linear(n: int, m: int) -> nn.Linear:
    return nn.Linear(n, m, bias=False)


class Attention(nn.Module):
    """Weights of one latent attention."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.q_proj = _linear(s.hidden, s.heads * (s.nope + s.rope))
        self.kv_a_proj_with_mqa = _linear(s.hidden, s.latent + s.rope)
        self.kv_a_layernorm = Scale(s.latent)
        self.kv_b_proj = _linear(s.latent, s.heads * (s.nope + s.value))
        self.o_proj = _linear(s.heads * s.value, s.hidden)


class Mlp(nn.Module):
    """Weights of one gated MLP."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = _linear(s.hidden, s.mlp)
        self.up_proj = _linear(s.hidden, s.mlp)
        self.down_proj = _linear(s.mlp, s.hidden)


class Layer(nn.Module):
    """Weights of one layer."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(s)
        self.mlp = Mlp(s)
        self.input_layernorm = Scale(s.hidden)
        self.post_attention_layernorm = Scale(s.hidden)


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocabulary, s.hidden)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = Scale(s.hidden)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, in float32, returned in x's dtype."""
    y = x.float()
    return (weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype)


def project(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in x's dtype."""
    return F.linear(x, weight.to(x.dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of interleaved pairs: x (T, heads, D), cos and sin (T, D/2)."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos[:, None], sin[:, None]
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2).to(x.dtype)


def before_attention(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm_in: Tensor,
    wq: Tensor,
    wkv_a: Tensor,
    norm_latent: Tensor,
    wkv_b: Tensor,
    heads: int,
    nope: int,
    latent: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """x (T, hidden) to expanded queries, keys and values, each (T, heads, D)."""
    y = norm(x, norm_in, eps)
    q = project(y, wq).view(x.shape[0], heads, -1)
    compressed = project(y, wkv_a)
    kv = project(norm(compressed[:, :latent], norm_latent, eps), wkv_b).view(x.shape[0], heads, -1)
    k_rope = rotate(compressed[:, latent:].unsqueeze(1), cos, sin).expand(-1, heads, -1)
    query = torch.cat((q[..., :nope], rotate(q[..., nope:], cos, sin)), -1)
    return query, torch.cat((kv[..., :nope], k_rope), -1), kv[..., nope:].contiguous()


def after_attention(
    x: Tensor, attended: Tensor, wo: Tensor, norm_mlp: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float
) -> Tensor:
    """Output projection, residual and gated MLP: x (T, hidden), attended (T, heads * value)."""
    x = x + project(attended, wo)
    y = norm(x, norm_mlp, eps)
    return x + project(F.silu(project(y, gate)) * project(y, up), down)


class Network(nn.Module):
    """The twin. Weights are float32; activations are in `activations` dtype.

    The embedding starts large (standard deviation about 0.5) with a direction that all tokens share, and the final
    norm small: with the usual small embedding, token identity was lost after the first layer and keys were never
    matched.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape | None = None, seed: int = 0, embedding_std: float = 0.5) -> None:
        super().__init__()
        self.shape = s = shape or Shape()
        self.model = Decoder(s)
        self.activations = torch.float32
        self.before, self.after = before_attention, after_attention
        generator = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator)

        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.ndim != 2:
                    continue
                if "embed" in name:
                    shared = normal(weight.shape[1])
                    weight.copy_(embedding_std * (0.9 * normal(*weight.shape) + 0.45 * shared))
                else:
                    depth = 2 * s.layers if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                    weight.copy_(normal(*weight.shape) / math.sqrt(weight.shape[1] * depth))
            self.model.norm.weight.fill_(1 / (embedding_std * math.sqrt(s.hidden)))
        frequencies = 1.0 / (s.rope_theta ** (torch.arange(0, s.rope, 2).float() / s.rope))
        angles = torch.arange(s.positions).float()[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def compile(self) -> None:
        """Compile what surrounds the attention; one fixed number of tokens per step keeps it to one shape."""
        self.before = torch.compile(before_attention, dynamic=False)
        self.after = torch.compile(after_attention, dynamic=False)

    def uncompiled(self) -> None:
        """Go back to plain functions (evaluation meets many shapes)."""
        self.before, self.after = before_attention, after_attention

    def forward(self, ids: Tensor) -> Tensor:
        """Final hidden states (B * L, hidden) after the last norm, for ids (B, L)."""
        s = self.shape
        batch, length = ids.shape
        cos, sin = self.cos[:length].repeat(batch, 1), self.sin[:length].repeat(batch, 1)
        x = self.model.embed_tokens(ids.reshape(-1)).to(self.activations)
        for layer in self.model.layers:
            assert isinstance(layer, Layer)
            a, m = layer.self_attn, layer.mlp
            parts = self.before(
                x,
                cos,
                sin,
                layer.input_layernorm.weight,
                a.q_proj.weight,
                a.kv_a_proj_with_mqa.weight,
                a.kv_a_layernorm.weight,
                a.kv_b_proj.weight,
                s.heads,
                s.nope,
                s.latent,
                s.eps,
            )
            q, k, v = (part.view(batch, length, s.heads, -1).transpose(1, 2) for part in parts)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            attended = attended.transpose(1, 2).reshape(batch * length, -1)
            x = self.after(
                x,
                attended,
                a.o_proj.weight,
                layer.post_attention_layernorm.weight,
                m.gate_proj.weight,
                m.up_proj.weight,
                m.down_proj.weight,
                s.eps,
            )
        return norm(x, self.model.norm.weight, s.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., vocabulary) of hidden states (..., hidden); the embedding is tied."""
        return project(hidden, self.model.embed_tokens.weight)
