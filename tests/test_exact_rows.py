"""First and last rows that settings keep out of the teams: the law of what is left, and a cache's life with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import latent_santa
from latent_santa.estimator import sampled_attention
from latent_santa.parents import contiguous_parents
from latent_santa.rows import Rows
from latent_santa.step import Draw, Sampling, Suffix

from .cases import frozen_teams, make_case
from .test_two_stage import SETTINGS, reference, two_stages, with_parents, worst_z
from .test_unbiased import one_hot
from .tiny_models import assert_close, assert_same, cache_of, generate, padded, prompt, tiny_model

APART = {"exact_first": 3, "exact_last": 5}


def apart(case, first, last):
    """The case with the first and last real rows of every sequence in the suffix, and teams of the others."""
    rank, count = case.prompt.long().cumsum(-1), case.prompt.sum(-1, keepdim=True)
    inside = case.prompt & (rank > first) & (rank <= count - last)
    exact, length = case.prompt & ~inside, case.prompt.shape[1]
    places = exact.any(0).nonzero()[:, 0]
    later = case.suffix.visible
    if later is None:
        later = torch.ones(len(exact), case.suffix.index.numel(), dtype=torch.bool)
    suffix = Suffix(torch.cat((places, case.suffix.index)), torch.cat((exact[:, places], later), 1))
    parents = contiguous_parents(inside, case.parent_size).expand(-1, case.step.groups, -1)
    teams = frozen_teams(Rows(case.frozen, case.rows.values[:, :, :length]), case.points, parents, case.representatives)
    draw = Draw(case.draw.key, inside.sum(-1) + suffix.counts(len(exact)), case.draw.layer)
    return with_parents(replace(case, prompt=inside, teams=teams, suffix=suffix, draw=draw), parents=parents)


@pytest.mark.parametrize("noise", ["independent", "shared"])
@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
@pytest.mark.parametrize("k1", [None, 2], ids=["one stage", "two stages"])
def test_both_sums_are_unbiased(k1, estimator, noise):
    case = one_hot(
        make_case("gqa", heads=3, lengths=(30,), suffix=1, parent_size=6, representatives=3, seed=22, scale=0.4)
    )
    case = apart(case, 2, 4)
    assert int(case.teams.parents.count) == 4 and case.suffix.index.tolist() == [0, 1, 26, 27, 28, 29, 30]
    assert worst_z(case, Sampling(4, estimator, noise, k1)) < 5


@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
def test_the_reference_in_loops(estimator):
    """A padded batch whose shortest sequence has no row left for teams."""
    case = apart(make_case("mla", heads=3, lengths=(41, 5, 26), suffix=3, hidden=((0, 1),)), 2, 3)
    output = sampled_attention(case.step, two_stages(3, 4, estimator))
    for b in range(3):
        want = reference(case, b, 0, 3, 4, estimator, "independent", "mean")
        np.testing.assert_allclose(output.out[b, 0].numpy(), want.outputs, rtol=2e-4, atol=2e-5)
        assert (int(output.routing[b, 0]), int(output.union[b, 0]), int(output.suffix[b, 0])) == want.counts[:3]


# models


@pytest.fixture(scope="module", params=["deepseek_v2-yarn", "qwen2"])
def model(request):
    return tiny_model(request.param)


@pytest.mark.parametrize(
    "parents, lengths", [("contiguous", (33, 61)), ("contiguous", (1, 7)), ("kmeans", (4, 30))], ids=str
)
def test_padded_batches_give_what_each_prompt_gives_alone(model, parents, lengths):
    """Also prompts that are shorter than what is kept out; all budgets full give dense attention."""
    ids, mask = padded(list(lengths))
    most = max(lengths)
    with latent_santa.patch(model, **{**SETTINGS, **APART, "parents": parents}, parents_per_head=2) as santa:
        santa.sequence_keys = [5, 6]
        found = generate(model, ids, 4, attention_mask=mask)
        rows = santa.access.per_sequence()
        for b, length in enumerate(lengths):
            assert rows[b]["suffix"] >= 4 * min(8, length) * rows[b]["dense"] // sum(length + i for i in range(4))
            santa.sequence_keys = [5 + b]
            santa.reset()
            alone = generate(model, ids[b : b + 1, most - length :], 4)
            assert alone.sequences[0, length:].equal(found.sequences[b, most:])
            assert_close([s[0] for s in alone.scores], [s[b] for s in found.scores])
        santa.configure(parents_per_head=100, budget=4096)
        santa.sequence_keys = None
        full = generate(model, ids, 4, attention_mask=mask)
    assert_same(full, generate(model, ids, 4, attention_mask=mask))


def test_turns_beams_and_crops(model):
    """Each turn keeps its own last rows, a short one all of its rows; beams and cropping carry the spans."""
    first, long, short = prompt(40), prompt(30, seed=3), prompt(9, seed=4)
    settings = {**SETTINGS, "exact_first": 3, "exact_last": 10, "regroup_after": 0}
    with latent_santa.patch(model, **settings, parents_per_head=2) as santa:
        told = generate(model, first, 3)
        grouped = cache_of(told).layers[0].grouped
        assert (grouped.stop, grouped.exact, grouped.mixed) == (30, ((0, 3),), False)
        told = generate(model, torch.cat((told.sequences, long), 1), 3, cache=cache_of(told))
        layer = cache_of(told).layers[0]
        # the turn's call brings the last generated token too
        assert (layer.grouped.stop, layer.grouped.exact) == (63, ((0, 3), (30, 42)))
        assert int(layer.grouped.teams.sizes.sum(-1).max()) == 27 + 21
        told = generate(model, torch.cat((told.sequences, short), 1), 3, cache=cache_of(told))
        assert layer.grouped.stop == 63 and layer.waiting is None
        assert layer.suffix(None).index.tolist() == [*range(3), *range(30, 42), *range(63, layer.get_seq_length())]
        layer.crop(65 - layer.get_seq_length())
        assert layer.grouped.stop == 63
        layer.crop(-5)
        assert layer.grouped.teams is None
        santa.reset()
        beams = generate(model, prompt(60), 4, num_beams=3)
        assert santa.access.totals()["suffix"] > 0 and cache_of(beams).layers[0].grouped.exact == ((0, 3),)
        santa.configure(regroup_after=16)  # the earlier turn's last rows are grouped with the next one
        told = generate(model, first, 3)
        told = generate(model, torch.cat((told.sequences, long), 1), 20, cache=cache_of(told))
        grouped = cache_of(told).layers[0].grouped
        assert grouped.exact == ((0, 3),) and int(grouped.teams.sizes.sum(-1).max()) == grouped.stop - 3 == 76
        assert "first 3 and last 10 rows exact" in " ".join(santa.report().split())


def test_last_rows_fit_in_the_suffix():
    with pytest.raises(ValueError, match="exact_last=64: must be less than the 64 rows .* regroup_after"):
        latent_santa.SantaConfig(exact_last=64, regroup_after=64)
    latent_santa.SantaConfig(exact_last=64, regroup_after=0)
