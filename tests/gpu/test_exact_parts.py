"""Norms, routed experts and attention's inputs in few launches on a CUDA device: no bit of a decoding step changes."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from latent_santa.eval.bench.shapes import random_model, shape_config
from latent_santa.patches import exact_parts
from latent_santa.patches.patch import Edits

from ..tiny_models import tiny_model
from .test_compiled import generated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def large(shape: str) -> Any:
    """Two layers of a model's own sizes, of which DeepSeek-V2-Lite's second has routed experts."""
    model = random_model(shape_config(shape, 2, torch.bfloat16), torch.bfloat16, "cuda")
    for name, weight in model.named_parameters():
        if "norm" in name:  # ones would hide a rounding
            torch.nn.init.normal_(weight, 1.0, 0.1)
    return model


def assert_the_same_bits(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found, santa = generated(model)
    assert santa.exact_parts == len(exact_parts.exact_parts(model.base_model)) > 0
    monkeypatch.setattr(sys.modules[Edits.__module__], "exact_parts", lambda base: [])
    wanted, santa = generated(model)
    assert santa.exact_parts == 0 and torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["deepseek_v2-q_lora", "deepseek_v3", "qwen3"])
def test_outputs_of_small_models_have_the_bits_of_the_models_own_parts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_the_same_bits(tiny_model(name).bfloat16().cuda(), monkeypatch)


@pytest.mark.parametrize("shape", ["deepseek-v2-lite", "qwen2.5-7b"])
def test_outputs_at_a_models_sizes_have_the_bits_of_the_models_own_parts(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = large(shape)
    taken = [type(part).__name__ for part, _, _ in exact_parts.exact_parts(model.base_model)]
    norms = [part for part in model.base_model.modules() if type(part).__name__.endswith("RMSNorm")]
    assert sum(kind.endswith("RMSNorm") for kind in taken) == len(norms)
    assert sum(kind.endswith("Attention") for kind in taken) == 2
    assert_the_same_bits(model, monkeypatch)


def test_experts_are_taken_over_with_products_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_parts, "_agreed", {})
    experts = large("deepseek-v2-lite").model.layers[1].mlp.experts
    forward = exact_parts.exact_forward(experts)
    assert forward is not None and list(exact_parts._agreed.values()) == [exact_parts._experts]
    generator = torch.Generator().manual_seed(5)
    for tokens in (1, 3, 16, 17, 48, 64):
        states = torch.randn(tokens, 2048, generator=generator).bfloat16().cuda()
        shares = torch.rand(tokens, 6, generator=generator).cuda()
        spread = torch.rand(tokens, 64, generator=generator).topk(6).indices.cuda()
        crowded = torch.arange(6).expand(tokens, 6).cuda()  # every token chose the same experts
        for index in (spread, crowded):
            with torch.no_grad():
                wanted = type(experts).forward(experts, states, index, shares)
                assert torch.equal(forward(states, index, shares), wanted)
