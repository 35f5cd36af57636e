"""Decoding steps that are not replayed: why, and what the report says; with a stand-in for CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import latent_santa
from latent_santa.patches.graphs.steps import LEAST_AHEAD, LEAST_BEHIND, MOST_WASTED, SHORT, WASTED

from .call_again import CallAgain, on_the_cpu
from .graph_cases import NEW, SMALL, filled, generated, step
from .tiny_models import cache_name, prompt, tiny_model


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    with on_the_cpu():
        yield


def beams(santa: Any, model: Any) -> None:
    generated(model, prompt(50), num_beams=2)


def shadow(santa: Any, model: Any) -> None:
    santa.shadow = True
    generated(model, prompt(50))
    santa.shadow = False


def gradients(santa: Any, model: Any) -> None:
    cache = filled(model)
    for _ in range(3):
        model(input_ids=prompt(1), **{cache_name(model): cache}, use_cache=True, logits_to_keep=1)


def hidden_states(santa: Any, model: Any) -> None:
    generated(model, prompt(50), output_hidden_states=True)


def autocast(santa: Any, model: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        generated(model, prompt(50))


def hooks(santa: Any, model: Any) -> None:
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    generated(model, prompt(50))
    handle.remove()


def moved_weights(santa: Any, model: Any) -> None:
    model.model.layers[0]._hf_hook = object()
    generated(model, prompt(50))
    del model.model.layers[0]._hf_hook


def other_method(santa: Any, model: Any) -> None:
    santa.configure(latent_santa.SantaConfig(method="quest", budget=16))
    generated(model, prompt(50))


REASONS: list[tuple[Callable[[Any, Any], None], str]] = [
    (beams, "beam search moves rows between sequences"),
    (shadow, "santa.shadow compares every step"),
    (gradients, "gradients are enabled"),
    (hidden_states, "output_hidden_states=True was asked for"),
    (autocast, "autocast is enabled"),
    (hooks, "layers.0 has forward hooks"),
    (moved_weights, "accelerate moves weights around layers.0"),
    (other_method, "method 'quest' has steps of varying shapes"),
]


@pytest.mark.parametrize(("use", "reason"), REASONS, ids=lambda value: getattr(value, "__name__", ""))
def test_each_reason_is_counted_and_named_in_the_report_and_the_next_generation_replays(use: Any, reason: str) -> None:
    model = tiny_model("qwen2")
    with latent_santa.patch(model, **SMALL) as santa:
        use(santa, model)
        assert santa.graphs.replayed == santa.graphs.captured == 0
        ((found, count),) = santa.graphs.eager.items()
        assert reason in found and count >= 3
        assert found[:20] in " ".join(santa.report().split())
        santa.configure(method="santa++")
        santa.reset()
        generated(model, prompt(50))
        assert santa.graphs.replayed == NEW - 2, santa.report()


@pytest.mark.parametrize(("use", "reason"), REASONS, ids=lambda value: getattr(value, "__name__", ""))
def test_graphs_on_refuses_with_the_reason(use: Any, reason: str) -> None:
    model = tiny_model("qwen2")
    with latent_santa.patch(model, graphs="on", **SMALL) as santa:
        with pytest.raises(RuntimeError, match=reason):
            use(santa, model)


def test_graphs_on_refuses_a_device_without_them_at_once_and_leaves_the_model_alone() -> None:
    model = tiny_model("qwen2")
    with pytest.MonkeyPatch.context() as patch:
        from latent_santa.patches.graphs import engine

        patch.delitem(engine.ENGINES, "cpu")
        with pytest.raises(RuntimeError, match="the model is on cpu, and supported is CUDA"):
            latent_santa.patch(model, graphs="on")
    assert not hasattr(model.model, "_latent_santa") and "forward" not in vars(model.model)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="graphs='yes': choose from auto, on, off"):
        latent_santa.patch(tiny_model("qwen2"), graphs="yes")
    with pytest.raises(TypeError, match="compile='off': must be True or False"):
        latent_santa.patch(tiny_model("qwen2"), compile="off")  # type: ignore[arg-type]


def test_a_few_steps_are_not_worth_a_capture() -> None:
    model = tiny_model("qwen2")
    with latent_santa.patch(model, **SMALL) as santa:
        generated(model, prompt(50), LEAST_AHEAD)
        assert santa.graphs.captured == 0 and santa.graphs.eager == {SHORT: LEAST_AHEAD - 1}
        cache = filled(model)
        santa.reset()
        for _ in range(LEAST_BEHIND + 3):
            step(model, cache)
        assert (santa.graphs.captured, santa.graphs.replayed) == (1, 2)
        assert santa.graphs.eager == {SHORT: LEAST_BEHIND}


def test_a_cache_whose_steps_change_each_time_gets_no_more_captures() -> None:
    model = tiny_model("qwen2")
    with latent_santa.patch(model, **SMALL) as santa:
        cache = filled(model)
        for number in range(12):
            santa.configure(budget=16 + 16 * (number % 2))
            step(model, cache)
        assert santa.graphs.captured == MOST_WASTED and santa.graphs.replayed == 0
        assert santa.graphs.eager == {SHORT: LEAST_BEHIND, WASTED: 12 - LEAST_BEHIND - MOST_WASTED}
        other = filled(model)
        for _ in range(6):
            step(model, other)
        assert santa.graphs.replayed == 6 - LEAST_BEHIND - 1


def test_a_capture_that_fails_leaves_the_step_as_it_was_and_is_not_tried_again() -> None:
    class Fails(CallAgain):
        def capture(self, run: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    model = tiny_model("qwen2")
    with latent_santa.patch(model, graphs="off", **SMALL) as santa:
        wanted = generated(model, prompt(50)).sequences
        rows = santa.access.as_dict()
    with on_the_cpu(Fails), latent_santa.patch(model, **SMALL) as santa:
        assert torch.equal(generated(model, prompt(50)).sequences, wanted)
        assert santa.access.as_dict() == rows
        ((reason, count),) = santa.graphs.eager.items()
        assert reason == "its capture failed: operation not permitted when stream is capturing" and count == NEW - 1
    with on_the_cpu(Fails), latent_santa.patch(model, graphs="on", **SMALL) as santa:
        with pytest.raises(RuntimeError, match="capture failed: operation not permitted"):
            generated(model, prompt(50))
