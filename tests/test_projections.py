"""Projections that are no plain weight, or change, are what the module computes; those that cannot be are refused."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import latent_santa

from .test_patch_models import EVERY_TEAM
from .tiny_models import assert_same, cache_of, generate, prompt, tiny_model


class LowRank(nn.Module):
    """A linear layer with an adapter on it, whose ``weight`` alone is not what it computes."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.down = nn.Linear(inner.in_features, 2, bias=False)
        self.up = nn.Linear(2, inner.out_features, bias=False)

    @property
    def weight(self):
        return self.inner.weight

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


def test_up_projection_is_what_the_module_computes():
    model, ids = tiny_model("deepseek_v2"), prompt(40)
    rows = []
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = LowRank(layer.self_attn.kv_b_proj)
        layer.self_attn.kv_b_proj.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[-2]))
    wanted = generate(model, ids)
    with latent_santa.patch(model, **EVERY_TEAM):
        rows.clear()
        assert_same(generate(model, ids), wanted)
        # per layer a prefill of 40 rows, and the unit vectors of the latent space once per sparse call
        assert sorted(rows) == [16] * 12 + [40, 40]
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.kv_b_proj.up.weight.mul_(-3)
        changed = generate(model, ids)
    assert_same(changed, generate(model, ids))
    assert not torch.allclose(changed.scores[0], wanted.scores[0], atol=1e-2)


class Scaled(nn.Module):
    """A projection with a factor that lies in a plain number, as the scaling of a LoRA layer does."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale = inner, 1.0

    def forward(self, x):
        return self.inner(x) * self.scale


def double_number(layer):
    layer.kv_b_proj.scale *= 2


def double_data(layer):
    layer.kv_b_proj.weight.data.mul_(2)  # how adapters are merged; no version of the weight counts it


def double_weight(layer):
    with torch.no_grad():
        layer.kv_b_proj.weight.mul_(2)


def double_module(layer):
    old, layer.kv_b_proj = layer.kv_b_proj, copy.deepcopy(layer.kv_b_proj)
    layer.kv_b_proj.weight = nn.Parameter(2 * old.weight.detach())


def double_output(layer):
    layer.kv_b_proj.register_forward_hook(lambda module, args, output: 2 * output)


def double_input(layer):
    layer.kv_b_proj.register_forward_pre_hook(lambda module, args: (2 * args[0],))


@pytest.mark.parametrize(
    "change", [double_number, double_data, double_weight, double_module, double_output, double_input]
)
def test_a_projection_that_changes_while_a_cache_lives(change):
    """Further turns use the weights of their time, whatever changed them."""

    def turns(patched):
        model = tiny_model("deepseek_v2")
        layers = [layer.self_attn for layer in model.model.layers]
        if change is double_number:
            for layer in layers:
                layer.kv_b_proj = Scaled(layer.kv_b_proj)
        with latent_santa.patch(model, **EVERY_TEAM) if patched else nullcontext():
            first = generate(model, prompt(40), 3)
            for layer in layers:
                change(layer)
            # no row is grouped anew: a turn of one token
            return first, generate(model, first.sequences, 4, cache=cache_of(first))

    found, wanted = turns(True), turns(False)
    for ours, theirs in zip(found, wanted, strict=True):
        assert_same(ours, theirs)
    unchanged = tiny_model("deepseek_v2")
    assert not torch.allclose(generate(unchanged, wanted[0].sequences, 1).scores[0], wanted[1].scores[0], atol=1e-2)


class PerSequence(nn.Module):
    """A projection with another factor per sequence, as PEFT's ``adapter_names`` make it."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.factors = inner, torch.ones(1)

    def forward(self, x):
        return self.inner(x) * self.factors.view(-1, *[1] * (x.dim() - 1))


@pytest.mark.parametrize("batch", [2, 16])
def test_projections_per_sequence_are_refused(batch):
    """Also where there are as many sequences as latent dimensions, so that shapes would fit."""
    model = tiny_model("deepseek_v2")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = PerSequence(layer.self_attn.kv_b_proj)
    ids = prompt(12, batch=batch)
    with latent_santa.patch(model, **EVERY_TEAM):
        generate(model, ids, 2)
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.factors = torch.arange(1.0, batch + 1)
        with pytest.raises(NotImplementedError, match="kv_b_proj of layer 0 .PerSequence. .* leave adapter_names out"):
            generate(model, ids, 2)


def test_adapters_of_peft():
    peft = pytest.importorskip("peft")
    model = tiny_model("deepseek_v2")
    lora = peft.LoraConfig(r=2, target_modules=["kv_b_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, lora, adapter_name="one").eval()
    wrapped.add_adapter("two", lora)

    def turns():
        wrapped.set_adapter("one")
        first = generate(model, prompt(40), 3)
        wrapped.set_adapter("two")
        second = generate(model, first.sequences, 4, cache=cache_of(first))
        wrapped.merge_adapter(["two"])
        third = generate(model, second.sequences, 4, cache=cache_of(second))
        wrapped.unmerge_adapter()
        return first, second, third

    wanted = turns()
    with latent_santa.patch(model, **EVERY_TEAM):
        for ours, theirs in zip(turns(), wanted, strict=True):
            assert_same(ours, theirs)
        with pytest.raises(NotImplementedError, match="leave adapter_names out"):
            wrapped.generate(
                input_ids=prompt(40, batch=2),
                attention_mask=torch.ones(2, 40),
                adapter_names=["one", "two"],
                max_new_tokens=3,
            )
