"""Captured decoding steps on a CUDA device: bit for bit those that run launch by launch."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import latent_santa

from ..tiny_models import cache_name, cache_of, settings_for, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LENGTH = 300


def model_of(name: str) -> Any:
    return tiny_model(name, max_position_embeddings=4096).bfloat16().cuda()


def ids_of(model: Any, batch: int = 2) -> torch.Tensor:
    return torch.randint(3, model.config.vocab_size, (batch, LENGTH), generator=torch.Generator().manual_seed(3)).cuda()


@torch.no_grad()
def by_hand(model: Any, ids: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Greedy tokens and logits of hand-made calls, and the cache."""
    output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    cache, tokens, logits = cache_of(output), [], []
    for _ in range(steps):
        token = output.logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(token)
        output = model(input_ids=token, **{cache_name(model): cache}, use_cache=True, logits_to_keep=1)
        logits.append(output.logits)
    return torch.cat(tokens, 1), torch.stack(logits), cache


def generated(model: Any, ids: torch.Tensor, new: int, **kwargs: Any) -> Any:
    kwargs = {"attention_mask": torch.ones_like(ids), "do_sample": False, **kwargs}
    return model.generate(
        ids, max_new_tokens=new, min_new_tokens=new, output_logits=True, return_dict_in_generate=True, **kwargs
    )


@pytest.mark.parametrize("name", ["deepseek_v2", "qwen2"], ids=["mla", "gqa"])
@pytest.mark.parametrize(
    "settings",
    [
        {"estimator": "per_head", "parents": "contiguous"},
        {"estimator": "pooled", "parents": "kmeans"},
        {"estimator": "pooled", "parents": "contiguous", "noise": "shared", "routing_dtype": "int8"},
    ],
    ids=["per-head", "pooled-kmeans", "pooled-shared-int8"],
)
def test_three_hundred_steps_and_a_growth_are_those_without_graphs_bit_for_bit(name: str, settings: Any) -> None:
    model = model_of(name)
    found: dict[str, Any] = {}
    for graphs in ("off", "auto"):
        with latent_santa.patch(model, backend="triton", budget=32, graphs=graphs, **settings) as santa:
            tokens, logits, _ = by_hand(model, ids_of(model), 310)
            found[graphs] = tokens, logits, santa.access.as_dict()
            if graphs == "auto":
                assert santa.graphs.captured == 2  # the reserved rows ran full once
                assert santa.graphs.replayed >= 300 and sum(santa.graphs.eager.values()) <= 8, santa.report()
    assert torch.equal(found["auto"][0], found["off"][0])
    assert torch.equal(found["auto"][1], found["off"][1])
    assert found["auto"][2] == found["off"][2]


@pytest.mark.parametrize("name", ["deepseek_v2", "qwen2"], ids=["mla", "gqa"])
def test_a_padded_batch_and_sampling_and_a_further_turn(name: str) -> None:
    model = model_of(name)
    ids = ids_of(model, 3)
    mask = torch.ones_like(ids)
    mask[0, :50] = 0
    mask[1, :123] = 0
    found: dict[str, Any] = {}
    for graphs in ("off", "auto"):
        with latent_santa.patch(model, backend="triton", budget=32, graphs=graphs) as santa:
            torch.manual_seed(5)
            first = generated(model, ids, 40, attention_mask=mask, do_sample=True)
            turn = torch.cat((first.sequences, ids[:, :33]), 1)
            longer = torch.nn.functional.pad(mask, (0, 73), value=1)
            second = generated(model, turn, 40, attention_mask=longer, **{cache_name(model): cache_of(first)})
            found[graphs] = second.sequences, torch.stack(first.logits + second.logits), santa.access.as_dict()
            if graphs == "auto":
                assert santa.graphs.replayed >= 74, santa.report()
    assert torch.equal(found["auto"][0], found["off"][0])
    assert torch.equal(found["auto"][1], found["off"][1])
    assert found["auto"][2] == found["off"][2]


@pytest.mark.parametrize("name", ["deepseek_v2", "qwen2"], ids=["mla", "gqa"])
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "dense"},
        {"method": "absorbed_dense"},
        {"backend": "torch"},
        {"backend": "torch", "routing": "two_stage", "parents_per_head": 8},
    ],
    ids=["dense", "absorbed", "torch", "torch-two-stage"],
)
def test_what_pytorch_runs_is_replayed_to_rounding(name: str, settings: dict[str, Any]) -> None:
    """PyTorch takes other kernels where rows are reserved, so the bits may differ; all-float32 keeps that small."""
    model = tiny_model(name, max_position_embeddings=4096).cuda()
    logits = {}
    for graphs in ("off", "on"):
        with latent_santa.patch(model, settings_for(**{"budget": 32, **settings}), graphs=graphs) as santa:
            logits[graphs] = torch.stack(generated(model, ids_of(model), 30).logits)
            assert graphs == "off" or santa.graphs.replayed == 28, santa.report()
    torch.testing.assert_close(logits["on"], logits["off"], rtol=1e-3, atol=1e-3)


def test_a_replayed_step_waits_for_nothing_and_draws_anew() -> None:
    model = model_of("deepseek_v2")
    with latent_santa.patch(model, budget=16, parents="contiguous", estimator="per_head", graphs="on") as santa:
        cache = by_hand(model, ids_of(model), 8)[2]
        token = torch.full((2, 1), 7, device="cuda")
        santa.reset()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.no_grad():
                for _ in range(20):
                    model(input_ids=token, **{cache_name(model): cache}, use_cache=True, logits_to_keep=1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert santa.graphs.replayed == 20
        assert len({step["union"] for step in santa.access.per_step()}) > 1


def test_memory_of_ten_generations_is_flat_and_a_graph_goes_with_its_cache() -> None:
    model = model_of("deepseek_v2")
    ids = ids_of(model)
    with latent_santa.patch(model, budget=32, parents="contiguous") as santa:
        held = []
        for _ in range(10):
            generated(model, ids, 20)
            gc.collect()
            held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        assert santa.graphs.captured == 10
    assert held[-1][0] <= held[2][0] + (1 << 20) and held[-1][1] <= held[2][1] + (1 << 21), held


def test_two_caches_in_turn_and_new_settings_in_between() -> None:
    model = model_of("deepseek_v2")
    ids = ids_of(model)
    found: dict[str, Any] = {}
    for graphs in ("off", "on"):
        with latent_santa.patch(model, backend="triton", budget=32, graphs=graphs) as santa, torch.no_grad():
            caches = [cache_of(model(input_ids=ids.roll(k, 1), use_cache=True, logits_to_keep=1)) for k in (0, 1)]
            logits = []
            for number in range(24):
                if number == 12:
                    santa.configure(budget=64, estimator="pooled")
                token = torch.full((2, 1), 5 + number, device="cuda")
                given = {"input_ids": token, cache_name(model): caches[number % 2], "use_cache": True}
                logits.append(model(**given, logits_to_keep=1).logits)
            found[graphs] = torch.stack(logits), santa.access.as_dict()
            assert graphs == "off" or (santa.graphs.captured, santa.graphs.replayed) == (4, 20)
    assert torch.equal(found["on"][0], found["off"][0]) and found["on"][1] == found["off"][1]
