"""Captured decoding steps give what steps without graphs give, with a stand-in for CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import latent_santa
from latent_santa.patches.graphs.steps import LEAST_BEHIND

from .call_again import on_the_cpu
from .graph_cases import NEW, ROUNDING, SMALL, filled, generated, step
from .tiny_models import cache_name, cache_of, padded, prompt, settings_for, tiny_model


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    with on_the_cpu():
        yield


SETTINGS: list[dict[str, Any]] = [
    {"estimator": "per_head"},
    {"estimator": "pooled", "parents": "kmeans", "noise": "shared"},
    {"routing_dtype": "int8"},
    {"routing": "two_stage", "parents_per_head": 2},
    {"budget": 4096},
    {"method": "dense"},
    {"method": "absorbed_dense"},
    {"method": "centroid"},
]


@pytest.mark.parametrize("name", ["deepseek_v2", "qwen2"], ids=["mla", "gqa"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_replayed_steps_give_the_tokens_logits_and_ledger_of_steps_without_graphs(name: str, settings: Any) -> None:
    model = tiny_model(name)
    found: dict[str, Any] = {}
    for graphs in ("off", "auto"):
        with latent_santa.patch(model, settings_for(**{**SMALL, **settings}), graphs=graphs) as santa:
            output = generated(model, prompt(50, 2))
            found[graphs] = output.sequences, torch.stack(output.logits), santa.access.as_dict(), santa.full_calls
            # one token comes from the prefill or its replay, and one more step was captured
            expected = NEW - 2 if graphs == "auto" else 0
            assert (santa.graphs.replayed, santa.graphs.captured) == (expected, min(expected, 1)), santa.report()
    assert torch.equal(found["auto"][0], found["off"][0])
    torch.testing.assert_close(found["auto"][1], found["off"][1], **ROUNDING)
    assert found["auto"][2:] == found["off"][2:]


def test_a_padded_batch_and_a_further_turn() -> None:
    model = tiny_model("deepseek_v2")
    ids, mask = padded([50, 33, 41])
    found: dict[str, Any] = {}
    for graphs in ("off", "on"):
        with latent_santa.patch(model, graphs=graphs, **SMALL) as santa:
            first = generated(model, ids, attention_mask=mask)
            turn = torch.cat((first.sequences, prompt(19, 3)), 1)
            longer = torch.nn.functional.pad(mask, (0, turn.shape[1] - mask.shape[1]), value=1)
            second = generated(model, turn, attention_mask=longer, **{cache_name(model): cache_of(first)})
            found[graphs] = second.sequences, santa.access.as_dict()
            assert santa.graphs.captured == (2 if graphs == "on" else 0), santa.report()
    assert torch.equal(found["on"][0], found["off"][0]) and found["on"][1] == found["off"][1]


def test_rows_that_run_full_are_reserved_anew_and_captured_again() -> None:
    model = tiny_model("qwen2", max_position_embeddings=1024)
    found = {}
    for graphs in ("off", "auto"):
        with latent_santa.patch(model, graphs=graphs, **SMALL) as santa:
            cache = filled(model)
            logits = [step(model, cache, 5 + number % 40).logits for number in range(280)]
            found[graphs] = torch.stack(logits), santa.access.as_dict()
            if graphs == "auto":
                assert santa.graphs.captured == 2 and santa.graphs.replayed == 280 - 2 - LEAST_BEHIND
    torch.testing.assert_close(found["auto"][0], found["off"][0], **ROUNDING)
    assert found["auto"][1] == found["off"][1]


def test_steps_that_follow_each_other_draw_different_noise() -> None:
    model = tiny_model("deepseek_v2")
    with latent_santa.patch(model, graphs="on", **SMALL) as santa:
        cache = filled(model, 100)
        santa.reset()
        for _ in range(12):
            step(model, cache)
        assert len({entry["union"] for entry in santa.access.per_step()}) > 1


def test_drafts_from_the_prompt_streamers_and_criteria() -> None:
    from transformers import StoppingCriteria, StoppingCriteriaList

    class After(StoppingCriteria):
        def __call__(self, ids: Any, scores: Any, **kwargs: Any) -> Any:
            return torch.full((ids.shape[0],), ids.shape[1] >= 62)

    class Streamer:
        def __init__(self) -> None:
            self.got: list[int] = []

        def put(self, value: Any) -> None:
            self.got += value.flatten().tolist()

        def end(self) -> None:
            self.got.append(-1)

    model = tiny_model("qwen2")
    found = {}
    for graphs in ("off", "auto"):
        with latent_santa.patch(model, graphs=graphs, **SMALL) as santa:
            streamer = Streamer()
            stopped = generated(model, prompt(50), streamer=streamer, stopping_criteria=StoppingCriteriaList([After()]))
            looked = generated(model, prompt(50), 40, prompt_lookup_num_tokens=3)
            found[graphs] = stopped.sequences, looked.sequences, streamer.got, santa.access.as_dict()
            assert stopped.sequences.shape[1] == 62 and (graphs == "off" or santa.graphs.replayed >= 10)
    for one, two in zip(found["off"][:2], found["auto"][:2], strict=True):
        assert torch.equal(one, two)
    assert found["off"][2:] == found["auto"][2:]
