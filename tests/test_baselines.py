"""The baselines, each against loops in numpy on random padded rows, against dense at full budget, and in the ledger."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import latent_santa
from latent_santa import naive as ref
from latent_santa.access import GQA_SCAN_UNIT, GQA_UNIT, MLA_SCAN_UNIT, MLA_UNIT
from latent_santa.config import choices
from latent_santa.eval.run.conditions import label, slug
from latent_santa.methods import METHODS
from latent_santa.rows import Rows

from .cases import make_case
from .tiny_models import assert_same, cache_of, generate, padded, prompt, tiny_model

SCANS = ("oracle_rows", "oracle_teams")
TEAMS = ("oracle_teams", "top_teams", "uncorrected")
BASELINES = ("oracle_rows", *TEAMS)
# a budget at which tiny prompts leave rows out
SMALL = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 8}


def settings(method, **changes):
    """The small settings that the method has, with some changed."""
    own = METHODS[method].settings
    return latent_santa.SantaConfig(
        method=method, **{name: value for name, value in {**SMALL, **changes}.items() if name in own}
    )


# In loops: what each head uses, as weights of 1, and the counts.


def top(phi, k):
    """Places of the k largest."""
    return set(sorted(range(len(phi)), key=lambda i: -phi[i])[:k])


def attend(query, keys, values, used, scale):
    """Exact attention over the used rows."""
    weights = {i: math.exp(ref.score(query, keys[i], scale)) for i in used}
    return sum(weight * values[i] for i, weight in weights.items()) / sum(weights.values())


def in_loops(method, config, inputs):
    """One sequence and group: outputs ``(H, V)`` and (routing, union, suffix)."""
    queries, keys, values, scale = (inputs[name] for name in ("queries", "keys", "values", "scale"))
    suffix, teams = list(inputs["suffix"]), inputs["teams"]
    rows = range(len(keys) - len(suffix))
    if method == "oracle_rows":
        units = [[i] for i in rows]
        ranks = [[ref.score(q, keys[i], scale) for i in rows] for q in queries]
    else:
        units = [team.members for team in teams]
        phi = [ref.routing_scores(q, teams, inputs["routing_keys"], scale) for q in queries]
        exact = [
            [math.log(sum(math.exp(ref.score(q, keys[i], scale)) for i in unit)) for unit in units] for q in queries
        ]
        noisy = [[p + n for p, n in zip(*pair, strict=True)] for pair in zip(phi, inputs["noise"], strict=True)]
        ranks = {"oracle_teams": exact, "top_teams": phi, "uncorrected": noisy}[method]
    k = config.teams_per_head
    chosen = [top(rank, k) for rank in ranks]
    union = set.union(*chosen)
    if config.estimator == "pooled":
        chosen = [union] * len(queries)
    used = [[i for g in mine for i in units[g]] + suffix for mine in chosen]
    outputs = [attend(q, keys, values, mine, scale) for q, mine in zip(queries, used, strict=True)]
    routing = len(keys) if method in SCANS else len(units) if len(units) > k else 0
    return np.array(outputs), [routing, sum(len(units[g]) for g in union), len(suffix)]


def built(case, config):
    """The case with the teams that the method builds on the cache as it was at prefill."""
    mla = case.rows.values is case.rows.keys[0]
    before = Rows(case.frozen, case.frozen[0] if mla else case.rows.values[:, :, : case.prompt.shape[1]])
    (teams,) = METHODS[config.method].build([case.points], [before], case.prompt, config)
    return teams


@pytest.mark.parametrize("layout", ["mla", "gqa"])
@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
@pytest.mark.parametrize("budget", [4, 8, 16, 400])
@pytest.mark.parametrize("method", BASELINES)
def test_equals_its_loops(method, budget, estimator, layout):
    groups = 1 if layout == "mla" else 2
    case = make_case(layout, 3, groups, (37, 5, 22), suffix=3, hidden=((1, 0),), parent_size=8, representatives=2)
    config = settings(method, budget=budget, estimator=estimator, seed=0)
    step = replace(case.step, teams=built(case, config))
    output = METHODS[method].attend(step, config, None)
    for b in range(3):
        for g in range(groups):
            inputs = case.reference_inputs(b, g, 1)
            outputs, counts = in_loops(method, config, inputs)
            np.testing.assert_allclose(output.out[b, g].numpy(), outputs, rtol=2e-5, atol=2e-6)
            assert [int(part[b, g]) for part in (output.routing, output.union, output.suffix)] == counts


# Through the patch: tiny models of both layouts


@pytest.fixture(scope="module", params=["deepseek_v2-yarn", "qwen2"])
def model(request):
    return tiny_model(request.param)


@pytest.mark.parametrize("method", BASELINES)
def test_full_budget_equals_dense(model, method):
    ids, mask = padded([30, 40])
    wanted = generate(model, ids, 5, attention_mask=mask)
    with latent_santa.patch(model, settings(method, budget=4096)) as santa:
        assert_same(generate(model, ids, 5, attention_mask=mask), wanted)
        assert santa.full_calls == santa.sparse_calls == 5
        totals = santa.access.totals()
        assert totals["union"] + totals["suffix"] == totals["dense"]
        assert totals["routing"] == (totals["dense"] if method in SCANS else 0)
        santa.configure(settings(method))
        santa.reset()
        found = generate(model, ids, 5, attention_mask=mask)
        assert santa.full_calls == 0 and santa.sparse_calls == 5
        assert not found.scores[0].allclose(wanted.scores[0], atol=1e-2)


@pytest.mark.parametrize("method", BASELINES)
def test_the_ledger_is_in_the_units_of_equations_13_and_14(model, method):
    ids = prompt(41)
    with latent_santa.patch(model, settings(method)) as santa:
        generate(model, ids, 5)
        totals, mla = santa.access.totals(), santa.layout == "mla"
        groups, calls = 1 if mla else 2, 2 * 5
        assert totals["calls"] == calls
        assert totals["dense"] == 2 * groups * sum(range(41, 46))
        assert totals["suffix"] == 2 * groups * sum(range(5))
        attended = totals["union"] + totals["suffix"]
        if method in SCANS:
            unit = MLA_SCAN_UNIT if mla else GQA_SCAN_UNIT
            assert totals["routing"] == totals["dense"]
            assert santa.access.percent == (100 if mla else pytest.approx(50 + 50 * attended / totals["dense"]))
        else:
            unit = MLA_UNIT if mla else GQA_UNIT
            assert totals["routing"] == calls * groups * 11  # five parents of two teams, one of one
            parts = totals["routing"] + attended if mla else totals["routing"] + 2 * attended
            assert santa.access.percent == pytest.approx(100 * parts / totals["dense"] / (1 if mla else 2))
        assert totals["row_read"] == unit.row * attended and totals["denominator"] == unit.dense * totals["dense"]
        heads, most = 4 if mla else 2, 2 * 7 if method in TEAMS else 8  # two teams of one parent have 8 rows together
        assert calls * groups <= totals["union"] <= calls * groups * heads * most


@pytest.mark.parametrize("method", BASELINES)
def test_a_batch_is_as_alone(model, method):
    ids, mask = padded([19, 40])
    with latent_santa.patch(model, settings(method)) as santa:
        santa.sequence_keys = [3, 4]
        together = generate(model, ids, 5, attention_mask=mask)
        rows = santa.access.per_sequence()
        for b, length in enumerate((19, 40)):
            santa.reset()
            santa.sequence_keys = [3 + b]
            alone = generate(model, prompt(length, seed=b), 5)
            assert alone.sequences[0, length:].tolist() == together.sequences[b, 40:].tolist()
            for one, many in zip(alone.scores, together.scores, strict=True):
                np.testing.assert_allclose(many[b].numpy(), one[0].numpy(), rtol=1e-4, atol=1e-4)
            assert santa.access.per_sequence()[0] == {**rows[b], "sequence": 0}


@pytest.mark.parametrize("method", BASELINES)
def test_settings_that_a_method_does_not_list_change_nothing(model, method):
    other = {"estimator": "pooled", "noise": "shared", "representatives": 4, "routing": "two_stage", "seed": 5,
             "parents_per_head": 2, "draws": "systematic", "routing_dtype": "int8", "parents": "kmeans"}  # fmt: skip
    unused = {name: value for name, value in other.items() if name not in METHODS[method].settings}
    assert unused
    with latent_santa.patch(model, settings(method)) as santa:
        wanted, rows = generate(model, prompt(40), 4), santa.access.as_dict()
        santa.configure(**unused)
        santa.reset()
        assert_same(generate(model, prompt(40), 4), wanted, 0)
        assert santa.access.as_dict() == rows
        assert santa.config.grouping == settings(method).grouping


@pytest.mark.parametrize("method", BASELINES)
def test_a_second_turn_groups_what_is_new(model, method):
    """Rows of the first answer stay exact, where the method has an exact suffix, and counts follow."""
    ids = prompt(40)
    with latent_santa.patch(model, settings(method, budget=4096)) as santa:
        first = generate(model, ids, 4)
        second = torch.cat((first.sequences, prompt(20, seed=8)), 1)
        found = generate(model, second, 4, cache=cache_of(first))
        assert santa.full_calls == santa.sparse_calls
    assert_same(found, generate(model, second, 4))


def test_uncorrected_reads_what_santapp_reads(model):
    """The same draws: equal counts on the first step, whose rows do not depend on the estimate before it."""
    ids = prompt(40)
    for estimator in ("per_head", "pooled"):
        with latent_santa.patch(model, settings("uncorrected", estimator=estimator, seed=4)) as santa:
            found, counts = generate(model, ids, 1), santa.access.per_layer()[0]
            santa.configure(method="santa++")
            santa.reset()
            other = generate(model, ids, 1)
            assert santa.access.per_layer()[0] == counts
            assert not other.scores[0].allclose(found.scores[0], atol=1e-3)


def test_names_and_slugs_tell_them_apart():
    configs = [settings(method) for method in BASELINES]
    assert set(BASELINES) <= set(choices()["method"])
    assert [label(config) for config in configs] == [
        "oracle_rows S=8",
        "oracle_teams contiguous 8/2 per head S=8",
        "top_teams contiguous 8/2 per head S=8",
        "uncorrected contiguous 8/2 per head S=8",
    ]
    assert slug(configs[1]) == "oracle_teams_contiguous_8-2_per_head_s8"
    assert len({slug(config) for config in configs}) == len(configs)
