"""Bootstrap intervals of task scores and of equal-weight means, as Appendix F of the paper describes them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
_CHUNK = 1_000


@dataclass(frozen=True)
class Interval:
    """A point estimate with a 95 % percentile interval, all in percent. It need not be symmetric."""

    value: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half the span of the interval, the paper's +- entry. 0 where all resampled scores are equal."""
        return (self.high - self.low) / 2


def resampled_means(
    scores: NDArray[np.float64], task: str, seed: int, resamples: int = RESAMPLES
) -> NDArray[np.float64]:
    """Means of `resamples` draws with replacement from one task's scores, shape (resamples,).

    The index draws depend on seed, task name and number of prompts only: adding tasks changes nothing, and two methods
    with the same prompts share their draws, which makes differences paired.
    """
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(task.encode())])))
    means = np.empty(resamples)
    for start in range(0, resamples, _CHUNK):
        stop = min(start + _CHUNK, resamples)
        means[start:stop] = scores[generator.integers(0, len(scores), (stop - start, len(scores)))].mean(axis=1)
    return means


def mean_interval(scores: Mapping[str, NDArray[np.float64]], seed: int, resamples: int = RESAMPLES) -> Interval:
    """Equal-weight mean over tasks of per-prompt scores, with its interval.

    scores  task name to per-prompt numbers in [0, 1] (or differences in [-1, 1]); one task gives that task's interval

    Prompts are resampled within each task and the resampled task means are averaged, so the tasks are strata.
    Raises ValueError if there is no task, or one without a prompt.
    """
    if not scores or not all(len(values) for values in scores.values()):
        raise ValueError("an interval needs at least one task, and at least one prompt in each")
    point = float(np.mean([values.mean() for values in scores.values()]))
    means = np.mean([resampled_means(values, task, seed, resamples) for task, values in scores.items()], axis=0)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(100 * point, 100 * float(low), 100 * float(high))


def retained(score: float, dense: float) -> float | None:
    """The normalised score in percent, from scores rounded to two decimals as in the paper; None if dense is 0."""
    dense = round(dense, 2)
    return 100 * round(score, 2) / dense if dense > 0 else None
