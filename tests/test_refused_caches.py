"""Caches that are not supported are refused by name, and stay as they are."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import QuantizedLayer

import latent_santa

from .test_patch_lifecycle import SMALL
from .tiny_models import (
    assert_same,
    cache_name,
    filled_cache,
    generate,
    prompt,
    tiny_model,
)


@pytest.fixture(scope="module", params=["deepseek_v2", "qwen2"])
def model(request):
    return tiny_model(request.param)


class Quantised(QuantizedLayer):
    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, tensor):
        return tensor


def quantised_cache(model):
    cache = DynamicCache()
    cache.layers = [Quantised() for _ in range(2)]
    return cache


CACHES = {
    "static": (
        lambda model: StaticCache(config=model.config, max_cache_len=64),
        "StaticCache whose layer 0 is a StaticLayer",
    ),
    "offloaded": (lambda model: DynamicCache(config=model.config, offloading=True), "offloaded DynamicCache"),
    "quantised": (quantised_cache, "whose layer 0 is a Quantised"),
    "tuple": (lambda model: object(), "type object"),
}


@pytest.mark.parametrize("kind", CACHES)
def test_caches_of_other_kinds(model, kind, monkeypatch):
    if kind == "offloaded":  # it makes a stream of its own, which a CPU build of torch has not
        cache = DynamicCache(config=model.config)
        cache.offloading = True
    else:
        cache = CACHES[kind][0](model)
    wanted = generate(model, prompt(30))
    kinds = [type(layer) for layer in getattr(cache, "layers", [])]
    with latent_santa.patch(model, **SMALL) as santa:
        with pytest.raises(NotImplementedError) as caught, torch.no_grad():
            model.model(prompt(30), use_cache=True, **{cache_name(model): cache})
        assert CACHES[kind][1] in str(caught.value) and "supported is DynamicCache" in str(caught.value)
        assert [type(layer) for layer in getattr(cache, "layers", [])] == kinds
        generate(model, prompt(30))
        assert santa.sparse_calls == 6
    assert_same(generate(model, prompt(30)), wanted, 0)


def test_static_cache_through_generate(model):
    with (
        latent_santa.patch(model, **SMALL),
        pytest.raises(NotImplementedError, match="cache_implementation='static': supported is DynamicCache"),
    ):
        generate(model, prompt(30), cache_implementation="static")


def test_a_cache_with_one_foreign_layer_is_left_as_it_is(model):
    cache = filled_cache(model, prompt(20))
    cache.layers[1] = Quantised()
    first = cache.layers[0]
    with latent_santa.patch(model, **SMALL), pytest.raises(NotImplementedError, match="layer 1 is a Quantised"):
        with torch.no_grad():
            model(prompt(1), **{cache_name(model): cache})
    assert cache.layers[0] is first
