"""The algorithms in loops, checked by hand-computed examples, brute force and Monte Carlo."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from latent_santa import naive as ref
from latent_santa import naive_noise

from .cases import PHILOX_KNOWN_ANSWERS


def make_case(heads: int = 2, rows: int = 14, dims: int = 3, value_dims: int = 2, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    keys, values = rng.normal(size=(rows, dims)), rng.normal(size=(rows, value_dims)) + 0.5
    suffix = [rows - 2, rows - 1]
    teams = ref.build_teams(keys, ref.contiguous_parents(rows - 2, 4), 2)
    return {
        "queries": rng.normal(size=(heads, dims)),
        "keys": keys,
        "values": values,
        "teams": teams,
        "routing_keys": [keys[team.representative] for team in teams],
        "suffix": suffix,
        "scale": 0.8,
    }


@pytest.mark.parametrize("counter, key, expected", PHILOX_KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, expected):
    assert naive_noise.philox4x32_10(counter, key) == expected


def test_uniform_is_rounded_and_clamped():
    assert naive_noise.uniform(0) == 2.0**-33
    assert naive_noise.uniform(1) == 2.0**-32
    assert naive_noise.uniform(2**32 - 1) == 1 - 2.0**-24
    assert naive_noise.uniform(2**31) == 0.5
    assert naive_noise.uniform(2**31 + 1) == 0.5  # not representable with a 24-bit mantissa
    assert naive_noise.uniform(2**31 + 384) == 0.5 + 2.0**-23  # halfway, to even


def test_gumbel_layout_and_law():
    words = naive_noise.philox4x32_10((7, 3 * 65536 + 1, 100, 5), (11, 22))
    draw = naive_noise.gumbel((11, 22), step=100, layer=5, group=3, head=6, team=7, shared=False)
    assert draw == -math.log(-math.log1p(-naive_noise.uniform(words[2])))
    shared = [naive_noise.gumbel((11, 22), 100, 5, 3, head, 7, True) for head in range(9)]
    assert set(shared) == {naive_noise.gumbel((11, 22), 100, 5, 3, 0, 7, False)}
    draws = np.array(
        [naive_noise.gumbel((1, 2), 9, 0, 0, head, team, False) for head in range(16) for team in range(500)]
    )
    assert len(set(draws.tolist())) > 0.999 * draws.size
    assert abs(draws.mean() - np.euler_gamma) < 4 * math.pi / math.sqrt(6 * draws.size)
    assert abs((draws <= 1.0).mean() - math.exp(-math.exp(-1.0))) < 4 * 0.5 / math.sqrt(draws.size)


def test_parents():
    assert ref.contiguous_parents(7, 3) == [[0, 1, 2], [3, 4, 5], [6]]
    assert ref.contiguous_parents(6, 3) == [[0, 1, 2], [3, 4, 5]]
    assert ref.parents_from_labels([3, 0, 3, 5, 0]) == [[1, 4], [0, 2], [3]]
    assert [ref.requested_parents(n, 16) for n in (1, 2, 31, 33, 47, 48)] == [1, 2, 2, 2, 2, 3]
    assert ref.requested_parents(5, 1) == 5


def test_kmeans_parents_are_those_of_the_nearest_centers():
    keys, asked = [[0.0], [4.0], [1.0], [9.0], [5.0]], []

    def fit(k, number):
        asked.append((k.tolist(), number))
        return [[5.0], [100.0], [0.0]]  # row 1 at 4 is nearest to 5; nothing is nearest to 100

    assert ref.kmeans_parents(keys, 1, fit) == [[1, 3, 4], [0, 2]]
    assert asked == [(keys, 5)]
    tied = ref.kmeans_parents([[1.0], [3.0]], 16, lambda k, number: [[2.0], [2.0]])
    assert tied == [[0, 1]]  # the first center's


def test_budgets():
    assert ref.team_budget(128, 16, 4, 1000) == 32
    assert ref.team_budget(128, 16, 4, 10) == 10
    assert ref.centroid_budget(128, 16, 100) == 8
    for budget, parent, count in ((130, 16, 4), (128, 16, 3)):
        with pytest.raises(ValueError, match="divisible"):
            ref.team_budget(budget, parent, count, 1000)


def test_teams_by_hand():
    # Mean 3: row 2 first (distance 0). Then 0 and 4 tie at 9: the lower index, and then 4. Row 1 is 2 from row 0 and
    # 1 from row 2; row 3 is 1 from row 2.
    assert ref.build_teams([[0.0], [2.0], [3.0], [4.0], [6.0]], [[0, 1, 2, 3, 4]], 3) == [
        ref.Team([1, 2, 3], 2),
        ref.Team([0], 0),
        ref.Team([4], 4),
    ]
    # Mean 3: row 1 first, then row 0 (distance 9 against 1 and 4). Row 3 at 1.5 is 1.5 from both: first selected.
    assert ref.build_teams([[0.0], [3.0], [4.0], [1.5], [5.0], [4.5]], [[0, 1, 2, 3, 4, 5]], 2) == [
        ref.Team([1, 2, 3, 4, 5], 1),
        ref.Team([0], 0),
    ]
    assert ref.build_teams([[1.0], [3.0], [2.0], [2.0]], [[0, 1], [2, 3]], 1) == [
        ref.Team([0, 1], 0),
        ref.Team([2, 3], 2),
    ]
    # Mean 2: rows 1 and 2 are equally near, row 1 first; 0 (1 away) loses to 3 (4 away); row 2 ties 1 and 3 (2 away).
    assert ref.build_teams([[0.0], [1.0], [3.0], [5.0], [1.0]], [[0, 1, 2, 3, 4]], 2) == [
        ref.Team([0, 1, 2, 4], 1),
        ref.Team([3], 3),
    ]


def test_teams_of_duplicates():
    # All distances are 0: rows in index order, members to the first, every representative keeps its own row.
    keys = np.ones((5, 2))
    assert ref.build_teams(keys, [[4, 0, 2, 1]], 3) == [ref.Team([0, 4], 0), ref.Team([1], 1), ref.Team([2], 2)]
    assert ref.build_teams(keys, [[0, 1]], 4) == [ref.Team([0], 0), ref.Team([1], 1)]


def test_teams_partition():
    rng = np.random.default_rng(3)
    keys = rng.integers(0, 3, size=(40, 2)).astype(float)
    parents = ref.parents_from_labels(rng.integers(0, 7, size=40))
    teams = ref.build_teams(keys, parents, 3)
    assert sorted(i for team in teams for i in team.members) == list(range(40))
    assert all(team.representative in team.members for team in teams)
    assert len(teams) == sum(min(3, len(parent)) for parent in parents)


def test_log_correction():
    for x in (-45.0, -39.0, -5.0, -0.3, 0.0, 3.0, 4.1):
        e = math.exp(x)
        series = e - e**2 / 2 + e**3 / 6  # 1 - exp(-e) where subtracting would lose digits
        expected = math.log(series) if x < -4 else math.log1p(-math.exp(-e))
        assert ref.log_correction(x + 2.0, 2.0) == pytest.approx(expected, rel=1e-6, abs=0)
    assert ref.log_correction(-2000.0, 0.0) == -2000.0
    assert ref.log_correction(2000.0, 0.0) == 0.0
    assert ref.log_correction(1.0, -math.inf) == 0.0


def test_pooled_correction():
    phi, thresholds = [0.1, -1.0, 0.5], [0.7, 0.2, 1.4]
    rho = [-math.expm1(-math.exp(p - t)) for p, t in zip(phi, thresholds, strict=True)]
    independent = 1 - math.prod(1 - r for r in rho)
    assert ref.pooled_log_correction(phi, thresholds, False) == pytest.approx(math.log(independent), rel=1e-12)
    assert ref.pooled_log_correction(phi, thresholds, True) == pytest.approx(math.log(max(rho)), rel=1e-12)
    assert ref.pooled_log_correction([1.0], [2.0], False) == ref.log_correction(1.0, 2.0)
    assert ref.pooled_log_correction([1.0, 2.0], [5.0, -math.inf], False) == 0.0


def test_thresholds_are_leave_one_out():
    rng = np.random.default_rng(1)
    phi, noise = rng.normal(size=9), rng.gumbel(size=9)
    for k in range(1, 9):
        chosen, tau, kth = ref.select(phi, noise, k)
        assert len(chosen) == k
        for g in range(9):
            others = sorted((phi[h] + noise[h] for h in range(9) if h != g), reverse=True)
            assert others[k - 1] == (tau if g in chosen else kth)
            assert (g in chosen) == (phi[g] + noise[g] > others[k - 1])
    assert ref.select(phi, noise, 9) == (set(range(9)), -math.inf, min(phi + noise))
    assert ref.select(phi, noise, 12) == (set(range(9)), -math.inf, -math.inf)


def test_selection_law():
    """Gumbel-top-K draws teams in proportion to exp(phi) without replacement: exact inclusion probabilities."""
    mass, k, draws = [1, 2, 3, 6], 2, 4000
    exact = [Fraction(0)] * 4
    for first, second in itertools.permutations(range(4), 2):
        p = Fraction(mass[first], 12) * Fraction(mass[second], 12 - mass[first])
        exact[first] += p
        exact[second] += p
    noise = np.random.default_rng(5).gumbel(size=(draws, 4))
    hits = np.zeros(4)
    for row in noise:
        for g in ref.select([math.log(m) for m in mass], row, k)[0]:
            hits[g] += 1
    for g in range(4):
        chance = float(exact[g])
        assert abs(hits[g] / draws - chance) < 4 * math.sqrt(chance * (1 - chance) / draws)


@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
@pytest.mark.parametrize("extra", [0, 5])
def test_every_team_is_dense(estimator, extra):
    case = make_case(heads=3)
    teams = len(case["teams"])
    noise = np.zeros((3, teams))
    expected = ref.dense(case["queries"], case["keys"], case["values"], case["scale"])
    result = ref.attention_group(**case, k=teams + extra, noise=noise, estimator=estimator)
    np.testing.assert_allclose(result.outputs, expected, rtol=1e-12)
    assert result.counts == ref.Counts(routing=0, union=12, suffix=2, dense=14)
    assert all(set(c.values()) == {0.0} for c in result.log_corrections)
    prompt = list(range(12))
    rows = ref.gumbel_rows(
        case["queries"], case["keys"], case["values"], prompt, case["suffix"], case["scale"], 12 + extra,
        np.zeros((3, 12)), estimator,
    )  # fmt: skip
    np.testing.assert_allclose(rows.outputs, expected, rtol=1e-12)
    assert rows.counts == ref.Counts(14, 12, 2, 14)


def test_dense_by_hand():
    output = ref.dense([[2.0]], [[0.0], [math.log(3.0)]], [[1.0, 0.0], [0.0, 1.0]], 0.5)
    np.testing.assert_allclose(output, [[0.25, 0.75]], rtol=1e-14)


def test_head_by_hand():
    """Two single-row teams, K = 1: the winner over c = 1 - exp(-exp(phi - loser's score)), the suffix exact."""
    query, keys, values = [1.0], [[0.0], [1.0], [0.5]], [[1.0], [2.0], [3.0]]
    teams = [ref.Team([0], 0), ref.Team([1], 1)]
    result = ref.attention_head(query, keys, values, teams, keys[:2], [2], 2.0, 1, [3.0, -0.5], shift=0.25)
    c = 1 - math.exp(-math.exp(0.0 - 1.5))
    z = math.exp(-0.25) * (1 / c + math.exp(1.0))
    assert result.selected == {0}
    assert pytest.approx(z, rel=1e-12) == result.Z
    assert result.U[0] == pytest.approx(math.exp(-0.25) * (1 / c + 3 * math.exp(1.0)), rel=1e-12)
    assert result.o[0] == pytest.approx(result.U[0] / z, rel=1e-12)


def test_current_cache_serves_selected_rows():
    """Routing reads the frozen keys, contributions the current cache; rows outside teams and suffix are invisible."""
    case = make_case(heads=1)
    noise = np.random.default_rng(2).gumbel(size=(1, len(case["teams"])))
    before = ref.attention_group(**case, k=3, noise=noise)
    unread = sorted(set(range(12)) - {i for g in before.selected[0] for i in case["teams"][g].members})
    keys, values = case["keys"].copy(), case["values"].copy()
    values[unread] = 1e9
    np.testing.assert_array_equal(
        ref.attention_group(**{**case, "values": values}, k=3, noise=noise).outputs, before.outputs
    )
    read = case["teams"][min(before.selected[0])].representative
    keys[read] += 1.0
    after = ref.attention_group(**{**case, "keys": keys}, k=3, noise=noise)
    assert after.selected == before.selected
    assert after.log_corrections == before.log_corrections
    assert not np.allclose(after.outputs, before.outputs)


def test_estimators_agree_for_one_head():
    case = make_case(heads=1)
    noise = np.random.default_rng(4).gumbel(size=(1, len(case["teams"])))
    one, two = (ref.attention_group(**case, k=3, noise=noise, estimator=e) for e in ("per_head", "pooled"))
    np.testing.assert_allclose(one.outputs, two.outputs, rtol=1e-13)
    np.testing.assert_allclose(one.lse, np.log(one.Z) + one.shift)
    assert one.counts == two.counts


def test_gumbel_rows_route_by_exact_scores():
    case, prompt = make_case(), [1, 2, 4, 5, 7, 8]
    noise = np.random.default_rng(8).gumbel(size=(2, 6))
    result = ref.gumbel_rows(
        case["queries"], case["keys"], case["values"], prompt, case["suffix"], case["scale"], 3, noise
    )  # fmt: skip
    for h in range(2):
        exact = [case["scale"] * float(case["queries"][h] @ case["keys"][i]) for i in prompt]
        chosen, tau, _ = ref.select(exact, noise[h], 3)
        assert result.selected[h] == chosen
        assert result.log_corrections[h] == pytest.approx({g: ref.log_correction(exact[g], tau) for g in chosen})
    assert result.counts == ref.Counts(8, len(result.selected[0] | result.selected[1]), 2, 8)


def test_santa_by_hand():
    """Weights 1/4 and 3/4: uniforms below 1/4 draw the first row; outputs are means of the drawn values."""
    keys, values = [[0.0], [math.log(3.0)]], [[1.0, 0.0], [0.0, 1.0]]
    output, counts = ref.santa([[2.0], [-1e3]], keys, values, [[0.1, 0.3, 0.24, 0.99], [0.0, 0.2, 0.5, 0.9]], 0.5)
    np.testing.assert_allclose(output, [[0.5, 0.5], [1.0, 0.0]], rtol=1e-14)
    assert counts == ref.Counts(routing=2, union=2, suffix=0, dense=2)
    assert ref.santa([[2.0]], keys, values, [[0.3]], 0.5)[1] == ref.Counts(2, 1, 0, 2)
    assert ref.systematic(0.5, 4) == [0.125, 0.375, 0.625, 0.875]


@pytest.mark.parametrize("systematic", [False, True])
def test_santa_is_unbiased_for_the_output_itself(systematic):
    """Unlike a ratio of two sums: the mean of drawn values is dense attention's output, within 4 sigma."""
    case, draws = make_case(heads=2, seed=3), 3000
    inputs = (case["queries"], case["keys"], case["values"])
    rng, samples = np.random.default_rng(2), []
    for _ in range(draws):
        uniforms = [ref.systematic(u, 5) for u in rng.random(2)] if systematic else rng.random((2, 5))
        samples.append(ref.santa(*inputs, uniforms, case["scale"])[0].ravel())
    mean, sigma = np.mean(samples, axis=0), np.std(samples, axis=0, ddof=1) / math.sqrt(draws)
    truth = ref.dense(*inputs, case["scale"]).ravel()
    assert np.all(sigma > 0) and np.all(np.abs(mean - truth) < 4 * sigma)


def test_centroid_groups_by_hand():
    groups = ref.centroid_groups([[0.0, 2.0], [4.0, 4.0], [1.0, 1.0]], [[2], [1, 0]])
    assert [members for members, _ in groups] == [[2], [0, 1]]
    np.testing.assert_array_equal([mean for _, mean in groups], [[1.0, 1.0], [2.0, 3.0]])
    phi = ref.routing_scores([1.0, 1.0], groups, [mean for _, mean in groups], 0.5)
    np.testing.assert_allclose(phi, [1.0, math.log(2.0) + 2.5])


def test_access():
    calls = [ref.Counts(5, 10, 2, 40), ref.Counts(0, 38, 3, 41)]
    assert ref.access_gqa(calls) == pytest.approx(100 * (5 + 24 + 82) / 162)
    assert ref.access_mla(calls) == pytest.approx(100 * (5 + 12 + 41) / 81)
    assert ref.access_gqa([ref.Counts(40, 10, 2, 40)], santa=True) == pytest.approx(100 * 52 / 80)


@pytest.mark.parametrize("method", ["teams", "centroid", "rows"])
@pytest.mark.parametrize("estimator, shared", [("per_head", False), ("pooled", False), ("pooled", True)])
def test_sums_are_unbiased(method, estimator, shared):
    """Equation 9 for every head, U coordinate and Z: the mean of the sums is the full-cache sums within 4 sigma.

    K = 4: with K = 1 the sums have no finite variance, and below 4 their sampled variance is not to be trusted.
    """
    case, draws = make_case(heads=3, seed=6), 2500
    prompt = list(range(12))
    if method == "centroid":
        groups = ref.centroid_groups(case["keys"], ref.contiguous_parents(12, 2))
        case.update(teams=groups, routing_keys=[mean for _, mean in groups])
    elif method == "rows":
        case.update(teams=[ref.Team([i], i) for i in prompt], routing_keys=[case["keys"][i] for i in prompt])
    teams = len(case["teams"])
    exact = ref.attention_group(**case, k=teams, noise=np.zeros((3, teams)))
    rng, samples = np.random.default_rng(7), []
    for _ in range(draws):
        noise = np.broadcast_to(rng.gumbel(size=(1 if shared else 3, teams)), (3, teams))
        if method == "rows":
            result = ref.gumbel_rows(
                case["queries"], case["keys"], case["values"], prompt, case["suffix"], case["scale"], 4, noise,
                estimator, shared,
            )  # fmt: skip
        else:
            result = ref.attention_group(**case, k=4, noise=noise, estimator=estimator, shared=shared)
        samples.append(np.concatenate([result.U.ravel(), result.Z]))
    mean, sigma = np.mean(samples, axis=0), np.std(samples, axis=0, ddof=1) / math.sqrt(draws)
    truth = np.concatenate([exact.U.ravel(), exact.Z])
    assert np.all(sigma > 0)
    assert np.all(np.abs(mean - truth) < 4 * sigma), (mean - truth) / sigma
