"""What a captured step depends on is noticed, and the step is captured anew; with a stand-in for CUDA graphs."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import latent_santa
from latent_santa.patches.graphs.steps import LEAST_BEHIND

from .call_again import CallAgain, on_the_cpu
from .graph_cases import NEW, ROUNDING, SMALL, filled, generated, step
from .tiny_models import cache_name, cache_of, prompt, tiny_model


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    with on_the_cpu():
        yield


def test_new_settings_other_weights_and_other_adapters_are_captured_anew() -> None:
    model = tiny_model("qwen2")
    adapted = model.model.layers[0].mlp  # what PEFT's layers say of themselves
    vars(adapted).update(disable_adapters=False, merged=False, active_adapters=["one"], scaling={"one": 1.0})
    with latent_santa.patch(model, graphs="on", **SMALL) as santa:
        cache = filled(model)

        def captures(change: Callable[[], Any]) -> int:
            before = santa.graphs.captured
            step(model, cache)
            change()
            step(model, cache)
            return santa.graphs.captured - before

        step(model, cache)
        assert captures(lambda: None) == 0
        assert captures(lambda: santa.configure(budget=32)) == 1
        assert captures(lambda: setattr(model.model.norm.weight, "data", model.model.norm.weight.data.clone())) == 1
        assert captures(lambda: setattr(model.model.norm, "weight", nn.Parameter(model.model.norm.weight * 2))) == 1
        assert captures(lambda: setattr(model.model.layers[1], "mlp", copy.deepcopy(adapted))) == 1
        assert captures(lambda: adapted.scaling.update(one=0.5)) == 1
        assert captures(lambda: setattr(adapted, "disable_adapters", True)) == 1
        assert captures(lambda: santa.prepare(cache)) == 0
        assert captures(lambda: cache.reorder_cache(torch.tensor([0]))) == 1
        assert captures(lambda: cache.crop(-1)) == 0  # a cut-off draft leaves the rows where they are


def test_an_adapter_that_is_switched_within_a_generation_is_captured_anew() -> None:
    model = tiny_model("qwen2")
    adapted = model.model.layers[0].mlp
    vars(adapted).update(disable_adapters=False, merged=False, active_adapters=["one"], scaling={"one": 1.0})

    class Switches:
        tokens = 0

        def put(self, value: Any) -> None:
            self.tokens += 1
            adapted.disable_adapters = self.tokens > NEW // 2

        def end(self) -> None:
            pass

    with latent_santa.patch(model, graphs="on", **SMALL) as santa:
        generated(model, prompt(50), streamer=Switches())
        assert (santa.graphs.captured, santa.graphs.replayed) == (2, NEW - 3)


def test_a_hook_that_comes_between_steps_is_called() -> None:
    model, called = tiny_model("qwen2"), []
    with latent_santa.patch(model, **SMALL) as santa:
        cache = filled(model)
        for _ in range(LEAST_BEHIND + 3):
            step(model, cache)
        assert santa.graphs.replayed == 2
        model.model.layers[1].register_forward_hook(lambda *_: called.append(1))
        step(model, cache)
        assert called and santa.graphs.replayed == 2


def test_a_padding_mask_that_comes_and_goes_is_heeded() -> None:
    model = tiny_model("qwen2")
    found = {}
    for graphs in ("off", "on"):
        with latent_santa.patch(model, graphs=graphs, **SMALL) as santa:
            cache, logits = filled(model, 50, 2), []
            for number in range(12):
                mask = torch.ones(2, 51 + number, dtype=torch.long)
                mask[0, 50:53] = 0  # rows in no team
                given = {"attention_mask": mask} if number in (4, 5, 8) else {}
                logits.append(step(model, cache, 5 + number, **given).logits)
            found[graphs] = torch.stack(logits), santa.access.as_dict()
            # one that heeds a mask serves calls without any, too
            assert santa.graphs.captured == (2 if graphs == "on" else 0)
    torch.testing.assert_close(found["on"][0], found["off"][0], **ROUNDING)
    assert found["on"][1] == found["off"][1]


def test_inference_mode_may_end_and_begin_between_steps() -> None:
    """Tensors that were made in it are read-only outside it."""
    model = tiny_model("qwen2")
    found = {}
    for graphs in ("off", "on"):
        with latent_santa.patch(model, graphs=graphs, **SMALL) as santa:
            with torch.inference_mode():
                first = generated(model, prompt(50))
            assert santa.access.percent < 100
            logits = [step(model, cache_of(first)).logits for _ in range(4)]
            with torch.inference_mode():
                logits += [step(model, cache_of(first)).logits.clone() for _ in range(4)]
            second = generated(model, torch.cat((first.sequences, prompt(19)), 1), **{cache_name(model): filled(model)})
            found[graphs] = torch.cat(logits), second.sequences, santa.access.as_dict()
    torch.testing.assert_close(found["on"][0], found["off"][0], **ROUNDING)
    assert torch.equal(found["on"][1], found["off"][1]) and found["on"][2] == found["off"][2]


def test_two_caches_in_turn_each_keep_their_own() -> None:
    model = tiny_model("deepseek_v2")
    found = {}
    for graphs in ("off", "on"):
        with latent_santa.patch(model, graphs=graphs, **SMALL) as santa:
            caches = [filled(model, 50), filled(model, 77)]
            logits = [step(model, caches[number % 2], 5 + number).logits for number in range(12)]
            found[graphs] = torch.stack(logits), santa.access.as_dict()
            assert santa.graphs.captured == (2 if graphs == "on" else 0)
    torch.testing.assert_close(found["on"][0], found["off"][0], **ROUNDING)
    assert found["on"][1] == found["off"][1]


def test_another_patch_captures_a_cache_anew() -> None:
    """It may compile what the first one did not, or patch in another way."""
    model = tiny_model("qwen2")
    cache = filled(model)
    for _ in range(2):
        with latent_santa.patch(model, graphs="on", **SMALL) as santa:
            for _ in range(3):
                step(model, cache)
            assert (santa.graphs.captured, santa.graphs.replayed) == (1, 2)


def test_a_captured_step_goes_with_its_cache_and_is_not_copied() -> None:
    model = tiny_model("deepseek_v2")
    with latent_santa.patch(model, graphs="on", **SMALL):
        cache = filled(model)
        for _ in range(3):
            step(model, cache)
        other = copy.deepcopy(cache)
        assert other.layers[0].graph is None
        torch.testing.assert_close(step(model, other).logits, step(model, cache).logits, **ROUNDING)
        kept = weakref.ref(cache.layers[0].graph.fixed)
        # the stand-in keeps the call; a CUDA graph keeps none
        cache.layers[0].graph._engine._run = None
        gc.disable()
        try:
            del cache
            assert kept() is None
        finally:
            gc.enable()


def test_an_exception_and_an_interrupt_leave_the_cache_usable() -> None:
    class Interrupted(CallAgain):
        fail = False

        def replay(self) -> None:
            super().replay()
            if Interrupted.fail:
                raise KeyboardInterrupt

    model = tiny_model("deepseek_v2")
    with latent_santa.patch(model, graphs="off", **SMALL):
        cache = filled(model)
        wanted = [step(model, cache).logits for _ in range(5)]
    with on_the_cpu(Interrupted), latent_santa.patch(model, graphs="on", **SMALL) as santa:
        cache = filled(model)
        found = [step(model, cache).logits for _ in range(3)]
        Interrupted.fail = True
        with pytest.raises(KeyboardInterrupt):
            step(model, cache)
        Interrupted.fail = False
        with pytest.raises((RuntimeError, IndexError)):
            step(model, cache, 10**6)  # no such token
        found += [step(model, cache).logits for _ in range(2)]
        torch.testing.assert_close(torch.stack(found), torch.stack(wanted), **ROUNDING)
        assert all(layer.place is None for layer in cache.layers)
        assert santa.access.totals()["calls"] == 2 * (5 + 1)  # and the prompt's replay
