"""Which parts ``compile=True`` compiles, when, and that nothing but rounding changes. Dynamo runs; no compiler does."""

from __future__ import annotations

import functools
import logging
import sys

import pytest
import torch

import latent_santa
from latent_santa.patches import compiled
from latent_santa.patches.patch import Edits

from .tiny_models import assert_same, generate, prompt, tiny_model

PARTS = {
    "deepseek_v2-experts": {"DeepseekV2MLP", "DeepseekV2RMSNorm", "DeepseekV2TopkRouter"},
    "qwen2": {"Qwen2MLP", "Qwen2RMSNorm", "Qwen2RotaryEmbedding"},
}
# what has kernels of our own where they run
OWN = {
    "deepseek_v2-experts": {"DeepseekV2Attention", "DeepseekV2DecoderLayer", "DeepseekV2Experts", "DeepseekV2Moe"},
    "qwen2": {"Qwen2Attention", "Qwen2DecoderLayer"},
}


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.WARNING, logger="torch.__trace")  # its traces of a compilation take longer than compiling


@pytest.mark.parametrize("name", PARTS)
def test_norms_mlps_routers_and_rotary_embeddings_are_parts_and_routed_experts_where_kernels_run(name, monkeypatch):
    base = tiny_model(name).base_model
    for own in (False, True):
        reason = None if own else "no kernels here"
        monkeypatch.setattr("latent_santa.patches.own_kernels.unavailable", lambda device, reason=reason: reason)
        parts = compiled.compile_parts(base, "eager")
        assert {type(module).__name__ for module, _, _ in parts} == PARTS[name] | (OWN[name] if own else set())
        assert not any("forward" in vars(module) for module in base.modules())


def test_parts_of_one_size_are_compiled_once_per_batch_size_for_one_token_alone():
    model = tiny_model("qwen2")
    wanted = [generate(model, prompt(30, batch), 3) for batch in (1, 2)]
    graphs = []

    def backend(graph, inputs):
        graphs.append(inputs)
        return graph.forward

    parts = compiled.compile_parts(model.base_model, backend)
    assert len(graphs) == 1  # the one that shows that compiling works
    for module, method, replacement in parts:
        module.__dict__[method] = replacement
    model(prompt(30))
    assert len(graphs) == 1  # a prefill compiles nothing
    for made in (3, 6, 6):  # norm, MLP and rotary embedding, for each batch size
        batch = 1 if made == 3 else 2
        assert_same(generate(model, prompt(30, batch), 3), wanted[batch - 1])
        assert len(graphs) == made
    for module, method, _ in parts:
        del module.__dict__[method]
    assert_same(generate(model, prompt(30), 3), wanted[0], 0)


def test_without_a_compiler_the_reason_is_said():
    def broken(graph, inputs):
        raise OSError("no compiler")

    with pytest.raises(RuntimeError, match=r"compile=True cannot be used here: .*no compiler.*; leave it out"):
        compiled.compile_parts(tiny_model("qwen2").base_model, broken)


def test_a_part_that_somebody_replaced_is_left_alone():
    model = tiny_model("qwen2")
    model.model.norm.__dict__["forward"] = own = torch.nn.Identity()
    parts = compiled.compile_parts(model.base_model, "eager")
    assert model.model.norm not in [module for module, _, _ in parts] and model.model.norm.forward is own


def test_patch_compiles_and_unpatch_puts_everything_back(monkeypatch):
    monkeypatch.setattr("latent_santa.patches.own_kernels.unavailable", lambda device: "no kernels here")
    monkeypatch.setattr(
        sys.modules[Edits.__module__], "compile_parts", functools.partial(compiled.compile_parts, backend="eager")
    )
    model = tiny_model("qwen2")
    before = [dict(module.__dict__) for module in model.modules()]
    with latent_santa.patch(model, budget=16, parents="contiguous") as santa:
        wanted, rows = generate(model, prompt(30), 3), santa.access.totals()
        assert santa.compiled == 0 and "compiled" not in santa.report()
    with latent_santa.patch(model, budget=16, parents="contiguous", compile=True) as santa:
        assert_same(generate(model, prompt(30), 3), wanted)
        assert santa.access.totals() == rows
        # four norms with the last one's, two MLPs and the rotary embedding
        assert santa.compiled == 5 + 2 + 1 and "compiled: 8 parts in calls of one token" in santa.report()
    assert [dict(module.__dict__) for module in model.modules()] == before


@torch.no_grad()
def test_a_hook_inside_of_a_part_that_comes_after_its_first_call_is_called():
    base = tiny_model("qwen2").base_model
    mlp, states = base.layers[0].mlp, torch.ones(1, 1, base.config.hidden_size)
    forward = next(new for part, _, new in compiled.compile_parts(base, backend="eager") if part is mlp)
    before = forward(states)
    mlp.down_proj.register_forward_hook(lambda module, args, output: 2 * output)
    assert torch.equal(forward(states), 2 * before)
