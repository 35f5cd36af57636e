"""What patched layers hand to the estimator and write in the ledger, recomputed from the float64 reference."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

import latent_santa
from latent_santa import naive as ref
from latent_santa import naive_noise
from latent_santa.backends import BACKENDS, TorchBackend
from latent_santa.noise import noise_keys
from latent_santa.rows import Rows
from latent_santa.step import DecodeStep, Output, Sampling

from .cases import team_lists
from .tiny_models import cache_of, generate, padded, prompt, tiny_model

SMALL = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 16}
LENGTHS = [19, 40]
COUNTS = ("routing", "union", "suffix", "dense")


class Noted(NamedTuple):
    step: DecodeStep
    sampling: Sampling
    output: Output


@pytest.fixture(scope="module", params=["deepseek_v2-yarn", "qwen2"])
def model(request):
    return tiny_model(request.param)


@pytest.fixture
def calls(monkeypatch):
    """Arguments and outputs of every sampled call, taken at the seam between a model's layer and the estimator."""
    noted = []

    class Recording(TorchBackend):
        def sampled_attention(self, step, sampling):
            output = super().sampled_attention(step, sampling)
            keys = tuple(part.clone() for part in step.rows.keys)  # copies, as later calls write rows in place
            noted.append(Noted(replace(step, rows=Rows(keys, step.rows.values.clone())), sampling, output))
            return output

    monkeypatch.setitem(BACKENDS, "torch", Recording)
    return noted


def reference_output(call, b, g, seed, sequence_key, estimator, shared):
    """Algorithm 1 for one sequence and group, from the call's team records, rows and query alone."""
    step, teams, suffix, draw = call.step, call.step.teams, call.step.suffix, call.step.draw
    query, keys = torch.cat(step.query, -1), torch.cat(step.rows.keys, -1)
    values = step.rows.values
    records = [ref.Team(*record) for record in team_lists(teams, b, g)]
    routing_keys = torch.cat([part.codes for part in teams.routing_keys], -1)[b, g].double().numpy()[: len(records)]
    exact = suffix.index.tolist()
    if suffix.visible is not None:
        exact = [i for i, seen in zip(exact, suffix.visible[b].tolist(), strict=True) if seen]
    heads = query.shape[2]
    seen = sum(len(team.members) for team in records) + len(exact)
    key = noise_keys(seed, [sequence_key], "cpu")[0].tolist()
    noise = [
        [naive_noise.gumbel(key, seen, draw.layer, g, h, t, shared) for t in range(len(records))] for h in range(heads)
    ]
    result = ref.attention_group(
        query[b, g].double().numpy(),
        keys[b, g].double().numpy(),
        values[b, g].double().numpy(),
        records,
        routing_keys,
        exact,
        step.scale,
        4,
        np.array(noise),
        estimator,
        shared,
    )
    return result, records, exact


@pytest.mark.parametrize("apart", [(0, 0), (3, 5)], ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["independent", "shared"])
@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
def test_every_number_is_recomputed_from_the_teams(model, calls, estimator, shared, apart):
    """Also with a sequence's first and last rows out of the teams, wherever padding moves the first ones."""
    ids, mask = padded(LENGTHS)
    noise = "shared" if shared else "independent"
    kept = dict(zip(("exact_first", "exact_last"), apart, strict=True))
    with latent_santa.patch(model, **SMALL, **kept, estimator=estimator, noise=noise, seed=9) as santa:
        santa.sequence_keys = [5, 6]
        output = generate(model, ids, 3, attention_mask=mask)
        per_step, per_layer = santa.access.per_step(), santa.access.per_layer()
        per_sequence, totals = santa.access.per_sequence(), santa.access.totals()
    groups = calls[0].step.groups
    assert len(calls) == 6 and [call.step.draw.layer for call in calls] == [0, 1] * 3
    wanted = np.zeros((3, 2, 2, groups, 4), dtype=int)  # step, layer, sequence, group, count
    for number, call in enumerate(calls):
        step, layer = divmod(number, 2)
        assert call.step.teams is cache_of(output).layers[layer].grouped.teams
        for b, length in enumerate(LENGTHS):
            first = 40 - length
            for g in range(groups):
                result, records, exact = reference_output(call, b, g, 9, 5 + b, estimator, shared)
                assert sorted(i for team in records for i in team.members) == list(
                    range(first + apart[0], 40 - apart[1])
                )
                assert exact == [*range(first, first + apart[0]), *range(40 - apart[1], 40 + step)]
                assert result.counts.dense == length + step
                wanted[step, layer, b, g] = result.counts
                np.testing.assert_allclose(call.output.out[b, g].numpy(), result.outputs, rtol=2e-4, atol=2e-5)
                np.testing.assert_allclose(call.output.lse[b, g].numpy(), result.lse, rtol=1e-5, atol=2e-5)
    assert [[entry[name] for name in COUNTS] for entry in per_step] == wanted.sum((1, 2, 3)).tolist()
    assert [[entry[name] for name in COUNTS] for entry in per_layer] == wanted.sum((0, 2, 3)).tolist()
    assert [[entry[name] for name in COUNTS] for entry in per_sequence] == wanted.sum((0, 1, 3)).tolist()
    assert [totals[name] for name in COUNTS] == wanted.sum((0, 1, 2, 3)).tolist()
    every = [tuple(counts) for counts in wanted.reshape(-1, 4)]
    percent = ref.access_mla(every) if santa.layout == "mla" else ref.access_gqa(every)
    assert santa.access.percent == pytest.approx(percent)


