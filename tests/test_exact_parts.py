"""Norms and the glue of grouped experts in few launches, in Triton's interpreter: the bits of the model's own."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="triton is not installed: the kernels cannot run")

from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RMSNorm

import latent_santa
from latent_santa.kernels.grouped import grouped_experts, grouped_product
from latent_santa.kernels.norm import rms_norm
from latent_santa.kernels.support import interpreting
from latent_santa.patches import exact_parts
from latent_santa.patches.patch import Edits

from .call_again import on_the_cpu
from .step_cases import normal
from .tiny_models import assert_same, generate, prompt, tiny_model

if not interpreting():
    pytest.skip("tests/gpu runs the kernels on the GPU", allow_module_level=True)


def norm(width: int, dtype: torch.dtype) -> Any:
    module = DeepseekV2RMSNorm(width).to(dtype)
    nn.init.normal_(module.weight)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1500), (3, 1, 40), (2, 1, 3, 16)])
def test_a_norm_has_the_bits_of_its_own_forward(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    module = norm(shape[-1], dtype)
    states = (3 * normal(*shape)).to(dtype)
    cut = torch.cat((states, states), -1)[..., : shape[-1]]  # as a latent before its rotary part
    with torch.no_grad():
        for given in (states, cut):
            assert torch.equal(rms_norm(given, module.weight, module.variance_epsilon), module(given))


def in_turn(outputs: Tensor, shares: Tensor) -> Tensor:
    """Weighed outputs ``(T, TOP, D)`` added up into four sums in turn, and those one after another."""
    sums = [torch.zeros(len(outputs), outputs.shape[2]) for _ in range(4)]
    for number in range(outputs.shape[1]):
        product = outputs[:, number] * shares[:, number, None]
        sums[number % 4] = sums[number % 4] + product.float()
    return (sums[0] + sums[1] + sums[2] + sums[3]).to(outputs.dtype)


@pytest.mark.parametrize("top", [1, 2, 6])
@pytest.mark.parametrize("tokens", [1, 5])
def test_pairs_come_in_the_order_of_experts_and_back(tokens: int, top: int) -> None:
    experts, width = 7, 1100
    states, scales = normal(tokens, width).half(), torch.arange(1, experts + 1).half()
    index = torch.stack([torch.randperm(experts)[:top] for _ in range(tokens)])
    for shares in (torch.rand(tokens, top), torch.rand(tokens, top).half()):

        def products(given: Tensor, ends: Tensor) -> Tensor:
            counts = torch.bincount(index.flatten(), minlength=experts)
            assert ends.tolist() == counts.cumsum(0).tolist() and ends.dtype == torch.int32
            return given * torch.repeat_interleave(scales, counts)[:, None]

        found = grouped_experts(states, index, shares, experts, products)
        assert torch.equal(found, in_turn(states[:, None] * scales[index][..., None], shares))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_expert_multiplies_its_own_rows(dtype: torch.dtype) -> None:
    counts = torch.tensor([0, 3, 1, 0, 20, 2])  # more than a program takes at once, and none
    states, weights = normal(26, 150).to(dtype), normal(6, 70, 150, seed=1).to(dtype)
    ends = counts.cumsum(0).to(torch.int32)
    rows = torch.repeat_interleave(torch.arange(6), counts)
    wanted = torch.einsum("pd,pnd->pn", states.double(), weights.double()[rows])
    found = grouped_product(states, weights, ends)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-3, atol=0.02 if dtype == torch.float16 else 1e-4)


def test_a_part_is_taken_over_only_where_its_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherRMSNorm(DeepseekV2RMSNorm):  # rounds once
        def forward(self, hidden_states: Tensor) -> Tensor:
            wide = hidden_states.float()
            variance = wide.pow(2).mean(-1, keepdim=True)
            return (self.weight.float() * wide * torch.rsqrt(variance + self.variance_epsilon)).to(hidden_states.dtype)

    monkeypatch.setattr(exact_parts, "_agreed", {})
    assert exact_parts.exact_forward(norm(48, torch.float16)) is not None
    assert exact_parts.exact_forward(OtherRMSNorm(48).half()) is None
    assert exact_parts.exact_forward(norm(48, torch.float32)) is None  # without casts little is gained
    assert exact_parts.exact_forward(nn.Linear(3, 3)) is None


def test_prompts_and_calls_with_gradients_keep_the_norms_own_forward() -> None:
    module = norm(16, torch.float16)
    forward = exact_parts.exact_forward(module)
    assert forward is not None
    long = normal(1, exact_parts.MOST_TOKENS + 1, 16).half()
    with torch.no_grad():
        assert torch.equal(forward(long), module(long))
    assert forward(normal(1, 1, 16).half()).requires_grad


def parts_with_the_same_bits(base: Any) -> list[tuple[Any, str, Any]]:
    """As on a GPU."""
    found = (
        (part, exact_parts.exact_forward(part) or exact_parts.exact_attention(part, base)) for part in base.modules()
    )
    return [(part, "forward", forward) for part, forward in found if forward is not None]


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v2-q_lora", "deepseek_v3", "qwen2", "qwen3"])
@pytest.mark.parametrize("graphs", [True, False])
def test_attention_and_norms_leave_every_bit_of_a_generation(
    name: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(name).half()
    kinds = [type(part).__name__ for part, _, _ in parts_with_the_same_bits(model.base_model)]
    assert sum(kind.endswith("Attention") for kind in kinds) == 2
    assert sum(kind.endswith("Norm") for kind in kinds) == sum(
        type(part).__name__.endswith("RMSNorm") for part in model.base_model.modules()
    )
    found = []
    for parts in (lambda base: [], parts_with_the_same_bits):
        monkeypatch.setattr(sys.modules[Edits.__module__], "exact_parts", parts)
        with (
            on_the_cpu(),
            latent_santa.patch(model, budget=16, parents="contiguous", graphs="on" if graphs else "off") as santa,
        ):
            found.append(generate(model, prompt(40, 2), 4))
            assert santa.graphs.replayed == 2 * graphs and santa.compiled == 0
            assert santa.exact_parts == len(parts(model.base_model))
            assert ("with the model's bits" in santa.report()) == (santa.exact_parts > 0)
    assert_same(found[1], found[0], 0)


def see(module: Any, args: Any, output: Tensor) -> None:
    """Looks at an output and at nothing else."""


@pytest.mark.parametrize("name", ["deepseek_v2", "qwen3"])
def test_where_somebody_looks_attention_keeps_its_own_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(name).half()
    base, attention = model.base_model, model.model.layers[0].self_attn
    hook = attention.q_proj.register_forward_hook(see)
    assert exact_parts.exact_attention(attention, base) is None
    hook.remove()
    calls: list[Any] = []
    hook = attention.register_forward_hook(lambda *given: calls.append(given))  # it sees what it would see anyway
    assert exact_parts.exact_attention(attention, base) is not None and not calls
    hook.remove()
    attention.q_proj = Twice(attention.q_proj)
    assert exact_parts.exact_attention(attention, base) is None
    attention.q_proj = attention.q_proj.inner

    seen: list[tuple[Tensor, Tensor]] = []
    monkeypatch.setattr(sys.modules[Edits.__module__], "exact_parts", parts_with_the_same_bits)
    with latent_santa.patch(model, budget=16, parents="contiguous"):
        attention.q_proj.register_forward_hook(lambda module, args, output: seen.append((output, output.clone())))
        generate(model, prompt(40), 3)
    assert len(seen) >= 3 and all(torch.equal(*pair) for pair in seen)  # nothing was rotated in place


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: Tensor) -> Tensor:
        return 2 * self.inner(states)  # type: ignore[no-any-return]


def test_nothing_is_taken_over_on_the_cpu() -> None:
    assert exact_parts.exact_parts(tiny_model("deepseek_v2-experts").base_model) == []
