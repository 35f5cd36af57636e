"""The baselines, each against loops in numpy on random padded rows, against dense at full budget, and in the ledger."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch

import latent_santa
from latent_santa import naive as ref
from latent_santa.access import GQA_SCAN_UNIT, GQA_UNIT, MLA_SCAN_UNIT, MLA_UNIT
from latent_santa.config import choices
from latent_santa.eval.run.conditions import label, slug
from latent_santa.methods import METHODS
from latent_santa.rows import Rows, scores

from .cases import make_case
from .tiny_models import assert_same, cache_of, generate, padded, prompt, tiny_model

SCANS = ("oracle_rows", "oracle_teams")
TEAMS = ("oracle_teams", "top_teams", "uncorrected")
PAGES = ("quest", "page_mean", "rope_blocks")
TOGETHER = (
    "page_mean",
    "rope_blocks",
    "infllm",
    "sparq",
    "streaming_llm",
    "tova",
)  # the heads of a group choose together
KEPT = ("snapkv", "tova", "h2o")
ASKED = (*KEPT, "infllm")  # of the prompt's queries; in loops in test_kept_rows.py
BASELINES = ("oracle_rows", *TEAMS, *PAGES, "sparq", "streaming_llm", *ASKED)
# a budget at which tiny prompts leave rows out
SMALL = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 8}


def settings(method, **changes):
    """The small settings that the method has, with some changed."""
    own = METHODS[method].settings
    if method in (*PAGES, "infllm"):
        changes = {"parent_size": 4, **changes}
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


def page_ranks(method, queries, pages, frozen, scale):
    """What each head ranks pages by."""
    if method == "rope_blocks":
        rotary = 3 if len(queries[0]) == 8 else 6  # of the MLA cases' 5 + 3 numbers; all in GQA
        queries, frozen = queries[:, -rotary:], frozen[:, -rotary:]
    if method != "quest":
        means = [np.mean([frozen[i] for i in page], 0) for page in pages]
        return [[np.mean([ref.score(q, mean, scale) for q in queries]) for mean in means]] * len(queries)
    ranks = []
    for query in queries:
        bounds = []
        for page in pages:
            per_dimension = zip(query, frozen[page].min(0), frozen[page].max(0), strict=True)
            bounds.append(scale * sum(max(q * low, q * high) for q, low, high in per_dimension))
        ranks.append(bounds)
    return ranks


def first_and_recent(budget, inputs):
    """StreamingLLM of one sequence and group."""
    queries, keys, values, scale = (inputs[name] for name in ("queries", "keys", "values", "scale"))
    places = range(len(keys))
    used = [i for i in places if i < 4 or i >= len(keys) - (budget - 4)]
    exact = len(set(used) & set(inputs["suffix"]))
    return np.array([attend(q, keys, values, used, scale) for q in queries]), [0, len(used) - exact, exact]


def by_large_dimensions(budget, inputs):
    """SparQ of one sequence and group."""
    queries, keys, values, scale = (inputs[name] for name in ("queries", "keys", "values", "scale"))
    suffix, prompt = list(inputs["suffix"]), len(keys) - len(inputs["suffix"])
    if prompt <= budget:
        outputs = [attend(q, keys, values, range(len(keys)), scale) for q in queries]
        return np.array(outputs), [0, prompt, len(suffix)]
    dims = sorted(top(np.abs(queries).sum(0), keys.shape[1] // 4))
    rough = []
    for query in queries:
        covered = sum(abs(query[d]) for d in dims) / sum(abs(query))
        rough.append([scale * sum(query[d] * key[d] for d in dims) / math.sqrt(covered) for key in keys])
    kept = top(np.sum(rough, 0)[:prompt], budget) | set(suffix)
    outputs = []
    for query, own in zip(queries, rough, strict=True):
        mass = np.exp(own)
        a = sum(mass[i] for i in kept) / mass.sum()
        outputs.append(a * attend(query, keys, values, kept, scale) + (1 - a) * values.mean(0))
    parts = math.ceil(keys.shape[1] / len(dims))  # in which the mean value is counted
    return np.array(outputs), [len(keys) + parts, budget, len(suffix)]


def in_loops(method, config, inputs, frozen):
    """One sequence and group: outputs ``(H, V)`` and (routing, union, suffix); ``frozen`` are the keys at prefill."""
    if method == "sparq":
        return by_large_dimensions(config.budget, inputs)
    if method == "streaming_llm":
        return first_and_recent(config.budget, inputs)
    queries, keys, values, scale = (inputs[name] for name in ("queries", "keys", "values", "scale"))
    suffix, teams = list(inputs["suffix"]), inputs["teams"]
    rows = range(len(keys) - len(suffix))
    if method == "oracle_rows":
        units = [[i] for i in rows]
        ranks = [[ref.score(q, keys[i], scale) for i in rows] for q in queries]
    elif method in PAGES:
        units = ref.contiguous_parents(len(rows), config.parent_size)
        ranks = page_ranks(method, queries, units, frozen, scale)
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
    scored = len(units) * (2 if method == "quest" else 1) if len(units) > k else 0
    routing = len(keys) if method in SCANS else scored
    return np.array(outputs), [routing, sum(len(units[g]) for g in union), len(suffix)]


def built(case, config):
    """The case with the teams that the method builds on the cache as it was at prefill."""
    mla = case.rows.values is case.rows.keys[0]
    before = Rows(case.frozen, case.frozen[0] if mla else case.rows.values[:, :, : case.prompt.shape[1]])
    (teams,) = METHODS[config.method].build([case.points], [before], case.prompt, config)
    return teams


def runs():
    """Every baseline at budgets from one unit to all rows, pooled too where it has a choice."""
    for method, budget in product((name for name in BASELINES if name not in ASKED), (4, 8, 16, 400)):
        yield method, max(budget, 5) if method == "streaming_llm" else budget, "per_head"
        if "estimator" in METHODS[method].settings:
            yield method, budget, "pooled"


@pytest.mark.parametrize("layout", ["mla", "gqa"])
@pytest.mark.parametrize(("method", "budget", "estimator"), list(runs()))
def test_equals_its_loops(method, budget, estimator, layout):
    groups = 1 if layout == "mla" else 2
    case = make_case(layout, 3, groups, (37, 5, 22), suffix=3, hidden=((1, 0),), parent_size=8, representatives=2)
    config = settings(method, budget=budget, estimator=estimator, seed=0)
    step = replace(case.step, teams=built(case, config))
    output = METHODS[method].attend(step, config, None)
    for b in range(3):
        for g in range(groups):
            frozen = np.concatenate([part[b, g].double().numpy() for part in case.frozen], -1)[case.prompt[b].numpy()]
            outputs, counts = in_loops(method, config, case.reference_inputs(b, g, 1), frozen)
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
            assert santa.access.percent_bound == 100 * attended / totals["dense"] < 100
            assert f"{santa.access.percent_bound:.2f}" in santa.report() and "bound" in santa.report()
            assert santa.access.percent == (100 if mla else pytest.approx(50 + 50 * attended / totals["dense"]))
        else:
            unit = MLA_UNIT if mla else GQA_UNIT
            # five parents of two teams and one of one; eleven pages; every row, and a mean value in four parts
            scored = {"quest": 22, "streaming_llm": 0, **dict.fromkeys(KEPT, 0)}.get(method, 11)
            every = totals["dense"] + 4 * calls * groups
            assert totals["routing"] == (every if method == "sparq" else calls * groups * scored)
            key, row = (96, 96) if mla else (32, 64)
            share = Fraction(1, 3) if mla and method == "rope_blocks" else 1  # 8 rotary numbers of 24
            share = Fraction(1, 4) if method == "sparq" else share
            assert totals["bytes"] == totals["routing"] * key * share + attended * row
            assert santa.access.percent_bound == santa.access.percent_without_routing and "bound" not in santa.report()
            assert totals["routing_read"] == pytest.approx(float(share * totals["routing"]), rel=1e-15)
            parts = totals["routing_read"] + attended * unit.row
            assert santa.access.percent == pytest.approx(100 * parts / totals["dense"] / (1 if mla else 2))
        assert totals["row_read"] == unit.row * attended and totals["denominator"] == unit.dense * totals["dense"]
        most = 2 * 7 if method in TEAMS else 8  # of two teams of one parent, one has at most seven rows
        assert (
            calls * groups <= totals["union"] <= calls * groups * most * (1 if method in TOGETHER else 4 if mla else 2)
        )


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
def test_a_second_turn_groups_what_is_new(model, method):
    """Rows of the first answer stay exact, where the method has an exact suffix, and counts follow."""
    ids = prompt(40)
    with latent_santa.patch(model, settings(method, budget=4096)) as santa:
        first = generate(model, ids, 4)
        second = torch.cat((first.sequences, prompt(20, seed=8)), 1)
        found = generate(model, second, 4, cache=cache_of(first))
        assert santa.full_calls == santa.sparse_calls
    assert_same(found, generate(model, second, 4))


@pytest.mark.parametrize("layout", ["mla", "gqa"])
def test_quest_bounds_every_score_of_a_page(layout):
    config = settings("quest")
    case = make_case(layout, 3, 1 if layout == "mla" else 2, (37, 5, 22))
    pages = built(case, config)
    bound = METHODS["quest"].page_scores(case.step, pages, config)
    s = scores(case.query, case.frozen, case.scale)
    place = pages.team_of_row.long()[:, :, None].expand_as(s)
    of_row = bound.gather(-1, place.clamp_min(0))
    assert bool((of_row >= s - 1e-5)[place >= 0].all())
    # a page of one row has that row's score: the last page of 37 and of 5 rows
    assert bool(((pages.sizes == 1).sum(-1)[:2] == 1).all())
    for b in range(2):
        assert of_row[b, ..., -1].allclose(s[b, ..., -1], atol=1e-5)


def test_streaming_llm_drops_generated_rows_too(model):
    with latent_santa.patch(model, method="streaming_llm", budget=7) as santa:
        generate(model, prompt(40), 6)
        groups = 1 if santa.layout == "mla" else 2
        # a window of three rows: four sinks and three, two, one and no more prompt rows
        assert [step["union"] for step in santa.access.per_step()] == [2 * groups * n for n in (7, 6, 5, 4, 4, 4)]
        assert [step["suffix"] for step in santa.access.per_step()] == [2 * groups * n for n in (0, 1, 2, 3, 3, 3)]
        assert santa.access.percent == pytest.approx(100 * 7 * 6 / sum(range(40, 46)))


@pytest.mark.parametrize("method", [*TEAMS[1:], *PAGES])
def test_integer_codes_rank_nearly_as_keys_do(model, method):
    """At eight bits most choices stay, so the answer moves by far less than the method itself moves it."""
    ids = prompt(40)
    dense = generate(model, ids, 1).scores[0]
    with latent_santa.patch(model, settings(method, routing_dtype="int8")) as santa:
        coded, rows = generate(model, ids, 1).scores[0], santa.access.totals()
        santa.configure(routing_dtype="model")
        santa.reset()
        plain, wide = generate(model, ids, 1).scores[0], santa.access.totals()
    assert rows["routing"] == wide["routing"] and rows["bytes"] < wide["bytes"]
    assert (coded - plain).norm() < 0.5 * (plain - dense).norm()


@pytest.mark.parametrize(
    ("method", "budget", "rule"),
    [("quest", 3, "quest selects floor(S / P) pages, so S must be at least P = parent_size = 4"),
     ("page_mean", 3, "page_mean selects floor(S / P) pages, so S must be at least P = parent_size = 4"),
     ("rope_blocks", 3, "rope_blocks selects floor(S / P) pages, so S must be at least P = parent_size = 4"),
     ("streaming_llm", 4, "S must be more than 4"),
     ("infllm", 7, "S must be at least 2 P = 8"),
     ("snapkv", 1, "snapkv keeps last rows and others, so S is at least 2"),
     ("h2o", 1, "h2o keeps last rows and others, so S is at least 2")],
)  # fmt: skip
def test_budgets_that_select_nothing_are_refused(method, budget, rule):
    with pytest.raises(ValueError) as error:
        settings(method, budget=budget)
    assert str(error.value).startswith(f"budget={budget}: ") and rule in str(error.value)


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
        "quest B=4 S=8",
        "page_mean B=4 S=8",
        "rope_blocks B=4 S=8",
        "sparq S=8",
        "streaming_llm S=8",
        "snapkv S=8",
        "tova S=8",
        "h2o S=8",
        "infllm B=4 S=8",
    ]
    assert slug(configs[1]) == "oracle_teams_contiguous_8-2_per_head_s8"
    assert len({slug(config) for config in configs}) == len(configs)
