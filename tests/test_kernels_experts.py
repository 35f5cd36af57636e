"""Routed experts in three launches, in Triton's interpreter, against a loop over tokens in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

pytest.importorskip("triton", reason="triton is not installed: the kernels cannot run")

from latent_santa.kernels.experts import MOST_TOKENS, Shared, reason_not, routed_experts
from latent_santa.kernels.support import interpreting

from .expert_cases import case

if not interpreting():
    pytest.skip("tests/gpu runs the kernels on the GPU", allow_module_level=True)


def by_loops(states, index, shares, gate_up, down):  # noqa: ANN001, ANN201
    """In float64, token by token and expert by expert."""
    out = torch.zeros_like(states, dtype=torch.float64)
    for token, (chosen, weights) in enumerate(zip(index.tolist(), shares.double(), strict=True)):
        for expert, weight in zip(chosen, weights, strict=True):
            gate, up = (gate_up[expert].double() @ states[token].double()).chunk(2)
            out[token] += weight * (down[expert].double() @ (silu(gate) * up))
    return out


@pytest.mark.parametrize(("tokens", "top"), [(1, 6), (1, 1), (3, 2), (19, 3)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 3e-3)])
def test_three_launches_give_the_experts_of_a_loop(tokens: int, top: int, dtype: torch.dtype, tolerance: float) -> None:
    """Odd widths, experts that several tokens share, and experts that none chose."""
    given = case(tokens, top, 9, 41, 23, dtype)
    wanted = by_loops(*given)
    found = routed_experts(*given)
    assert found.dtype == dtype
    assert float((found.double() - wanted).norm() / wanted.norm()) < tolerance


def test_a_token_gets_the_same_bits_alone_and_among_others() -> None:
    states, index, shares, gate_up, down = case(5, 2, 9, 41, 23, torch.float32)
    together = routed_experts(states, index, shares, gate_up, down)
    alone = [routed_experts(states[t : t + 1], index[t : t + 1], shares[t : t + 1], gate_up, down) for t in range(5)]
    assert torch.equal(together, torch.cat(alone))


def test_what_the_kernels_cannot_take_is_named() -> None:
    from .tiny_models import tiny_model

    experts = next(
        m
        for m in tiny_model("deepseek_v2", first_k_dense_replace=1).modules()
        if hasattr(m, "down_proj") and hasattr(m, "gate_up_proj")
    )
    assert reason_not(experts) is None
    for name, value, reason in (
        ("act_fn", torch.nn.GELU(), "GELU"),
        ("has_bias", True, "biases"),
        ("is_transposed", True, "transposed"),
        ("_is_expert_parallel", True, "spread over processes"),
    ):
        before = getattr(experts, name, None)
        setattr(experts, name, value)
        assert reason in str(reason_not(experts))
        setattr(experts, name, before)


def test_compile_takes_them_for_few_tokens_and_leaves_a_prefill_alone() -> None:
    from latent_santa.patches.own_kernels import own_forward

    from .tiny_models import prompt, tiny_model

    model = tiny_model("deepseek_v2", first_k_dense_replace=1)
    experts = next(module for module in model.modules() if hasattr(module, "gate_up_proj"))
    with torch.no_grad():
        wanted, long = model(prompt(3)).logits, model(prompt(MOST_TOKENS + 1)).logits
        experts.forward = own_forward(experts, model.base_model)
        torch.testing.assert_close(model(prompt(3)).logits, wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(model(prompt(MOST_TOKENS + 1)).logits, long)


@pytest.mark.parametrize(("tokens", "own"), [(1, 46), (3, 30), (2, 17)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 3e-3)])
def test_a_shared_expert_joins_in_slices_of_any_width(
    tokens: int, own: int, dtype: torch.dtype, tolerance: float
) -> None:
    """As wide as two routed experts, as one and a part, and narrower than one."""
    states, index, chosen, gate_up, down = case(tokens, 2, 5, 41, 23, dtype)
    generator = torch.Generator().manual_seed(own)
    gate, up, last = (torch.randn(own, 41, generator=generator).div(6).to(dtype) for _ in range(3))
    shared = Shared(gate, up, last.T.contiguous())
    x = states.double()
    wanted = by_loops(states, index, chosen, gate_up, down)
    wanted += (silu(x @ gate.double().T) * (x @ up.double().T)) @ last.double()
    found = routed_experts(states, index, chosen, gate_up, down, shared)
    assert float((found.double() - wanted).norm() / wanted.norm()) < tolerance
