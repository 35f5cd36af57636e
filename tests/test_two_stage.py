"""Two-stage routing: its law, its reference in loops, its exact limits and its counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import latent_santa
from latent_santa import naive as ref
from latent_santa import naive_two_stage as ref2
from latent_santa import two_stage
from latent_santa.estimator import dense_attention, sampled_attention
from latent_santa.parent_records import summarised
from latent_santa.parents import contiguous_parents
from latent_santa.routing_keys import quantise_parts
from latent_santa.rows import Rows
from latent_santa.step import Sampling
from latent_santa.two_stage import select_teams

from .cases import _array, _joined, make_case, reference_noise
from .test_unbiased import DRAWS, one_hot, repeat, sums
from .tiny_models import assert_close, assert_same, cache_of, generate, padded, prompt, tiny_model

SUMMARIES = ["mean", "isotropic", "diagonal"]
LAYOUTS = ["mla", "gqa"]
COMBINED = [("per_head", "independent"), ("pooled", "independent"), ("pooled", "shared")]


def with_parents(case, summary="mean", parents=None):
    """The case with records of its parents, contiguous ones unless given."""
    length, groups = case.prompt.shape[1], case.step.groups
    if parents is None:
        parents = contiguous_parents(case.prompt, case.parent_size).expand(-1, groups, -1)
    before = Rows(case.frozen, case.rows.values[:, :, :length])
    records = summarised(case.teams, parents, before, summary)
    return replace(case, teams=replace(case.teams, parents=records))


def two_stages(k1, k2, estimator="per_head", noise="independent"):
    return Sampling(k2, estimator, noise, k1)


# the law


def worst_z(case, sampling):
    """The largest |z| of the mean sums against the dense ones, over heads and coordinates."""
    out, shift = dense_attention(case.query, case.rows, None, case.scale)
    expected = torch.cat((out.double(), torch.ones_like(shift).double()[..., None]), -1)[0]
    many = repeat(case)
    found = sums(sampled_attention(replace(many.step, visible=None), sampling), shift)
    error = (found.mean(0) - expected).abs()
    assert bool(found.std(0).max() > 0.01)  # something was sampled
    return float(((error - 1e-6).clamp_min(0) / (found.std(0) / DRAWS**0.5 + 1e-9)).max())


def law_case(layout, summary):
    case = make_case(layout, heads=3, lengths=(30,), suffix=2, parent_size=6, representatives=3, seed=22, scale=0.4)
    return with_parents(case if layout == "mla" else one_hot(case), summary)


COMBINATIONS = [("mean", "independent"), ("mean", "shared"), ("isotropic", "independent"), ("diagonal", "shared")]


@pytest.mark.parametrize("summary, noise", COMBINATIONS)
@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_sums_are_unbiased(layout, estimator, noise, summary):
    """U and Z over many draws, with both stages sampling. Up to 99 coordinates, so 5 is far out."""
    assert worst_z(law_case(layout, summary), two_stages(3, 4, estimator, noise)) < 5


@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
@pytest.mark.parametrize("k1, k2", [(2, 100), (100, 4)])
def test_one_stage_alone_is_unbiased_too(estimator, k1, k2):
    assert worst_z(law_case("gqa", "mean"), two_stages(k1, k2, estimator)) < 5


@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_coded_means_stay_unbiased(estimator, bits):
    """Corrections use the coarse scores too; parents' means and representatives are coded alike."""
    case = law_case("gqa", "mean")
    pad = torch.nn.functional.pad
    wide = replace(case, query=tuple(pad(q, (0, 10)) for q in case.query))
    keys = tuple(pad(k, (0, 10)) for k in case.rows.keys)
    wide = replace(wide, rows=Rows(keys, case.rows.values), frozen=tuple(pad(k, (0, 10)) for k in case.frozen))
    routing = tuple(replace(part, codes=pad(part.codes, (0, 10))) for part in case.teams.routing_keys)
    wide = with_parents(replace(wide, teams=replace(wide.teams, routing_keys=routing)))
    teams, parents = wide.teams, wide.teams.parents
    parents = replace(parents, keys=quantise_parts(parents.keys, bits, parents.sizes > 0))
    teams = replace(teams, routing_keys=quantise_parts(teams.routing_keys, bits, teams.sizes > 0), parents=parents)
    assert worst_z(replace(wide, teams=teams), two_stages(3, 4, estimator)) < 5


