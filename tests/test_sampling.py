"""Selection and inclusion corrections against the reference, given the same scores and noise."""

from __future__ import annotations

import decimal
import itertools
import math

import numpy as np
import pytest
import torch

from latent_santa import naive as ref
from latent_santa.sampling import log_inclusion, routing_scores, select
from latent_santa.teams import Teams

from .cases import make_case, own_teams, pick

ESTIMATORS = ["per_head", "pooled"]


def exact_log_inclusion(x: float) -> float:
    """log(1 - exp(-exp(x))) to 60 digits; below 1, 1 - exp(-e) = e (1 - e / 2 + e^2 / 6 - ...) is summed."""
    with decimal.localcontext() as context:
        context.prec = 60
        context.traps[decimal.Underflow] = False
        exact = decimal.Decimal(x)
        e = exact.exp()
        if e > 1:
            return float((1 - (-e).exp()).ln())
        return float(exact + sum((-e) ** n / math.factorial(n + 1) for n in range(50)).ln())


# both sides of every place where a formula might change over, and the ends
POINTS = [-1e4, -3000.5, -745.5, -120.0, -104.0, -88.0, -87.0, -40.0, -20.0, -16.7, -10.001, -10.0, -9.999, -5.0, -2.5,
          -1.0, -0.5, -0.3665, -0.25, 0.0, 0.25, 1.0, 2.0, 2.8, 3.0, 4.6, 10.0, 88.0, 89.0, 700.0, 1e4]  # fmt: skip


def test_log_inclusion():
    """The absolute error of log c is the relative error of c: a few units in the last place, down to c = e^-10000."""
    x = torch.tensor(POINTS, dtype=torch.float32)
    expected = torch.tensor([exact_log_inclusion(value) for value in x.tolist()], dtype=torch.float64)
    # float64 is as good as the first term that the series leaves out, e^2x / 24
    for points, unit in ((x, torch.finfo(torch.float32).eps), (x.double(), 3e-11)):
        found = log_inclusion(points)
        assert found.dtype == points.dtype and bool((found <= 0).all())
        error = (found.double() - expected).abs() / (1 + expected.abs())
        assert bool((error <= 4 * unit).all()), error


def test_log_inclusion_dense_sweep():
    x = torch.linspace(-30, 12, 3001)
    expected = [ref.log_correction(value, 0.0) for value in x.tolist()]
    np.testing.assert_allclose(log_inclusion(x).double().numpy(), expected, rtol=5e-7, atol=5e-7)
    assert bool((log_inclusion(x).diff() >= -4e-6).all())


def test_log_inclusion_at_infinity():
    assert log_inclusion(torch.tensor([math.inf, -math.inf])).tolist() == [0.0, -math.inf]


def random_scores(seed, counts=((11, 11), (11, 6)), heads=3, shared=False, spread=3.0):
    """phi and noise ``(B, G, H, M)``, padding teams at -inf, with noise there all the same."""
    rng = np.random.default_rng(seed)
    batch, groups, teams = len(counts), len(counts[0]), max(map(max, counts))
    phi = rng.normal(size=(batch, groups, heads, teams)) * spread
    noise = rng.gumbel(size=(batch, groups, 1 if shared else heads, teams)).repeat(heads if shared else 1, axis=2)
    real = np.arange(teams) < np.array(counts)[:, :, None, None]
    return (
        torch.tensor(np.where(real, phi, -np.inf), dtype=torch.float32),
        torch.tensor(noise, dtype=torch.float32),
        torch.tensor(counts),
    )


