"""Methods at equal rows: what each prompt has where a method reads a given percentage, between its measured budgets."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from latent_santa.eval.diagnose.intervals import over_prompts

# a task's prompts, each with its number
Numbers = dict[str, list[float]]
# of one measured budget: percent of dense's rows, and the numbers
Measured = tuple[float, Numbers]
Ranked = tuple[str, dict[str, Any], dict[str, Any] | None]


def at_rows(lines: Sequence[Measured], level: float, logarithmic: bool) -> Numbers | None:
    """Each prompt's number of one method where it reads `level` percent of the rows.

    Between two measured budgets it lies on a straight line over rows, or its logarithm does, as errors fall by about
    equal factors; outside there is none.
    """
    ordered = sorted(lines, key=lambda line: line[0])
    rows = [kv for kv, _ in ordered]
    if not rows[0] <= level <= rows[-1]:
        return None

    def between(numbers: Sequence[float]) -> float:
        if logarithmic:
            return float(np.exp(np.interp(level, rows, np.log(numbers))))
        return float(np.interp(level, rows, numbers))

    return {
        task: [between([numbers[task][prompt] for _, numbers in ordered]) for prompt in range(len(own))]
        for task, own in ordered[0][1].items()
    }


def ranking(
    methods: Mapping[str, Sequence[Measured]], level: float, base: str, seed: int, logarithmic: bool
) -> list[Ranked]:
    """Methods that reach a level of rows, least first: name, mean over prompts, and that minus the base's, paired."""
    found = {name: own for name, lines in methods.items() if (own := at_rows(lines, level, logarithmic)) is not None}
    paired, ranked = found.get(base), []
    for name, numbers in found.items():
        minus = None
        if paired is not None and name != base:
            minus = {task: list(np.subtract(own, paired[task])) for task, own in numbers.items()}
        ranked.append((name, over_prompts(numbers, seed), minus and over_prompts(minus, seed)))
    return sorted(ranked, key=lambda entry: entry[1]["mean"])


def errors(frontier: dict[str, Any]) -> dict[str, list[Measured]]:
    """Attention errors of a frontier's methods, but those that scan every key: these are counted at 100 % or more."""
    methods: dict[str, list[Measured]] = {}
    for line in frontier["lines"]:
        if line["bound"] is None and not line["full"]:
            methods.setdefault(line["name"], []).append((line["kv"], line["error_of_prompt"]))
    return methods


def scores(summary: dict[str, Any], answers: Path, mean: str) -> dict[str, list[Measured]]:
    """Scores of a run's methods, but dense decoding and those that scan every key.

    answers: the run's scores one by one, a CSV with the columns setting, prompt and score.
    mean: the summary's column over all tasks.
    """
    by_setting: dict[str, Numbers] = {}
    with answers.open(newline="", encoding="utf-8") as file:
        for line in sorted(csv.DictReader(file), key=lambda line: line["prompt"]):
            task = line["prompt"].partition("/")[0]
            by_setting.setdefault(line["setting"], {}).setdefault(task, []).append(float(line["score"]))
    methods: dict[str, list[Measured]] = {}
    for entry in summary["conditions"]:
        read = entry["cells"][mean]["access"]
        if entry["S"] and read < 99.95:
            methods.setdefault(entry["name"], []).append((read, by_setting[entry["slug"]]))
    return methods
