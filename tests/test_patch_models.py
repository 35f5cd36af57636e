"""Every supported family: with every team selected a patched model is the unpatched one, with a budget it is sparse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import latent_santa
from latent_santa.backends import BACKENDS, TorchBackend

from .tiny_models import FAMILIES, assert_close, assert_same, cache_of, generate, prompt, settings_for, tiny_model

SMALL = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 16}
EVERY_TEAM = {**SMALL, "budget": 4096}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    model = tiny_model(request.param)
    ids = prompt(61)
    return model, ids, generate(model, ids)


@pytest.fixture(scope="module", params=["deepseek_v2-yarn", "qwen2"])
def model(request):
    return tiny_model(request.param)


def test_every_team_selected_equals_the_unpatched_model(family):
    model, ids, wanted = family
    with latent_santa.patch(model, **EVERY_TEAM) as santa:
        assert santa.layers == model.config.num_hidden_layers == len(wanted_layers(model))
        found = generate(model, ids)
        assert santa.sparse_calls == santa.full_calls == 6
        assert [entry["percent"] for entry in santa.access.per_layer()] == [100] * santa.layers
    assert_same(found, wanted)


def wanted_layers(model):
    return [m for m in model.modules() if hasattr(m, "expand_kv") or hasattr(m, "k_proj")]


def test_small_budget_is_sparse_and_reads_what_it_counts(family):
    model, ids, wanted = family
    with latent_santa.patch(model, **SMALL) as santa:
        found = generate(model, ids)
        totals = santa.access.totals()
        groups = 1 if santa.layout == "mla" else model.config.num_key_value_heads
        teams = [layer.grouped.teams for layer in cache_of(found).layers]
    assert all(score.isfinite().all() for score in found.scores)
    assert not torch.allclose(found.scores[0], wanted.scores[0], atol=1e-2)
    calls = 6 * santa.layers
    assert totals["calls"] == calls
    # eight spans of at most 8 rows make at most 16 teams; the first call has no suffix, then it grows by one a call
    assert [(int(t.count.min()), int(t.count.max())) for t in teams] == [(16, 16)] * santa.layers
    assert totals["routing"] == 16 * calls * groups
    assert totals["suffix"] == sum(range(6)) * santa.layers * groups
    assert totals["dense"] == sum(range(61, 67)) * santa.layers * groups
    assert calls * groups * 4 <= totals["union"] < 61 * calls * groups
    row, routing = (1, 1) if santa.layout == "mla" else (2, 1)
    read = routing * totals["routing"] + row * (totals["union"] + totals["suffix"])
    assert santa.access.percent == pytest.approx(100 * read / (row * totals["dense"]))


@pytest.mark.parametrize("settings", [{"parents": "kmeans"}, {"parents": "kmeans", "kmeans_engine": "torch"}])
def test_kmeans_parents(model, settings):
    ids = prompt(61)
    wanted = generate(model, ids)
    with latent_santa.patch(model, **{**EVERY_TEAM, **settings}) as santa:
        assert_same(generate(model, ids), wanted)
        santa.configure(budget=16)
        santa.reset()
        first = generate(model, ids)
        assert 0 < santa.access.totals()["union"] < santa.access.totals()["dense"]
        assert_same(generate(model, ids), first, 0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_implementations(implementation):
    for name in ("deepseek_v3", "qwen2"):
        model = tiny_model(name)
        model.set_attn_implementation(implementation)
        wanted = generate(model, prompt(40))
        with latent_santa.patch(model, **EVERY_TEAM):
            assert_same(generate(model, prompt(40)), wanted)
        assert model.config._attn_implementation == implementation


def test_decoding_never_expands_the_cache(monkeypatch):
    model, ids = tiny_model("deepseek_v2"), prompt(61)
    rows, kind = [], type(model.model.layers[0].self_attn)
    expand = kind.expand_kv
    monkeypatch.setattr(
        kind, "expand_kv", lambda self, c, k: (rows.append(("expand", c.shape[2])), expand(self, c, k))[1]
    )
    projections, forward = [layer.self_attn.kv_b_proj for layer in model.model.layers], nn.Linear.forward

    def noted(self, x):  # a hook would make the projection one that has to be asked what it does
        if any(self is projection for projection in projections):
            rows.append(("project", x.shape[-2]))
        return forward(self, x)

    monkeypatch.setattr(nn.Linear, "forward", noted)
    generate(model, ids, 3)
    assert [n for word, n in rows if word == "expand"] == [61, 61, 62, 62, 63, 63]
    rows.clear()
    with latent_santa.patch(model, **SMALL):
        rows.clear()
        generate(model, ids, 5)
    assert sorted(rows) == sorted([("expand", 61), ("project", 61)] * 2)  # the prefill of two layers, and nothing else


def test_autocast():
    """A model is patched under autocast, and sampling stays float32 in it."""
    for name in ("deepseek_v2", "qwen2"):
        model, ids = tiny_model(name), prompt(61)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            wanted = generate(model, ids, 4)
            with latent_santa.patch(model, **EVERY_TEAM) as santa:
                santa.shadow = True
                found = generate(model, ids, 4)
        assert_close(found.scores[:1], wanted.scores[:1], 0.1)
        assert santa.shadow_errors().max() < 1e-5


def test_scores_use_the_modules_scaling(monkeypatch):
    scales = []

    class Noting(TorchBackend):
        def sampled_attention(self, step, sampling):
            scales.append(step.scale)
            return super().sampled_attention(step, sampling)

    monkeypatch.setitem(BACKENDS, "torch", Noting)
    model = tiny_model("deepseek_v2-yarn")
    with latent_santa.patch(model, **SMALL):
        generate(model, prompt(20), 2)
    module = model.model.layers[0].self_attn
    assert scales == [module.scaling] * 4
    assert module.scaling > 1.2 * module.qk_head_dim**-0.5


def test_bfloat16():
    for name in ("deepseek_v2-yarn", "qwen2"):
        model, ids = tiny_model(name).bfloat16(), prompt(61)
        wanted = generate(model, ids, 4)
        with latent_santa.patch(model, **EVERY_TEAM) as santa:
            found = generate(model, ids, 4)
            assert model(ids).logits.dtype == torch.bfloat16
            teams = [layer.grouped.teams for layer in cache_of(found).layers]
            assert {part.codes.dtype for t in teams for part in t.routing_keys} == {torch.bfloat16}
            assert_close(found.scores[:1], wanted.scores[:1], 0.1)
            santa.configure(budget=16)
            assert all(score.isfinite().all() for score in generate(model, ids, 4).scores)


@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
@pytest.mark.parametrize("noise", ["independent", "shared"])
@pytest.mark.parametrize("method", ["santa++", "gumbel_rows", "centroid"])
def test_methods_and_estimators(model, method, noise, estimator):
    ids = prompt(61)
    wanted = generate(model, ids)
    with latent_santa.patch(model, settings_for(method, **EVERY_TEAM, noise=noise, estimator=estimator)) as santa:
        assert_same(generate(model, ids), wanted)
        santa.configure(budget=16)
        santa.reset()
        found, totals = generate(model, ids), santa.access.totals()
        groups = 1 if santa.layout == "mla" else 2
        assert all(score.isfinite().all() for score in found.scores)
        assert not torch.allclose(found.scores[0], wanted.scores[0], atol=1e-2)
        assert totals["suffix"] == sum(range(6)) * 2 * groups
        assert 0 < totals["union"] < 61 * 12 * groups
        routing = {"santa++": 16 * 12, "centroid": 8 * 12, "gumbel_rows": 2 * sum(range(61, 67))}
        assert totals["routing"] == routing[method] * groups


def test_method_dense_is_the_unpatched_model_to_the_bit(model):
    ids = prompt(61)
    wanted = generate(model, ids)
    with latent_santa.patch(model, **SMALL, method="dense") as santa:
        assert_same(generate(model, ids), wanted, 0)
        assert santa.access.percent == santa.access.percent_without_routing == 100
        assert (santa.sparse_calls, santa.dense_calls, santa.prefill_calls) == (0, 5, 1)
        assert [entry["dense"] for entry in santa.access.per_step()] == [
            n * 2 * (1 if santa.layout == "mla" else 2) for n in range(62, 67)
        ]


def test_shadow_mode_records_the_error_and_changes_nothing(model):
    ids = prompt(61, batch=2)
    with latent_santa.patch(model, **EVERY_TEAM) as santa:
        assert santa.shadow_errors().numel() == 0
        santa.shadow = True
        generate(model, ids)
        assert santa.shadow_errors().shape == (2, 6, 2)
        assert santa.shadow_errors().max() < 1e-5
        santa.reset()
        santa.configure(budget=16)
        shadowed, errors = generate(model, ids), santa.shadow_errors()
        assert (errors > 1e-2).all() and errors.isfinite().all()
        santa.reset()
        santa.configure(budget=32)
        generate(model, ids)
        assert santa.shadow_errors().mean() < errors.mean()
        santa.configure(budget=16)
        santa.shadow = False
        santa.reset()
        assert_same(generate(model, ids), shadowed, 0)
        assert santa.shadow_errors().numel() == 0


def test_noise_follows_seed_and_sequence_key(model):
    ids = prompt(61).expand(2, -1)
    with latent_santa.patch(model, **SMALL) as santa:

        def unions():
            santa.reset()
            output = generate(model, ids, 3)
            return [entry["union"] for entry in santa.access.per_sequence()], output

        first, output = unions()
        again, same = unions()
        assert first == again
        assert_same(same, output, 0)
        assert not torch.allclose(output.scores[0][0], output.scores[0][1], atol=1e-3)  # places in the batch differ
        santa.configure(seed=1)
        assert unions()[0] != first
        santa.configure(seed=0)
        santa.sequence_keys = [7, 7]
        equal, output = unions()
        assert equal[0] == equal[1] and output.scores[2][0].equal(output.scores[2][1])
        santa.sequence_keys = [1, 0]
        assert unions()[0] == first[::-1]
        santa.sequence_keys = None
        assert unions()[0] == first


def test_prompts_of_awkward_lengths(model):
    """One row, fewer rows than a parent or than representatives, and a short last parent."""
    for length in (1, 2, 3, 7, 8, 9, 17):
        ids = prompt(length)
        wanted = generate(model, ids, 4)
        with latent_santa.patch(model, **EVERY_TEAM) as santa:
            assert_same(generate(model, ids, 4), wanted)
            santa.configure(budget=4)
            assert all(score.isfinite().all() for score in generate(model, ids, 4).scores)
            santa.configure(budget=4096, parents="kmeans")
            assert_same(generate(model, ids, 4), wanted)