@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
@pytest.mark.parametrize("forgotten", ["first", "second"])
def test_a_forgotten_correction_shows(monkeypatch, estimator, forgotten):
    """The bound has power: without either stage's correction it is missed."""
    real, calls = two_stage.select, []

    def select(phi, *args):
        picked = real(phi, *args)
        calls.append(phi.shape[-1])
        if (len(calls) % 2 == 1) == (forgotten == "first"):
            return replace(picked, log_correction=torch.where(picked.log_correction < torch.inf, 0.0, torch.inf))
        return picked

    monkeypatch.setattr(two_stage, "select", select)
    assert worst_z(law_case("gqa", "mean"), two_stages(3, 4, estimator)) > 8


def test_inclusion_frequencies():
    """Of parents, and of teams given their parents: an independent float64 simulation of the same two races."""
    case, k1, k2 = law_case("gqa", "isotropic"), 2, 3
    many = repeat(case, 20000)
    picked = select_teams(replace(many.step, visible=None), two_stages(k1, k2))
    found = (picked.log_correction < torch.inf).double().mean(0)[0]  # (H, M)
    parents = case.teams.parents
    owner = parents.of_team[0, 0].long()
    phi = parents.routing_scores(tuple(q.double() for q in case.query), case.scale)[0, 0]
    s = two_stage.routing_scores(tuple(q.double() for q in case.query), case.teams, case.scale)[0, 0]
    generator = torch.Generator().manual_seed(5)

    def gumbel(*shape):
        return -(-torch.rand(*shape, dtype=torch.float64, generator=generator).log()).log()

    draws = 40000
    for h in range(3):
        noisy = phi[h] + gumbel(draws, parents.C)
        tau = noisy.topk(k1 + 1).values[:, -1:]
        c = -torch.expm1(-(phi[h] - tau).exp())
        inside = (noisy > tau)[:, owner]
        psi = torch.where(inside, s[h] - c.log()[:, owner], -torch.inf)
        race = psi + gumbel(draws, len(owner))
        chosen = (race >= race.topk(k2).values[:, -1:]) & inside
        wanted = chosen.double().mean(0)
        error = (wanted * (1 - wanted) * (1 / draws + 1 / 20000)).sqrt()
        assert bool(((found[h] - wanted).abs() <= 4.5 * error + 1e-9).all())


# the reference in loops


def reference(case, b, g, k1, k2, estimator, noise, summary):
    """One sequence and group, from its rows alone."""
    real = case.prompt[b].nonzero()[:, 0].tolist()
    place = range(case.suffix.index.numel())
    seen = [e for e in place if case.suffix.visible is None or bool(case.suffix.visible[b, e])]
    order = real + [int(case.suffix.index[e]) for e in seen]
    formed = ref.contiguous_parents(len(real), case.parent_size)
    teams = ref.build_teams(_array(case.points[b, g])[real], formed, case.representatives)
    frozen = [_array(part[b, g])[real] for part in case.frozen]
    joined = np.concatenate(frozen, -1)
    owner = {i: p for p, rows in enumerate(formed) for i in rows}
    parents = [[t for t, team in enumerate(teams) if owner[team.members[0]] == p] for p in range(len(formed))]
    queries = _joined(case.query, b, g)
    split = [[_array(part[b, g])[h] for part in case.query] for h in range(len(queries))]
    scores = []
    for h, query in enumerate(queries):
        row = []
        for rows in formed:
            mean, spread = ref2.summarise([part[rows] for part in frozen], summary)
            mu = np.concatenate([m.astype(np.float32) for m in mean])
            phi = np.log(len(rows)) + ref.score(query, mu, case.scale)
            row.append(phi + ref2.delta(split[h], spread, summary, case.scale))
        scores.append(row)
    shared = noise == "shared"
    parent_draw = replace(case.draw, layer=case.draw.layer + ref2.PARENTS)
    return ref2.two_stage_group(
        queries, _joined(case.rows.keys, b, g)[order], _array(case.rows.values[b, g])[order], teams,
        [joined[team.representative] for team in teams], parents, scores, range(len(real), len(order)), case.scale,
        k1, k2, reference_noise(parent_draw, b, g, len(queries), len(parents), shared),
        reference_noise(case.draw, b, g, len(queries), len(teams), shared), estimator, shared,
        2 if summary == "diagonal" else 1,
    )  # fmt: skip