def reference_selection(phi, noise, count, k, estimator, shared):
    """(selected teams of each head, each head's map from team to log c_g) of one sequence and group."""
    phi, noise = phi[:, :count].tolist(), noise[:, :count].tolist()
    heads = range(len(phi))
    if k >= count:
        everything = dict.fromkeys(range(count), 0.0)
        return [set(everything) for _ in heads], [everything for _ in heads]
    if estimator == "pooled":
        chosen, pooled = ref.pooled_corrections(phi, noise, k, shared)
        return chosen, [pooled for _ in heads]
    picks = [ref.select(phi[h], noise[h], k) for h in heads]
    return [p[0] for p in picks], [
        {g: ref.log_correction(phi[h][g], picks[h][1]) for g in picks[h][0]} for h in heads
    ]  # fmt: skip


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("k", [1, 2, 5, 6, 7, 10, 11, 12, 40])
def test_selection_equals_the_reference(k, shared, estimator):
    """Counts differ inside the batch, so K reaches some sequences' team counts and not others'."""
    counts = ((11, 11), (11, 6), (2, 1))
    for seed in range(4):
        phi, noise, count = random_scores(seed, counts, shared=shared)
        picked, own = pick(phi, noise, k, estimator, shared), own_teams(phi, noise, k)
        heads = phi.shape[2]
        assert picked.log_correction.shape == (3, 2, heads if estimator == "per_head" and k < 11 else 1, 11)
        assert picked.routing.tolist() == [[n if n > k else 0 for n in row] for row in counts]
        log_c = picked.log_correction.expand(-1, -1, heads, -1)
        for b, g in itertools.product(range(3), range(2)):
            n = counts[b][g]
            chosen, corrections = reference_selection(phi[b, g], noise[b, g], n, k, estimator, shared)
            union = set().union(*chosen)
            assert set(picked.union[b, g].nonzero()[:, 0].tolist()) == union
            for h in range(heads):
                assert set(own[b, g, h].nonzero()[:, 0].tolist()) == chosen[h]
                assert len(chosen[h]) == min(k, n)
                expected = [corrections[h].get(t, math.inf) for t in range(11)]
                found = log_c[b, g, h].double().numpy()
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)
                assert k < n or all(value in (0.0, math.inf) for value in found)
        assert bool((picked.log_correction <= 0).logical_or(picked.log_correction == math.inf).all())


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("k", [11, 12, 1000])
def test_everything_is_exact_when_k_reaches_m(k, shared, estimator):
    phi, noise, count = random_scores(0, shared=shared, spread=1000.0)
    picked = pick(phi, noise, k, estimator, shared)
    real = phi > -math.inf
    assert picked.union.equal(real[:, :, 0])
    log_c = picked.log_correction.expand_as(phi)
    assert bool((log_c[real] == 0).all()) and bool((log_c[~real] == math.inf).all())
    assert picked.routing.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_tiny_corrections(estimator):
    """A team far below the threshold that its draw lifted above it: log c is the margin, to relative accuracy."""
    phi = torch.tensor([[[[0.0, -300.0, 1.0, 0.5]]]])
    noise = torch.tensor([[[[0.2, 400.0, 0.1, 0.3]]]])
    picked = select(phi, noise, 2, estimator, False)
    assert own_teams(phi, noise, 2).tolist() == [[[[False, True, True, False]]]]
    assert float(picked.log_correction[0, 0, 0, 1]) == pytest.approx(-300.8, rel=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_pooled_by_hand(shared):
    """Two heads, three teams, K = 1: head 0 takes team 0 and head 1 team 1; T is the second score or the first."""
    phi = torch.tensor([[[[1.0, 0.5, -1.0], [0.0, 2.0, -0.5]]]])
    noise = torch.zeros_like(phi)
    picked = select(phi, noise, 1, "pooled", shared)
    # team 0: head 0 chose it (T = 0.5), head 1 did not (T = 2.0); team 1: head 0 did not (T = 1), head 1 did (T = 0)
    margins = ((1.0 - 0.5, 0.0 - 2.0), (0.5 - 1.0, 2.0 - 0.0))
    joint = [max(m) if shared else math.log(sum(map(math.exp, m))) for m in margins]
    expected = [math.log(-math.expm1(-math.exp(x))) for x in joint]
    assert picked.log_correction[0, 0, 0].tolist() == pytest.approx([*expected, math.inf], abs=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_pooled_is_per_head_when_one_head_reads(shared):
    phi, noise, _ = random_scores(3, heads=1, shared=shared)
    one, other = (select(phi, noise, 4, estimator, shared) for estimator in ESTIMATORS)
    torch.testing.assert_close(one.log_correction, other.log_correction)


def test_pooled_inclusion_is_never_below_a_heads_own():
    for seed, shared in itertools.product(range(20), (False, True)):
        phi, noise, _ = random_scores(seed, shared=shared)
        own = select(phi, noise, 3, "per_head", shared).log_correction
        pooled = select(phi, noise, 3, "pooled", shared).log_correction.expand_as(phi)
        assert bool((pooled >= own - 1e-5)[own < math.inf].all())


def test_budgets_share_their_draws():
    """Common random numbers: a larger K selects a superset."""
    phi, noise, _ = random_scores(5)
    picks = [own_teams(phi, noise, k) for k in (1, 3, 6, 10, 11)]
    for smaller, larger in itertools.pairwise(picks):
        assert bool((larger | ~smaller).all()) and int(larger.sum()) > int(smaller.sum())


@pytest.mark.parametrize("size", [1e4, 3e37])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("shared", [False, True])
def test_scores_of_any_size_give_finite_corrections(size, estimator, shared):
    phi, noise, _ = random_scores(8, shared=shared, spread=size)
    log_c = select(phi, noise, 4, estimator, shared).log_correction
    assert not bool(log_c.isnan().any()) and not bool((log_c == -math.inf).any())


def test_routing_scores():
    """Equation 3 on frozen keys: log n_g + scale * q.l_g over both key parts; padding teams at -inf."""
    case = make_case("mla", heads=3, lengths=(13, 6), seed=4)
    teams: Teams = case.teams
    phi = routing_scores(case.query, teams, case.scale)
    assert phi.shape == (2, 1, 3, teams.M) and phi.dtype == torch.float32
    for b in range(2):
        count = int(teams.count[b, 0])
        for h, t in itertools.product(range(3), range(count)):
            dot = sum(float(q[b, 0, h].double() @ k.codes[b, 0, t].double())
                      for q, k in zip(case.query, teams.routing_keys, strict=True))  # fmt: skip
            expected = math.log(int(teams.sizes[b, 0, t])) + case.scale * dot
            assert float(phi[b, 0, h, t]) == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert bool((phi[b, :, :, count:] == -math.inf).all())
    assert int(teams.count[1, 0]) < teams.M
