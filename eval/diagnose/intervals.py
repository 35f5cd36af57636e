"""Means over prompts with bootstrap intervals, in the unit of what is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from latent_santa.eval.report.statistics import mean_interval


def over_prompts(values: Mapping[str, Sequence[float]], seed: int) -> dict[str, float | None]:
    """Equal-weight mean over tasks of each prompt's number, and its 95 % interval, prompts resampled within tasks.

    One prompt in a task tells nothing about others: the ends are then None.
    """
    means = {task: np.asarray(own, dtype=np.float64) for task, own in values.items()}
    found = mean_interval(means, seed)  # in percent
    single = min(map(len, means.values())) < 2
    return {
        "mean": found.value / 100,
        "low": None if single else found.low / 100,
        "high": None if single else found.high / 100,
    }


def shown(interval: Mapping[str, float | None], digits: int = 3, factor: float = 1.0) -> str:
    """A mean as text, with its interval where it has one."""
    mean, low, high = (
        None if value is None else round(value * factor, digits) + 0.0  # no -0.0
        for value in map(interval.get, ("mean", "low", "high"))
    )
    text = f"{mean:.{digits}f}"
    return text if low is None or high is None else f"{text} [{low:.{digits}f}, {high:.{digits}f}]"
