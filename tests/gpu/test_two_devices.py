"""One model over two CUDA devices: layer by layer, where each layer's teams, scratch and noise live with its rows, and
head by head (tensor parallelism), in two processes.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model

from latent_santa.kmeans import minibatch_kmeans

from ..spread_worker import CASES, MODELS, check, seen, two_processes, whole_model
from ..tiny_models import tiny_model
from .test_generate import generation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def over_two_devices(model: torch.nn.Module) -> torch.nn.Module:
    """The model with its last layer, norm and head on the second device."""
    layers = len(model.model.layers)
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    places |= {f"model.layers.{i}": int(i == layers - 1) for i in range(layers)}
    return dispatch_model(model, places, main_device="cuda:0")


@pytest.mark.parametrize("name", ["deepseek_v2", "qwen2"], ids=["mla", "gqa"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("parents", ["contiguous", "kmeans"])
def test_a_model_over_two_devices_gives_the_tokens_and_rows_of_one(name: str, backend: str, parents: str) -> None:
    model = tiny_model(name)
    split = over_two_devices(copy.deepcopy(model))
    assert {p.device.index for p in split.parameters()} == {0, 1}
    settings = {"budget": 24, "parents": parents, "estimator": "pooled"}
    assert generation(split, backend, **settings) == generation(model.cuda(), backend, **settings)


def test_heads_over_two_devices_give_the_tokens_and_rows_of_one(tmp_path: Path) -> None:
    models = {name: whole_model(name) for name in MODELS}
    found = two_processes(models, tmp_path)
    for name, (model, settings) in CASES.items():
        one = seen(models[model].cuda(), settings)
        for two in found:
            check(two[name], one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kmeans_on_another_device_than_the_current_one(dtype: torch.dtype) -> None:
    points = torch.randn(3, 700, 16, generator=torch.Generator().manual_seed(0)).to("cuda:0", dtype)
    counts = [700, 400, 90], [43, 25, 5]
    assert torch.cuda.current_device() == 0
    here = minibatch_kmeans(points, *counts, seed=1)
    there = minibatch_kmeans(points.to("cuda:1"), *counts, seed=1)
    assert there.device.index == 1 and torch.equal(there.cpu(), here.cpu())
    assert torch.cuda.current_device() == 0