def test_teams_are_algorithm_2_on_the_cached_rows(model):
    """Latents without the rotary part in MLA, rotated keys a KV head in GQA."""
    ids, mask = padded(LENGTHS)
    with latent_santa.patch(model, **SMALL):
        layers = cache_of(generate(model, ids, 2, attention_mask=mask)).layers
    layer = layers[0]  # its rows depend on no attention, so the replay left the last one as it was
    teams = layer.grouped.teams
    for b, length in enumerate(LENGTHS):
        for g in range(layer.keys.shape[1]):
            points = layer.keys[b, g, 40 - length : 40].double().numpy()
            wanted = ref.build_teams(points, ref.contiguous_parents(length, 8), 2)
            found = sorted(
                (int(place), (teams.team_of_row[b, g] == t).nonzero().flatten().tolist())
                for t, place in enumerate(teams.representative[b, g].tolist())
                if place >= 0
            )
            shift = 40 - length
            assert found == sorted((r + shift, [i + shift for i in members]) for members, r in wanted)


def test_the_replayed_row_is_a_team_member_and_no_suffix(model, calls):
    with latent_santa.patch(model, **SMALL) as santa:
        output = generate(model, prompt(30), 2)
        assert [step["suffix"] for step in santa.access.per_step()] == [0, santa.layers * calls[0].step.groups]
        assert santa.access.per_step()[0]["dense"] == 30 * santa.layers * calls[0].step.groups
    first = calls[0].step
    assert first.rows.length == 30 and first.suffix.index.numel() == 0 and first.draw.step.tolist() == [30]
    for layer in cache_of(output).layers:
        assert (layer.grouped.teams.team_of_row[..., 29] >= 0).all()
        assert layer.get_seq_length() == 31


def test_the_ledger_of_several_generations_adds_up(model):
    with latent_santa.patch(model, **SMALL) as santa:
        parts = []
        for seed in range(3):
            santa.reset()
            generate(model, prompt(30 + seed, seed=seed), 4)
            parts.append(santa.access.totals())
        santa.reset()
        for seed in range(3):
            generate(model, prompt(30 + seed, seed=seed), 4)
        totals = santa.access.totals()
        assert totals == {name: sum(part[name] for part in parts) for name in totals}
        summary = santa.access.as_dict()
        for table in ("per_layer", "per_step"):
            for name in totals:
                assert sum(entry[name] for entry in summary[table]) == totals[name], (table, name)
        assert len(summary["per_step"]) == 12 and len(summary["per_layer"]) == 2
        assert santa.access.percent == pytest.approx(100 * totals["numerator"] / totals["denominator"])


def test_calls_of_different_cost_stay_in_order(model):
    """SANTA's key scan and a dense verification are counted in other units; both keep their place among the calls."""
    with latent_santa.patch(model, method="santa", budget=SMALL["budget"]) as santa:
        first = generate(model, prompt(30), 3)
        more = torch.cat((first.sequences, prompt(3)), 1)
        generate(model, more, 2, cache=cache_of(first))
        groups = 1 if santa.layout == "mla" else 2
        dense = [entry["dense"] / (2 * groups) for entry in santa.access.per_step()]
        routing = [entry["routing"] / (2 * groups) for entry in santa.access.per_step()]
    assert dense == [30, 31, 32, 36, 37]
    assert routing == [30, 31, 32, 0, 37]
