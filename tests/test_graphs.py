"""Captured decoding steps, with a stand-in for CUDA graphs: what is replayed, what is not and why, what stays equal."""

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
from latent_santa.patches.graphs.steps import LEAST_AHEAD, LEAST_BEHIND, MOST_WASTED, SHORT, WASTED

from .call_again import CallAgain, on_the_cpu
from .tiny_models import cache_name, cache_of, padded, prompt, tiny_model

ROUNDING = {"rtol": 1e-4, "atol": 1e-4}  # PyTorch takes other kernels where rows are reserved
SMALL = {"budget": 16, "parents": "contiguous"}
NEW = 20


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    with on_the_cpu():
        yield


def generated(model: Any, ids: Any, new: int = NEW, **kwargs: Any) -> Any:
    options = {"do_sample": False, "min_new_tokens": new, "output_logits": True, "return_dict_in_generate": True}
    given = {"attention_mask": torch.ones_like(ids), **options, **kwargs}
    return model.generate(ids, max_new_tokens=new, **given)


@torch.no_grad()
def step(model: Any, cache: Any, token: int = 7, **kwargs: Any) -> Any:
    ids = torch.full((cache.layers[0].keys.shape[0], 1), token)
    return model(input_ids=ids, **{cache_name(model): cache}, use_cache=True, logits_to_keep=1, **kwargs)


@torch.no_grad()
def filled(model: Any, length: int = 50, batch: int = 1) -> Any:
    return cache_of(model(input_ids=prompt(length, batch), use_cache=True, logits_to_keep=1))


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
        with latent_santa.patch(model, graphs=graphs, **{**SMALL, **settings}) as santa:
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


# what is not replayed


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
    santa.configure(method="quest", budget=16)
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


# what a captured step depends on


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
