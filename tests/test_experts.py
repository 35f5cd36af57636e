"""Routed experts keep their implementation while ``generate`` decodes, where that is one kernel."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import latent_santa
from latent_santa.patches import experts

from .tiny_models import tiny_model


@pytest.fixture
def model():
    return tiny_model("deepseek_v2-experts")


@pytest.fixture
def on_gpu(monkeypatch):
    """The model says that it is on a GPU, as ``generate`` asks, and its experts seem to be."""

    def pretend(model, dtype=torch.bfloat16, capability=(9, 0), cuda=True):
        monkeypatch.setattr(type(model), "device", SimpleNamespace(type="cuda"))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        place = SimpleNamespace(type="cuda" if cuda else "cpu")
        for module in filter(experts._routed, model.modules()):
            weight = SimpleNamespace(is_cuda=cuda, dtype=dtype, device=place)
            monkeypatch.setattr(module, "parameters", lambda recurse, weight=weight: [weight])
        return model

    return pretend


def test_generate_changes_them_and_the_replacement_does_not(model, on_gpu):
    on_gpu(model)
    assert experts.implementations(model) == ["grouped_mm"]
    assert experts.while_decoding(model) == ["batched_mm"]  # what transformers does
    (name, replacement), *more = experts.experts_stay(model).items()
    assert not more
    model.__dict__[name] = replacement
    assert experts.while_decoding(model) == ["grouped_mm"] == experts.implementations(model)
    del model.__dict__[name]
    assert experts.while_decoding(model) == ["batched_mm"]
    assert experts.implementations(model) == ["grouped_mm"]


@pytest.mark.parametrize(
    ("pretended", "reason"),
    [
        ({"cuda": False}, "experts are on cpu"),
        ({"dtype": torch.float16}, "the grouped product of float16 weights waits for the device"),
        ({"capability": (8, 0)}, "the grouped product waits for this device"),
        ({"capability": (12, 0)}, "the grouped product waits for this device"),
    ],
)
def test_where_the_grouped_product_waits_generate_changes_them_as_ever(model, on_gpu, pretended, reason):
    on_gpu(model, **pretended)
    model.__dict__.update(experts.experts_stay(model))
    assert experts.reason_not(model) == reason
    assert experts.while_decoding(model) == ["batched_mm"]


def test_an_implementation_that_somebody_chose_is_left_alone(model, on_gpu):
    on_gpu(model)
    model.__dict__.update(experts.experts_stay(model))
    model.set_experts_implementation("eager")
    assert experts.reason_not(model) == "its experts run as eager"
    assert experts.while_decoding(model) == ["eager"]
    model.set_experts_implementation("grouped_mm")
    assert experts.reason_not(model) is None


def test_a_model_without_experts_has_nothing_to_keep():
    model = tiny_model("qwen2")
    assert experts.reason_not(model) == "it has no routed experts"
    assert experts.while_decoding(model) == []


def test_patch_keeps_them_unless_graphs_are_off(model, on_gpu):
    on_gpu(model)
    with latent_santa.patch(model):
        assert experts.while_decoding(model) == ["grouped_mm"]
    assert experts.while_decoding(model) == ["batched_mm"]
    with latent_santa.patch(model, graphs="off"):
        assert experts.while_decoding(model) == ["batched_mm"]
