"""The law of the estimators: many draws in one call, a sequence with its own key per draw.

Rows get one-hot values where the layout allows, so that every coordinate of the unnormalised sum is one row's weight
and the test sees a bias of any row, not of a mixture.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from latent_santa import two_stage
from latent_santa.estimator import dense_attention
from latent_santa.noise import noise_keys
from latent_santa.rows import Rows, scores
from latent_santa.sampling import log_inclusion
from latent_santa.step import Draw, Suffix

from .cases import frozen_teams, make_case, own_teams

DRAWS = 12000
K = 4


def repeat(case, draws=DRAWS, seed=0):
    """The first sequence of the case, once for each draw."""

    def spread(part):
        return part[:1].expand(draws, *part.shape[1:])

    keys = tuple(spread(part) for part in case.rows.keys)
    step = case.draw.step[:1].expand(draws)
    return replace(
        case,
        query=tuple(spread(part) for part in case.query),
        rows=Rows(keys, keys[0] if case.rows.values is case.rows.keys[0] else spread(case.rows.values)),
        prompt=spread(case.prompt),
        teams=case.teams.select_batch(torch.zeros(draws, dtype=torch.int64)),
        suffix=Suffix(case.suffix.index, None),
        draw=Draw(noise_keys(seed, range(draws), "cpu"), step, 2),
    )


def one_hot(case):
    """GQA rows whose values are unit vectors."""
    groups, length = case.rows.values.shape[1:3]
    values = torch.eye(length).expand(1, groups, -1, -1)
    return replace(case, rows=Rows(case.rows.keys, values))


def law_case(layout, suffix):
    case = make_case(layout, heads=3, lengths=(20,), suffix=2 if suffix else 0, seed=21, scale=0.45)
    return case if layout == "mla" else one_hot(case)


def sums(output, shift):
    """(draws, G, H, V + 1): the unnormalised weighted sum and mass, in units of the dense mass."""
    mass = (output.lse - shift).double().exp()[..., None]
    return torch.cat((output.out.double() * mass, mass), -1)


def worst_z(case, k, estimator, noise, method):
    """The largest |z| of the mean sums against the dense ones, over heads and coordinates."""
    out, shift = dense_attention(case.query, case.rows, None, case.scale)
    expected = torch.cat((out.double(), torch.ones_like(shift).double()[..., None]), -1)[0]
    found = sums(repeat(case).run(k, estimator, noise, method), shift)
    error = (found.mean(0) - expected).abs()
    assert bool(found.std(0).max() > 0.01)  # something was sampled
    # a suffix row's weight does not vary; what its mean is off by is float32 rounding
    return float(((error - 1e-6).clamp_min(0) / (found.std(0) / DRAWS**0.5 + 1e-9)).max())


@pytest.mark.parametrize("suffix", [False, True])
@pytest.mark.parametrize("noise", ["independent", "shared"])
@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
@pytest.mark.parametrize("method", ["santa++", "gumbel_rows"])
@pytest.mark.parametrize("layout", ["gqa", "mla"])
def test_both_sums_are_unbiased(layout, method, estimator, noise, suffix):
    """Equations 6 to 9 and the pooled form. Up to 69 coordinates, so 5 is far out for an unbiased sum."""
    k = K + 2 if method == "gumbel_rows" else K
    assert worst_z(law_case(layout, suffix), k, estimator, noise, method) < 5


def uncorrected(phi, noise, picked, k, shared):
    return torch.where(picked.log_correction < torch.inf, 0.0, torch.inf)


def kth_for_tau(phi, noise, picked, k, shared):
    threshold = (phi + noise).topk(k + 1).values[..., k - 1 : k]
    return log_inclusion(phi - threshold).masked_fill(~own_teams(phi, noise, k), torch.inf)


def score_for_log_score(phi, noise, picked, k, shared):
    """Equation 7 with the perturbed score in place of the log weight."""
    tau = (phi + noise).topk(k + 1).values[..., k:]
    return log_inclusion(phi + noise - tau).masked_fill(~own_teams(phi, noise, k), torch.inf)


def own_tau_for_all(phi, noise, picked, k, shared):
    tau = (phi + noise).topk(k + 1).values[..., k:]
    joint = (phi - tau).logsumexp(2, keepdim=True)
    return log_inclusion(joint).masked_fill(~picked.union[:, :, None], torch.inf)


def selecting_heads_only(phi, noise, picked, k, shared):
    tau = (phi + noise).topk(k + 1).values[..., k:]
    joint = (phi - tau).masked_fill(~own_teams(phi, noise, k), -torch.inf).logsumexp(2, keepdim=True)
    return log_inclusion(joint).masked_fill(~picked.union[:, :, None], torch.inf)


def other_noise_mode(phi, noise, picked, k, shared):
    return attention_select(phi, noise, k, "pooled", not shared).log_correction


attention_select = two_stage.select


@pytest.mark.parametrize(
    "estimator, noise, wrong",
    [
        ("per_head", "independent", uncorrected),
        ("per_head", "independent", kth_for_tau),
        ("per_head", "shared", kth_for_tau),
        ("per_head", "independent", score_for_log_score),
        ("pooled", "independent", uncorrected),
        ("pooled", "independent", own_tau_for_all),
        ("pooled", "independent", selecting_heads_only),
        ("pooled", "independent", other_noise_mode),
        ("pooled", "shared", other_noise_mode),
    ],
)
def test_wrong_corrections_show(monkeypatch, estimator, noise, wrong):
    """The bound above has power: corrections that look right miss it."""

    def select(phi, draws, k, estimator, shared, peers):
        picked = attention_select(phi, draws, k, estimator, shared, peers)
        return replace(picked, log_correction=wrong(phi, draws, picked, k, shared))

    monkeypatch.setattr(two_stage, "select", select)
    assert worst_z(law_case("gqa", True), K, estimator, noise, "santa++") > 8


def used_rows(case, k, method, seed):
    """(draws, H, N) bool, rows with weight: one-hot values show them."""
    return repeat(case, seed=seed).run(k, method=method).out[:, 0] > 0


def row_teams(case, parent_size):
    """The case with one team per row, ``parent_size`` of them from one parent in the order of its selection."""
    length = case.prompt.shape[1]
    keys = tuple(part[:, :, :length] for part in case.rows.keys)
    parents = (torch.arange(length) // parent_size)[None, None]
    teams = frozen_teams(Rows(keys, keys[0]), keys[0], parents, parent_size)
    assert int(teams.count) == length
    return replace(case, teams=teams)


def test_one_team_per_row_in_order_draws_what_gumbel_rows_draw():
    """With teams numbered like rows even the draws agree, and so does everything else but the routing count."""
    case = row_teams(make_case("mla", heads=3, lengths=(20,), suffix=2, seed=4), 1)
    for estimator, noise in itertools.product(("per_head", "pooled"), ("independent", "shared")):
        teams, single = (case.run(5, estimator, noise, method) for method in ("santa++", "gumbel_rows"))
        torch.testing.assert_close(teams.out, single.out, rtol=1e-5, atol=1e-5)
        assert teams.union.equal(single.union)
        assert int(teams.routing) == 20 and int(single.routing) == 22


def test_one_team_per_row_follows_the_law_of_gumbel_rows():
    """Numbered otherwise the draws differ, but rows are included equally often."""
    case = row_teams(one_hot(make_case("gqa", heads=2, lengths=(16,), seed=5, scale=0.7)), 4)
    assert case.teams.representative[0, 0].tolist() != list(range(16))
    ours, theirs = (used_rows(case, 5, method, seed) for method, seed in (("santa++", 1), ("gumbel_rows", 2)))
    assert bool((ours.sum(-1) == 5).all()) and bool((theirs.sum(-1) == 5).all())
    p, q = ours.double().mean(0), theirs.double().mean(0)
    z = (p - q) / (((p * (1 - p) + q * (1 - q)) / DRAWS).sqrt() + 1e-9)
    assert float(z.abs().max()) < 4.5
    assert float(p.max() - p.min()) > 0.3


def plackett_luce(weights, k):
    """Probability of each set of the first k of successive sampling without replacement."""
    law = {}
    for order in itertools.permutations(range(len(weights)), k):
        probability, left = 1.0, sum(weights)
        for i in order:
            probability *= weights[i] / left
            left -= weights[i]
        law[frozenset(order)] = law.get(frozenset(order), 0.0) + probability
    return law


@pytest.mark.parametrize("method", ["santa++", "gumbel_rows"])
def test_selected_sets_follow_plackett_luce(method):
    """Gumbel-top-K is successive sampling by exp(phi): chi-square over all ten pairs of five rows, for each head."""
    case = row_teams(one_hot(make_case("gqa", heads=5, lengths=(5,), seed=6, scale=0.5)), 5)
    used = used_rows(case, 2, method, 3)
    logits = scores(case.query, case.rows.keys, case.scale)[0, 0].double()
    for h in range(5):
        law = plackett_luce(logits[h].exp().tolist(), 2)
        assert sum(law.values()) == pytest.approx(1)
        chi = 0.0
        for chosen, probability in law.items():
            wanted = torch.tensor([i in chosen for i in range(5)])
            seen = int((used[:, h] == wanted).all(-1).sum())
            chi += (seen - DRAWS * probability) ** 2 / (DRAWS * probability)
        assert chi < 33.7  # 9 degrees of freedom, probability 1e-4


def test_team_sets_follow_plackett_luce():
    """Teams are drawn by n_g exp(score of the representative)."""
    case = one_hot(make_case("gqa", heads=3, lengths=(13,), parent_size=4, representatives=1, seed=7, scale=0.5))
    assert sorted(case.teams.sizes[0, 0].tolist()) == [1, 4, 4, 4]
    used = used_rows(case, 2, "santa++", 4)
    keys = [part.float() for part in case.teams.routing_keys]
    weights = case.teams.sizes[0, 0] * scores(case.query, keys, case.scale)[0, 0].exp()
    for h in range(3):
        chi = 0.0
        for chosen, probability in plackett_luce(weights[h].double().tolist(), 2).items():
            wanted = torch.tensor([team in chosen for team in case.teams.team_of_row[0, 0].tolist()])
            seen = int((used[:, h] == wanted).all(-1).sum())
            chi += (seen - DRAWS * probability) ** 2 / (DRAWS * probability)
        assert chi < 25.8  # 5 degrees of freedom, probability 1e-4


def test_heads_draw_apart_or_together():
    """Independent noise: two heads with one query choose independently; shared noise: they choose the same."""
    case = one_hot(make_case("gqa", heads=2, lengths=(12,), seed=8))
    case = replace(case, query=tuple(part[:, :, :1].expand(-1, -1, 2, -1) for part in case.query))
    together = repeat(case).run(3, noise="shared").out[:, 0] > 0
    assert together[:, 0].equal(together[:, 1])
    apart = (repeat(case).run(3, noise="independent").out[:, 0] > 0).double()
    p = apart.mean(0)
    joint = (apart[:, 0] * apart[:, 1]).mean(0)
    z = (joint - p[0] * p[1]) / ((p[0] * p[1] * (1 - p[0]) * (1 - p[1])).sqrt() / DRAWS**0.5)
    assert float(z.abs().max()) < 4.5