@pytest.mark.parametrize("summary", SUMMARIES)
@pytest.mark.parametrize("estimator, noise", COMBINED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reference_in_loops(layout, estimator, noise, summary):
    """A padded batch, in which one sequence has K1 parents or fewer, another K2 teams or fewer in its parents."""
    groups = 1 if layout == "mla" else 2
    case = make_case(
        layout, heads=3, groups=groups, lengths=(41, 9, 26, 17), suffix=3, hidden=((1, 0),), parent_size=4,
        representatives=2,
    )  # fmt: skip
    case = with_parents(case, summary)
    for k1, k2 in ((3, 4), (2, 9), (5, 2), (7, 3)):
        output = sampled_attention(case.step, two_stages(k1, k2, estimator, noise))
        for b in range(4):
            for g in range(groups):
                want = reference(case, b, g, k1, k2, estimator, noise, summary)
                np.testing.assert_allclose(output.out[b, g].numpy(), want.outputs, rtol=2e-4, atol=2e-5)
                found = tuple(int(getattr(output, name)[b, g]) for name in ("routing", "union", "suffix"))
                assert found == want.counts[:3]


@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exact_limits(layout, estimator):
    case = with_parents(make_case(layout, heads=3, lengths=(41, 26), suffix=3))
    exact, lse = dense_attention(case.query, case.rows, case.step.visible, case.scale)
    everything = sampled_attention(case.step, two_stages(11, 100, estimator))
    torch.testing.assert_close(everything.out, exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(everything.lse, lse, rtol=1e-5, atol=1e-5)
    assert int(everything.routing.sum()) == 0
    # all parents: one stage, to the bit
    one, both = (sampled_attention(case.step, s) for s in (Sampling(3, estimator), two_stages(11, 3, estimator)))
    assert one.out.equal(both.out) and one.lse.equal(both.lse) and one.routing.equal(both.routing)
    # all teams of the sampled parents: only parents are scored
    parents = sampled_attention(case.step, two_stages(2, 100, estimator))
    assert parents.routing.equal(case.teams.parents.count.long())


def test_nothing_is_scored_or_drawn_where_a_stage_takes_all(monkeypatch):
    case = with_parents(make_case("gqa", heads=2, lengths=(41,)))
    drawn = []
    monkeypatch.setattr("latent_santa.step.gumbel_noise", lambda *args: drawn.append(args[2]) or pytest.fail("drawn"))
    monkeypatch.setattr("latent_santa.parent_records.key_scores", lambda *args: pytest.fail("parents were scored"))
    monkeypatch.setattr("latent_santa.two_stage.key_scores", lambda *args: pytest.fail("teams were scored"))
    sampled_attention(case.step, two_stages(11, 100))
    monkeypatch.undo()
    monkeypatch.setattr("latent_santa.two_stage.key_scores", lambda *args: pytest.fail("teams were scored"))
    sampled_attention(case.step, two_stages(2, 100))


def test_a_sequence_without_a_real_row():
    case = with_parents(make_case("mla", heads=3, lengths=(40, 0, 9)))
    output = sampled_attention(case.step, two_stages(3, 2, "pooled"))
    assert bool((output.out[1] == 0).all()) and int(output.routing[1, 0]) == int(output.union[1, 0]) == 0
    assert bool(output.out.isfinite().all())


@pytest.mark.parametrize("noise", ["independent", "shared"])
def test_listed_draws_are_those_of_all_teams(monkeypatch, noise):
    """Taken out of all teams' noise or drawn alone: the same numbers, so sizes decide about time only."""
    case = with_parents(make_case("gqa", heads=6, groups=2, lengths=(90, 57)))
    outputs = []
    for many in (0, 1 << 60):
        monkeypatch.setattr("latent_santa.step.MANY_DRAWS", many)
        outputs.append(sampled_attention(case.step, two_stages(1, 4, "pooled", noise)))
    assert 2 * 6 * 2 < case.teams.M  # so that drawing alone is less
    assert outputs[0].out.equal(outputs[1].out) and outputs[0].union.equal(outputs[1].union)


# records


@pytest.mark.parametrize("summary", SUMMARIES)
def test_records_of_parents(summary):
    """Means, spreads and sizes from their definition; k-means leaves parents out, whose numbers close up."""
    case = make_case("mla", lengths=(21, 13), parent_size=4)
    labels = contiguous_parents(case.prompt, 4)
    labels = torch.where(labels >= 2, labels + 3, labels)  # parents 2, 3 and 4 are empty
    case = with_parents(case, summary, labels)
    records = case.teams.parents
    for b, length in enumerate((21, 13)):
        first = 21 - length
        rows = [list(range(first + 4 * p, min(first + 4 * p + 4, 21))) for p in range((length + 3) // 4)]
        assert int(records.count[b, 0]) == len(rows)
        assert records.sizes[b, 0].tolist() == [len(r) for r in rows] + [0] * (records.C - len(rows))
        owner = {row: p for p, r in enumerate(rows) for row in r}
        for team in range(int(case.teams.count[b, 0])):
            members = (case.teams.team_of_row[b, 0] == team).nonzero()[:, 0].tolist()
            assert {owner[row] for row in members} == {int(records.of_team[b, 0, team])}
        for i, part in enumerate(case.frozen):
            for p, r in enumerate(rows):
                mean, spread = ref2.summarise([_array(part[b, 0])[r]], summary)
                np.testing.assert_allclose(records.keys[i].float()[b, 0, p], mean[0], rtol=1e-5, atol=1e-6)
                if summary != "mean":
                    np.testing.assert_allclose(records.spread[i][b, 0, p], spread[0], rtol=1e-4, atol=1e-5)
    assert records.most_teams == 2 and records.bytes() < case.teams.bytes()
    picked = case.teams.select_batch(torch.tensor([1, 1, 0])).parents
    assert picked.sizes.equal(records.sizes[[1, 1, 0]]) and picked.keys[0].codes.shape[0] == 3


# models

SETTINGS = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 16, "routing": "two_stage"}


@pytest.fixture(scope="module", params=["deepseek_v2-yarn", "qwen2"])
def model(request):
    return tiny_model(request.param)


@pytest.mark.parametrize("parents", ["contiguous", "kmeans"])
@pytest.mark.parametrize("summary", SUMMARIES)
def test_generation(model, parents, summary):
    """Padded batches give what each prompt gives alone, and both budgets full give dense attention."""
    ids, mask = padded([33, 61])
    options = {**SETTINGS, "parents": parents, "parent_summary": summary, "estimator": "pooled"}
    wanted = generate(model, ids, 4, attention_mask=mask)
    with latent_santa.patch(model, **options, parents_per_head=2) as santa:
        santa.sequence_keys = [5, 6]
        found = generate(model, ids, 4, attention_mask=mask)
        rows = santa.access.per_sequence()
        for b, length in enumerate((33, 61)):
            santa.sequence_keys = [5 + b]
            santa.reset()
            alone = generate(model, ids[b : b + 1, 61 - length :], 4)
            assert alone.sequences[0, length:].equal(found.sequences[b, 61:])
            assert_close([s[0] for s in alone.scores], [s[b] for s in found.scores])
            assert {**santa.access.per_sequence()[0], "sequence": b} == rows[b]
        santa.sequence_keys = None
        assert santa.full_calls == 0
        santa.configure(parents_per_head=100, budget=4096)
        assert_same(generate(model, ids, 4, attention_mask=mask), wanted)
        assert santa.full_calls == 4


def test_the_ledger_counts_both_stages(model):
    with latent_santa.patch(model, **SETTINGS, parents_per_head=2, parent_summary="diagonal") as santa:
        generate(model, prompt(80), 1)
        groups = 1 if santa.layout == "mla" else 2
        totals = santa.access.totals()
        scored = 2 * 10 * santa.layers * groups  # ten parents, two vectors each
        heads = 4 // groups
        assert scored + 4 * santa.layers * groups <= totals["routing"] <= scored + 2 * 2 * heads * santa.layers * groups
        per_vector = (totals["bytes"] - totals["union"] * (totals["dense_bytes"] // totals["dense"])) / totals[
            "routing"
        ]
        assert per_vector == (4 * 24 if santa.layout == "mla" else 4 * 8)


def test_turns_join_their_parents(model):
    """A further turn's parents follow the first one's; at full budget the model is dense on both."""
    first, turn = prompt(40), prompt(30, seed=3)
    plain = generate(model, first, 3)
    wanted = generate(model, torch.cat((plain.sequences, turn), 1), 4, cache=cache_of(plain))
    for settings in ({"parents_per_head": 100, "budget": 4096}, {"parents_per_head": 3}):
        for dtype in ("model", "int8") if model.config.model_type == "deepseek_v2" else ("model",):
            with latent_santa.patch(model, **{**SETTINGS, **settings, "routing_dtype": dtype, "regroup_after": 0}):
                told = generate(model, first, 3)
                found = generate(model, torch.cat((told.sequences, turn), 1), 4, cache=cache_of(told))
                for layer in cache_of(found).layers:
                    teams, parents = layer.grouped.teams, layer.grouped.teams.parents
                    # the turn's call brings the last generated token too
                    assert int(parents.count.max()) == 5 + 4 and int(parents.sizes.sum(-1).max()) == 40 + 31
                    owner = parents.of_team.gather(2, teams.team_of_row.long().clamp_min(0))
                    assert owner[0, 0, :40].tolist() == [i // 8 for i in range(40)]
                    assert owner[0, 0, 42:].tolist() == [5 + i // 8 for i in range(31)]
                    assert (teams.team_of_row[0, 0, 40:42] == -1).all()
            if "budget" in settings:
                assert_same(found, wanted)


def test_beams_and_samples(model):
    with latent_santa.patch(model, **SETTINGS, parents_per_head=3) as santa:
        output = generate(model, prompt(60), 6, num_beams=3)
        assert cache_of(output).layers[0].grouped.teams.parents.sizes.shape[0] == 3
        assert santa.sparse_calls == 6
        assert "two-stage routing (K1=3, mean)" in " ".join(santa.report().split())


def test_settings():
    base = latent_santa.SantaConfig(routing="two_stage")
    assert base.grouping != base.with_overrides(parent_summary="diagonal").grouping
    assert base.grouping == base.with_overrides(parents_per_head=3).grouping
    one = latent_santa.SantaConfig()
    assert one.grouping == one.with_overrides(parent_summary="diagonal").grouping != base.grouping
    with pytest.raises(ValueError, match="parents_per_head=0: must be at least 1"):
        latent_santa.SantaConfig(parents_per_head=0)
    with pytest.raises(ValueError, match="routing='three_stage'"):
        latent_santa.SantaConfig(routing="three_stage")
