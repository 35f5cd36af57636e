"""Bootstrap intervals against scipy, against the paper's own numbers, and in the cases that break others."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import scipy.stats

from latent_santa.eval.report.statistics import Interval, mean_interval, resampled_means, retained

RNG = np.random.default_rng(5)
TASKS = {
    "fwe": RNG.choice([0, 1 / 3, 2 / 3, 1], 50, p=[0.02, 0.03, 0.1, 0.85]),
    "niah_multivalue": RNG.choice([0, 0.25, 0.5, 0.75, 1], 50, p=[0.1, 0.05, 0.1, 0.15, 0.6]),
    "qa_1": (RNG.random(50) < 0.66).astype(float),
}


def test_one_task_equals_scipy_with_the_same_draws():
    scores = TASKS["qa_1"]
    # scipy draws from the generator in batches; with our chunk size as its batch it draws the same indices.
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([42, zlib.crc32(b"qa_1")])))
    oracle = scipy.stats.bootstrap(
        (scores,), np.mean, n_resamples=10_000, method="percentile", vectorized=True, batch=1_000, rng=generator
    )
    ours = mean_interval({"qa_1": scores}, seed=42)
    assert (ours.low, ours.high) == pytest.approx(
        (100 * oracle.confidence_interval[0], 100 * oracle.confidence_interval[1])
    )
    assert np.sort(resampled_means(scores, "qa_1", 42)) == pytest.approx(np.sort(oracle.bootstrap_distribution))


def test_strata_agree_with_scipy():
    def mean_of_means(*tasks, axis=-1):
        return np.mean([task.mean(axis=axis) for task in tasks], axis=0)

    oracle = scipy.stats.bootstrap(
        tuple(TASKS.values()), mean_of_means, n_resamples=10_000, method="percentile", vectorized=True, rng=1
    )
    ours = mean_interval(TASKS, seed=42)
    assert ours.value == pytest.approx(100 * mean_of_means(*TASKS.values()))
    assert (ours.low, ours.high) == pytest.approx(100 * np.array(oracle.confidence_interval), abs=0.4)
    # Strata: the half-width is the root sum of squares of the tasks' halves, over their number.
    halves = [mean_interval({task: scores}, seed=42).half for task, scores in TASKS.items()]
    assert ours.half == pytest.approx(np.sqrt(np.sum(np.square(halves))) / 3, rel=0.06)


def test_tables_15_and_18_are_reproduced():
    # qa_1 scores are 0 or 1, so a score of n prompts fixes them; half-widths to one step of the lattice.
    for score, half in [(68, 13), (54, 14), (58, 14), (64, 13), (70, 13)]:
        values = np.zeros(50)
        values[: score // 2] = 1
        assert mean_interval({"qa_1": values}, seed=42).half == pytest.approx(half, abs=1.0)
    dense = round(np.mean([96.67, 94.00, 68.00]), 2)
    rows = [
        (82.00, 73.00, 54.00, 80.80),
        (91.33, 87.50, 58.00, 91.56),
        (96.67, 93.00, 64.00, 98.07),
        (96, 87, 70, 97.81),
    ]
    for *scores, kept in rows:
        assert round(retained(float(np.mean(scores)), dense), 2) == kept


def test_equal_scores_have_no_width_and_order_and_company_change_nothing():
    full = mean_interval({"a": np.ones(7), "b": np.ones(3)}, seed=42)
    assert (full.value, full.low, full.high, full.half) == (100, 100, 100, 0)
    backwards = dict(reversed(TASKS.items()))
    assert mean_interval(backwards, 42).low == pytest.approx(mean_interval(TASKS, 42).low)
    assert (resampled_means(TASKS["fwe"], "fwe", 42) == resampled_means(TASKS["fwe"], "fwe", 42)).all()
    assert (resampled_means(TASKS["fwe"], "fwe", 42) != resampled_means(TASKS["fwe"], "fwe", 43)).any()


def test_differences_are_paired():
    dense = TASKS["qa_1"]
    sparse = dense.copy()
    sparse[np.flatnonzero(dense)[0]] = 0
    paired = mean_interval({"qa_1": sparse - dense}, seed=42)
    assert paired.value == pytest.approx(-2.0)
    assert paired.high == 0 and paired.half < 4 < mean_interval({"qa_1": dense}, seed=42).half
    # The same draws for every method: the difference of the resampled means is the mean of the resampled differences.
    means = resampled_means(sparse, "qa_1", 42) - resampled_means(dense, "qa_1", 42)
    assert means == pytest.approx(resampled_means(sparse - dense, "qa_1", 42))


def test_what_has_no_interval():
    with pytest.raises(ValueError, match="at least one task"):
        mean_interval({}, 42)
    with pytest.raises(ValueError, match="at least one prompt"):
        mean_interval({"a": np.array([])}, 42)
    assert retained(10.0, 0.0) is None
    assert Interval(50, 40, 70).half == 15
