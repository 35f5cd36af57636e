"""Patching and unpatching: per instance, back to the bit, and what the handle says in between."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import latent_santa
from latent_santa import SantaConfig

from .tiny_models import assert_same, generate, prompt, scaled_up, tiny_model

SMALL = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 16}
KINDS = ["deepseek_v2-yarn", "qwen2"]


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return tiny_model(request.param)


def snapshot(model):
    """Everything a patch could leave behind, by identity where identity matters."""
    state = []
    for name, module in model.named_modules():
        state.append((name, {key: id(value) for key, value in vars(module).items()}, list(vars(module))))
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._forward_hooks_with_kwargs)
        state.append([dict(h) for h in (*hooks, module._forward_pre_hooks_with_kwargs)])
    state.append(model.config.to_json_string())
    state.append(vars(model.config).copy())
    state.append(model.generation_config.to_json_string())
    state.append(sorted(ALL_ATTENTION_FUNCTIONS.keys()))
    state.append(type(model).__dict__.get("generate"))
    return state


def logits(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def test_unpatch_restores_everything_to_the_bit(model):
    ids = prompt(40)
    before, wanted = snapshot(model), generate(model, ids)
    santa = latent_santa.patch(model, **SMALL)
    assert santa.patched and snapshot(model) != before
    assert generate(model, ids).sequences.shape == wanted.sequences.shape
    santa.unpatch()
    assert not santa.patched and snapshot(model) == before
    found = generate(model, ids)
    assert found.sequences.equal(wanted.sequences)
    assert all(a.equal(b) for a, b in zip(found.scores, wanted.scores, strict=True))
    santa.unpatch()
    assert snapshot(model) == before


@pytest.mark.parametrize("where", ["prefill", "replay", "decode"])
def test_unpatch_restores_after_generate_raised(model, where):
    ids, calls = prompt(40), {"prefill": 1, "replay": 2, "decode": 4}
    before, wanted = snapshot(model), generate(model, ids)
    count = 0

    def fail(*_):
        nonlocal count
        count += 1
        if count == calls[where]:
            raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError), latent_santa.patch(model, **SMALL):
        hook = model.get_submodule("model.layers.1.mlp").register_forward_hook(fail)
        try:
            generate(model, ids)
        finally:
            hook.remove()
    assert snapshot(model) == before
    assert generate(model, ids).sequences.equal(wanted.sequences)


def test_patched_model_generates_right_after_a_call_that_raised(model):
    ids = prompt(40)
    with latent_santa.patch(model, **SMALL) as santa:
        wanted = generate(model, ids)
        counted = santa.access.totals()
        hook = model.get_submodule("model.layers.1.mlp").register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(model, ids)
        hook.remove()
        santa.reset()
        assert_same(generate(model, ids), wanted, 0)
        assert santa.access.totals() == counted


def test_unpatch_keeps_attributes_that_were_on_the_instance(model):
    def own_generate(*args, **kwargs):
        return type(model).generate(model, *args, **kwargs)

    model.generate = own_generate
    try:
        with latent_santa.patch(model, **SMALL) as santa:
            generate(model, prompt(20))
            assert santa.sparse_calls
        assert vars(model)["generate"] is own_generate
    finally:
        del model.generate


def test_hooks_of_others_survive(model):
    seen = []
    hook = model.model.register_forward_hook(lambda *_: seen.append(1))
    with latent_santa.patch(model, **SMALL):
        logits(model, prompt(12))
    logits(model, prompt(12))
    hook.remove()
    assert len(seen) == 2


def test_patching_twice_raises_and_leaves_the_first_patch(model):
    with latent_santa.patch(model, **SMALL) as santa:
        with pytest.raises(RuntimeError, match="patched already.*configure.*unpatch"):
            latent_santa.patch(model, budget=32)
        with pytest.raises(RuntimeError, match="patched already"):
            latent_santa.patch(model.model, budget=32)
        generate(model, prompt(20), 3)
        assert santa.sparse_calls == 3
    latent_santa.patch(model, **SMALL).unpatch()


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_model_of_the_class_is_untouched_to_the_bit(kind):
    first = tiny_model(kind)
    other = scaled_up(type(first)(first.config), seed=0)
    assert other.config is first.config
    ids = prompt(40)
    wanted, before = generate(other, ids), snapshot(other)
    with latent_santa.patch(first, **SMALL) as santa:
        changed = generate(first, ids)
        assert santa.sparse_calls
        found = generate(other, ids)
        after = snapshot(other)
        calls = santa.sparse_calls
        generate(other, ids)
        assert santa.sparse_calls == calls
    names = after[-2]
    assert names == sorted([*before[-2], "latent_santa"])
    assert after[:-2] == before[:-2]
    assert all(a.equal(b) for a, b in zip(found.scores, wanted.scores, strict=True))
    assert not changed.scores[-1].equal(wanted.scores[-1])


def test_nested_with_on_two_models():
    mla, gqa = tiny_model("deepseek_v2"), tiny_model("qwen2")
    ids = prompt(40)
    plain = generate(mla, ids), generate(gqa, ids)
    with latent_santa.patch(mla, **SMALL) as outer:
        alone = generate(mla, ids)
        with latent_santa.patch(gqa, **{**SMALL, "budget": 4096}) as inner:
            assert_same(generate(mla, ids), alone, 0)
            assert_same(generate(gqa, ids), plain[1])
            assert (outer.sparse_calls, inner.sparse_calls) == (12, 6)
        assert_same(generate(gqa, ids), plain[1], 0)
        assert_same(generate(mla, ids), alone, 0)  # the inner exit must not take the registry entry away
        assert inner.sparse_calls == 6
    assert_same(generate(mla, ids), plain[0], 0)


def test_weights_and_saved_configuration_are_those_of_the_model(model, tmp_path):
    names = list(model.state_dict())
    model.save_pretrained(tmp_path / "plain")
    with latent_santa.patch(model, **SMALL):
        assert list(model.state_dict()) == names
        model.save_pretrained(tmp_path / "patched")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "patched" / file).read_bytes()


def test_configure_between_generations(model):
    ids = prompt(60)
    dense = generate(model, ids)
    with latent_santa.patch(model, **SMALL) as santa:
        small = generate(model, ids)
        assert santa.configure(budget=4096).budget == 4096 == santa.config.budget
        assert_same(generate(model, ids), dense)
        santa.configure(budget=16, parent_size=4, representatives=1)
        other = generate(model, ids)
        assert not other.scores[-1].equal(small.scores[-1])
        santa.configure(parent_size=8, representatives=2)
        assert_same(generate(model, ids), small, 0)
        for bad, rule in [
            ({"budget": 3}, "budget=3.*divisible"),
            ({"parent_size": 7}, "parent_size=7"),
            ({"budgets": 3}, "unknown setting budgets.*budget"),
            ({"estimator": "all"}, "estimator='all'.*per_head"),
        ]:
            with pytest.raises(ValueError, match=rule):
                santa.configure(**bad)
        assert santa.config == SantaConfig(**SMALL)
        assert_same(generate(model, ids), small, 0)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"budget": 510}, "budget=510.*divisible by P/R = 4"),
        ({"representatives": 3}, "representatives=3.*parent_size=16"),
        ({"budget": 0}, "budget=0.*at least 1"),
        ({"budget": 2.0}, "budget=2.0.*int"),
        ({"parents": "k-means"}, "parents='k-means'.*kmeans.*contiguous"),
        ({"nonsense": 1}, "unknown setting nonsense"),
    ],
)
def test_wrong_settings_leave_the_model_alone(model, settings, message):
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        latent_santa.patch(model, **settings)
    assert snapshot(model) == before


def test_settings_come_from_a_config_and_overrides(model):
    config = SantaConfig(**SMALL, seed=5)
    with latent_santa.patch(model, config, budget=24) as santa:
        assert santa.config == SantaConfig(**{**SMALL, "budget": 24}, seed=5)
    assert config.budget == 16


def test_the_report_cuts_no_number(model, monkeypatch):
    with latent_santa.patch(model, **SMALL) as santa:
        generate(model, prompt(40), 2)
        summary = santa.access.as_dict()
        many = {"routing": 123456789012, "union": 234567890123, "suffix": 345678901234, "dense": 456789012345}
        summary["totals"].update(many)
        monkeypatch.setattr(santa.access, "as_dict", lambda: summary)
        assert all(str(count) in santa.report() for count in many.values())


def test_report_and_repr(model):
    with latent_santa.patch(model, **SMALL) as santa:
        assert "nan" not in santa.report().lower()
        generate(model, prompt(40), 5)
        lines, equation = santa.report().rstrip().splitlines(), "14" if santa.layout == "mla" else "13"
        text = " ".join(" ".join(lines).split())
        assert max(map(len, lines)) <= 80
        for piece in (
            f"{type(model).__name__}: 2 {santa.layout.upper()} layers patched",
            "method santa++, contiguous parents, P=8, R=2, S=16",
            "K=4",
            "1 prefill, 5 sparse (1 replays, 0 with every team selected), 0 dense",
            f"Equation {equation}",
            f"{santa.access.percent:.2f}",
            f"{santa.access.percent_without_routing:.2f}",
        ):
            assert piece in text, piece
        last = lines[-1]
        assert "all" in last and str(santa.access.totals()["union"]) in last
        assert "2 layers patched" in repr(santa)
        santa.reset()
        assert santa.sparse_calls == santa.prefill_calls == santa.access.totals()["calls"] == 0
    assert "unpatched" in repr(santa)


def test_report_says_when_every_team_was_selected(model):
    with latent_santa.patch(model, **{**SMALL, "budget": 4096}) as santa:
        generate(model, prompt(40), 5)
        assert santa.full_calls == santa.sparse_calls == 5
        assert "5 with every team selected" in santa.report()
        assert santa.access.percent == 100


@pytest.mark.parametrize(
    "settings, arguments, reason",
    [
        ({}, {"use_cache": False}, "use_cache=False"),
        ({"first_token": "dense"}, {"new": 1}, "first_token='dense'"),
    ],
)
def test_a_generation_without_sparse_call_warns_once_and_says_why(model, settings, arguments, reason):
    with latent_santa.patch(model, **SMALL, **settings) as santa:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            generate(model, prompt(20), **arguments)
        ours = [str(w.message) for w in caught if "no call of this generation was sparse" in str(w.message)]
        assert len(ours) == 1 and reason in ours[0]
        assert santa.sparse_calls == 0
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="no call of this generation was sparse")
            generate(model, prompt(20), 3)
            santa.configure(method="dense")
            generate(model, prompt(20), 3)


def test_a_patched_model_is_not_copied(model):
    with latent_santa.patch(model, **SMALL), pytest.raises(RuntimeError, match="cannot be copied: unpatch it first"):
        copy.deepcopy(model)
    assert generate(copy.deepcopy(model), prompt(9), 2).sequences.equal(generate(model, prompt(9), 2).sequences)
