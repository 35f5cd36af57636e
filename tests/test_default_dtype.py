"""PyTorch's default dtype is the user's: whatever it is, the method computes the same bits."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import latent_santa
from latent_santa.kmeans import minibatch_kmeans
from latent_santa.methods import METHODS
from latent_santa.parents import contiguous_parents

from .cases import frozen_teams, make_case
from .kernel_cases import make_step, twin
from .tiny_models import generate, prompt, settings_for, tiny_model

OTHERS = [torch.float64, torch.bfloat16]


@contextmanager
def default(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("method", ["santa++", "gumbel_rows"])
@pytest.mark.parametrize("k", [3, 500])
@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
@pytest.mark.parametrize("noise", ["independent", "shared"])
def test_estimators(estimator, noise, k, method, other):
    case = make_case("mla", heads=3, lengths=(21, 34, 9), suffix=3, hidden=[(1, 0)])
    wanted = case.run(k, estimator, noise, method)
    with default(other):
        found = case.run(k, estimator, noise, method)
    for name in ("out", "lse", "routing", "union", "suffix"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("engine", ["sklearn", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kmeans(dtype, engine, other):
    points = torch.randn(2, 300, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = minibatch_kmeans(points, [300, 200], [18, 12], engine=engine)
    with default(other):
        assert torch.equal(minibatch_kmeans(points, [300, 200], [18, 12], engine=engine), wanted)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("routing_dtype", ["int8", "int4"])
def test_teams_and_codes(routing_dtype, other):
    step = make_step(heads=2, lengths=(60, 40), dims=(32, 16), routing_dtype=routing_dtype)
    parents = contiguous_parents(torch.ones(2, 60, dtype=torch.bool), 8)
    wanted = twin(step, 3).out, frozen_teams(step.rows, step.rows.keys[0][:, :, :60], parents, 3)
    with default(other):
        found = twin(step, 3).out, frozen_teams(step.rows, step.rows.keys[0][:, :, :60], parents, 3)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1].team_of_row, wanted[1].team_of_row)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("settings", [{}, {"method": "santa"}, {"method": "gumbel_rows"}, {"parents": "kmeans"}])
@pytest.mark.parametrize("name", ["qwen2", "deepseek_v2"])
def test_generation(name, settings, other):
    small = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 16}
    model, results = tiny_model(name), []
    for dtype in (torch.float32, other):
        with latent_santa.patch(model, settings_for(**{**small, **settings})) as santa, default(dtype):
            output = generate(model, prompt(60), 4)
            results.append((output.sequences.tolist(), torch.stack(output.scores), santa.access.totals()))
    assert_same(*results)


@pytest.fixture(scope="module")
def qwen2():
    return tiny_model("qwen2")


@pytest.mark.parametrize("settings", [*({"method": name} for name in sorted(METHODS)), {"parents": "probes"}], ids=str)
def test_every_method(settings, qwen2):
    small = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 16}
    results = []
    for dtype in (torch.float32, *OTHERS):
        with latent_santa.patch(qwen2, settings_for(**{**small, **settings})) as santa, default(dtype):
            output = generate(qwen2, prompt(40), 3)
            results.append((output.sequences.tolist(), torch.stack(output.scores), santa.access.totals()))
    for other in results[1:]:
        assert_same(other, results[0])


def assert_same(result, wanted):
    (other_tokens, other_scores, other_rows), (tokens, scores, rows) = result, wanted
    assert other_tokens == tokens and torch.equal(other_scores, scores) and other_rows == rows


def test_nothing_is_scored_or_drawn_where_k_reaches_m(monkeypatch):
    """Algorithm 1, line 4: without routing scores and noise, the outcome is dense attention."""
    from latent_santa import two_stage

    case = make_case("gqa", heads=3, lengths=(21, 34), suffix=2)
    wanted = case.run(case.teams.M)

    def fail(*_):
        raise AssertionError("scored or drawn")

    monkeypatch.setattr(two_stage, "routing_scores", fail)
    monkeypatch.setattr(type(case.draw), "gumbels", fail)
    for name in ("per_head", "pooled"):
        found = case.run(case.teams.M, name)
        assert torch.equal(found.out, wanted.out) and not found.routing.any()
        with pytest.raises(AssertionError, match="scored or drawn"):
            case.run(case.teams.M - 1, name)
