"""Which parts of a model our kernels take over under ``compile=True``, and that nothing but rounding changes."""

from __future__ import annotations

import copy
import functools
import sys

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: the kernels cannot run")

import latent_santa
from latent_santa.kernels.support import interpreting
from latent_santa.patches import compiled, own_layers
from latent_santa.patches.own_kernels import own_forward
from latent_santa.patches.patch import Edits

from .call_again import on_the_cpu
from .test_projections import LowRank
from .tiny_models import assert_same, generate, prompt, tiny_model

if not interpreting():
    pytest.skip("tests/gpu runs the kernels on the GPU", allow_module_level=True)

TAKEN = {
    "deepseek_v2-experts": {
        "DeepseekV2Attention", "DeepseekV2DecoderLayer", "DeepseekV2Experts", "DeepseekV2Moe", "DeepseekV2TopkRouter"
    },
    "deepseek_v2-q_lora": {"DeepseekV2Attention", "DeepseekV2DecoderLayer"},
    "deepseek_v3": {"DeepseekV3Attention", "DeepseekV3DecoderLayer"},
    "qwen2": {"Qwen2Attention", "Qwen2DecoderLayer"},
    "qwen3": {"Qwen3Attention", "Qwen3DecoderLayer"},
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_parts_that_compute_the_same_are_taken_over(name, monkeypatch):
    model = tiny_model(name)
    base = model.base_model
    assert {type(module).__name__ for module in base.modules() if own_forward(module, base)} == TAKEN[name]
    monkeypatch.setattr(
        sys.modules[Edits.__module__], "compile_parts", functools.partial(compiled.compile_parts, backend="eager")
    )
    with latent_santa.patch(model, method="absorbed_dense"):
        wanted = generate(model, prompt(40, 2), 3)
    with on_the_cpu(), latent_santa.patch(model, method="absorbed_dense", compile=True, graphs="on") as santa:
        found = generate(model, prompt(40, 2), 3)
        assert santa.graphs.replayed == 1
    assert_same(found, wanted)


def other_gate(self, hidden_states):
    """Probabilities that sum to one over the chosen experts."""
    logits = hidden_states.view(-1, self.hidden_dim) @ self.weight.T
    shares, index = logits.softmax(-1).topk(self.top_k)
    return logits, shares / shares.sum(-1, keepdim=True), index


def test_a_part_that_computes_something_else_is_left_alone(monkeypatch):
    model = tiny_model("deepseek_v2-experts", n_routed_experts=6)
    base = model.base_model
    gate, attention = base.layers[1].mlp.gate, base.layers[1].self_attn
    assert own_forward(gate, base) is not None and own_forward(attention, base) is not None
    monkeypatch.setattr(type(gate), "forward", other_gate)
    assert own_forward(gate, base) is None
    monkeypatch.setattr(attention.kv_a_layernorm, "variance_epsilon", 9.0)
    monkeypatch.setattr(type(attention.kv_a_layernorm), "forward", lambda self, states: states)
    assert own_forward(attention, base) is None


def double(module, args, output):
    return 2 * output


def put_adapter(mixture):
    mixture.shared_experts.up_proj = LowRank(mixture.shared_experts.up_proj)


def put_experts(mixture):
    mixture.experts = copy.deepcopy(mixture.experts)
    mixture.experts.gate_up_proj.data.mul_(2)


CHANGES = {
    "an adapter": put_adapter,
    "other experts": put_experts,
    "a hook of a projection": lambda mixture: mixture.shared_experts.up_proj.register_forward_hook(double),
    "a hook of the shared experts": lambda mixture: mixture.shared_experts.register_forward_hook(double),
    "a hook of the experts": lambda mixture: mixture.experts.register_forward_hook(double),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_adapters_and_hooks_that_come_later_count(change):
    base = tiny_model("deepseek_v2-experts").base_model
    mixture, states = base.layers[1].mlp, torch.randn(20, 1, 32, generator=torch.Generator().manual_seed(0))
    forward = own_forward(mixture, base)
    before = forward(states)
    CHANGES[change](mixture)
    assert torch.equal(forward(states), mixture(states))
    assert not torch.allclose(forward(states), before, atol=0.01)


def twice_in_place(module, args, output):
    output.mul_(2)


HOOKED = {
    "the latents' norm": lambda layers: (layers[0].self_attn.kv_a_layernorm, double),
    "a layer's second norm": lambda layers: (layers[0].post_attention_layernorm, double),
    "the next layer's first norm": lambda layers: (layers[1].input_layernorm, double),
    "a layer": lambda layers: (layers[0], double),
    "a layer, in place": lambda layers: (layers[0], twice_in_place),
}


@pytest.mark.parametrize("place", HOOKED)
def test_a_hook_that_comes_later_counts(place, monkeypatch):
    model, ids = tiny_model("deepseek_v2"), prompt(40)
    monkeypatch.setattr(
        sys.modules[Edits.__module__], "compile_parts", functools.partial(compiled.compile_parts, backend="eager")
    )
    # our attention stands in for sampled steps only
    settings = {"budget": 4096, "parents": "contiguous"} if "latents" in place else {"method": "dense"}
    with latent_santa.patch(model, compile=True, **settings):
        plain = generate(model, ids, 3)
        part, hook = HOOKED[place](model.model.layers)
        part.register_forward_hook(hook)
        found = generate(model, ids, 3)
    with latent_santa.patch(model, **settings):
        assert_same(found, generate(model, ids, 3))
    assert not torch.allclose(found.scores[0], plain.scores[0], atol=0.01)


def test_hidden_states_that_change_between_layers_are_normed_again():
    base = tiny_model("qwen2").base_model
    first, second = base.layers[0], base.layers[1].input_layernorm
    states = torch.randn(2, 1, base.config.hidden_size, generator=torch.Generator().manual_seed(0))
    forward, none = own_forward(first, base), {"attention_mask": None, "position_embeddings": None}
    first.self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with torch.no_grad():
        out = forward(states, **none)
        torch.testing.assert_close(out, type(first).forward(first, states, **none))
        torch.testing.assert_close(own_layers.carried(out, second), second(out))
        assert own_layers.carried(out.clone(), second) is None  # another tensor
        assert own_layers.carried(out, first.input_layernorm) is None  # another norm
        out.mul_(2)
        assert own_layers.carried(out, second) is None


def test_many_tokens_and_gradients_keep_the_models_own_way():
    model = tiny_model("deepseek_v2-experts")
    base = model.base_model
    states = torch.randn(1, 65, base.config.hidden_size, generator=torch.Generator().manual_seed(0))
    mixture = base.layers[1].mlp
    for part, logits in ((mixture, lambda out: out), (mixture.gate, lambda out: out[0])):
        forward = own_forward(part, base)
        with torch.no_grad():
            assert torch.equal(logits(forward(states)), logits(part(states)))
            assert not logits(forward(states[:, :3])).requires_grad
        assert logits(forward(states[:, :3])).requires_grad
