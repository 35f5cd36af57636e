"""The page of results, made of committed files alone: every method at equal rows, wins and losses alike.

``python -m latent_santa.eval.report.results_page`` writes eval/results/README.md and the part of eval/README.md between
its two marks. Nothing on either is typed by hand; a test compares both with what this module makes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from latent_santa.eval.diagnose.intervals import shown
from latent_santa.eval.report import equal_rows
from latent_santa.eval.report.paper_tables import MEAN
from latent_santa.eval.report.tables import against_table, has_bounds, markdown_table

ROOT = Path(__file__).parents[1] / "results"
PAPER = "SANTA++ contiguous 16/4 per head"
PAPER_KMEANS = "SANTA++ k-means 16/4 per head"
FRONTIER = "diagnose/frontier"
# attention errors of every method: of which model, which method the others are paired with, percentages of dense's rows
FRONTIERS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    FRONTIER: ("embedded model (MLA)", PAPER, (20.0, 40.0, 50.0, 65.0)),
}
SHORT = 50.0  # the level that eval/README.md shows
FEWEST = 6  # prompts per task, of which a resampled interval says anything
QWEN_MLA = "the same network written as DeepSeek-V2 (MLA)"
FIELD = "field_4096"
# runs of scores that have every method: which one the others are paired with, and percentages of dense's rows
FIELDS: dict[str, tuple[str, tuple[float, ...]]] = {
    FIELD: (PAPER, (27.0, 40.0, 50.0, 65.0)),
}
RUNS = {
    FIELD: "embedded model (MLA), 4K, every method",
    "tiny": "embedded model (MLA), 2K",
    "tiny_4096": "embedded model (MLA), 4K",
    "tiny_8192": "embedded model (MLA), 8K",
    "first_look": "embedded model (MLA), 4K, what `make run` shows",
    "paper_grids/sweep": "embedded model (MLA), 2K, settings of Tables 4, 11 and 12",
    "paper_grids/centroids": "embedded model (MLA), 2K, settings of Table 6",
    "real/gqa_4096": "Qwen2 of 0.5 billion parameters (GQA), 4K",
    "real/gqa_8192": "Qwen2 of 0.5 billion parameters (GQA), 8K",
    "real/gqa_sweep": "Qwen2 of 0.5 billion parameters (GQA), 8K, sizes of teams",
    "real/mla_4096": f"{QWEN_MLA}, 4K",
    "real/mla_8192": f"{QWEN_MLA}, 8K",
    "real/mla_sweep": f"{QWEN_MLA}, 8K, sizes of teams",
    "two_stage/tiny_4096": "embedded model (MLA), 4K, two stages",
    "two_stage/tiny_8192": "embedded model (MLA), 8K, two stages, one task",
    "two_stage/mla_8192": f"{QWEN_MLA}, newer converter, 8K, two stages",
}
MARKS = ("<!-- made by eval/report/results_page.py -->\n", "<!-- end of what is made -->\n")


def verdict(low: float | None, high: float | None, lower_wins: bool) -> str:
    """What an interval of a difference says: won, lost, or nothing where it reaches zero or is not known."""
    if low is None or high is None or low <= 0 <= high:
        return ""
    return "won" if (high < 0) == lower_wins else "lost"


def _errors_at(frontier: dict[str, Any], level: float, base: str = PAPER) -> list[equal_rows.Ranked]:
    return equal_rows.ranking(equal_rows.errors(frontier), level, base, frontier["settings"]["seed"], logarithmic=True)


def _scores_at(field: str, level: float) -> list[equal_rows.Ranked]:
    """Highest first."""
    methods = equal_rows.scores(_read(f"{field}/summary.json"), ROOT / field / "answers.csv", MEAN)
    return equal_rows.ranking(methods, level, FIELDS[field][0], 0, logarithmic=False)[::-1]


def _cells(entry: equal_rows.Ranked, of_errors: bool) -> list[str]:
    """What a table says of a ranked method: its number, that minus the paper's, and what their interval says."""
    _, numbers, minus = entry
    digits, factor = (3, 1.0) if of_errors else (1, 100.0)
    if minus is None:
        return [shown(numbers, digits, factor), "", ""]
    said = verdict(minus["low"], minus["high"], lower_wins=of_errors)
    return [shown(numbers, digits, factor), shown(minus, digits, factor), said]


def _ranked_table(ranked: Sequence[equal_rows.Ranked], of_errors: bool, base: str = PAPER) -> str:
    what = "attention error" if of_errors else "score"
    lines = [[entry[0], *_cells(entry, of_errors)] for entry in ranked]
    short = "two-stage" if "two-stage" in base else "per head"
    return markdown_table(["method", what, f"minus {short}, paired", ""], lines)


def _single(frontier: dict[str, Any]) -> dict[str, float]:
    """Methods without a budget, and the one percentage of rows that each reads."""
    return {line["name"]: line["kv"] for line in frontier["lines"] if line["S"] is None and line["bound"] is None}


def _scans_table(frontier: dict[str, Any]) -> str:
    scans = [line for line in frontier["lines"] if line["bound"] is not None]
    lines = [
        [line["name"], str(line["S"] or "-"), f"{line['kv']:.1f}", f"{line['bound']:.1f}", shown(line["error"], 3)]
        for line in sorted(scans, key=lambda line: (line["name"], line["S"] or 0))
    ]
    return markdown_table(["method", "S", "rows read %", "bound %", "attention error"], lines)


def _fewest(summary: dict[str, Any]) -> int:
    """Prompts of the task that has fewest; summaries from before it was kept have equal numbers."""
    return int(summary.get("fewest", summary["n"]))


def _scores_table(summary: dict[str, Any]) -> str:
    bounds, lines = has_bounds(summary), []
    for entry in sorted(summary["conditions"], key=lambda entry: entry["cells"][MEAN]["access"]):
        cell = entry["cells"][MEAN]
        span, score = cell["difference"], cell["score"]
        minus = f"{span['value']:+.1f} [{span['low']:+.1f}, {span['high']:+.1f}]" if span else ""
        said = verdict(span["low"], span["high"], lower_wins=False) if span and _fewest(summary) >= FEWEST else ""
        numbers = [f"{cell['access']:.1f}", *([f"{cell['bound']:.1f}"] if bounds else []), f"{score['value']:.1f}"]
        lines.append([entry["name"], str(entry["S"] or "-"), *numbers, minus, said])
    bound = ["bound %"] if bounds else []
    return markdown_table(["setting", "S", "rows read %", *bound, "score", "minus dense, paired", ""], lines)


def _read(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def short() -> str:
    """The ranking that eval/README.md shows: by attention error, and the scores beside it."""
    scored = {entry[0]: _cells(entry, False) for entry in _scores_at(FIELD, SHORT)}
    ranked = _errors_at(_read(f"{FRONTIER}/frontier.json"), SHORT)
    lines = [[entry[0], *_cells(entry, True), *scored.get(entry[0], ["-", "", ""])] for entry in ranked]
    header = ["method", "attention error", "minus per head", "", "score", "minus per head", ""]
    return markdown_table(header, lines)


def _field(folder: str) -> str:
    """Every method of one run at equal rows."""
    field, (paper, levels) = _read(f"{folder}/summary.json"), FIELDS[folder]
    dense = next(entry for entry in field["conditions"] if entry["method"] == "dense")["cells"][MEAN]["score"]["value"]
    found = (
        f"\n## Task scores at equal rows: {RUNS[folder]}\n\n{field['mean']}, {_prompts(field)}; {field['data']}. "
        f"Folder `{folder}`. Each prompt's score lies on a straight line over rows between two measured budgets, `won` "
        f"is a higher score, and differences are to {paper}. Dense decoding scores {dense:.1f}.\n"
    )
    for level in levels:
        found += (
            f"\n### Scores at {level:.0f} % of the rows\n\n{_ranked_table(_scores_at(folder, level), False, paper)}"
        )
    return found


def _prompts(summary: dict[str, Any]) -> str:
    return f"{summary['n']} prompts per task" + ("" if _fewest(summary) == summary["n"] else " at most")


def _frontier(folder: str) -> str:
    """Attention errors of every method of one model and length at equal rows."""
    frontier, (model, paper, levels) = _read(f"{folder}/frontier.json"), FRONTIERS[folder]
    prompts = [f"{count} prompt{'s' * (count > 1)} of {task}" for task, count in frontier["prompts_per_task"].items()]
    known = ", and the embedded model knows this project's synthetic tasks alone" if folder == FRONTIER else ""
    found = (
        f"\n## Attention error, {model}, {frontier['settings']['length']} tokens\n\n"
        f"`latent-santa diagnose frontier`, {frontier['calls']} dense calls of {' and '.join(prompts)}. Each method "
        "stands at the same percentage of dense's rows: between its measured budgets, the logarithm of each prompt's "
        "error is taken from a straight line over rows. Differences are to the paper's method on the same prompts at "
        f"the same rows, {paper}. A method is missing at a level outside its measured budgets. An attention error is "
        f"no task score{known}.\n\n![attention error against rows read]({folder}/frontier.png)\n"
    )
    for level in levels:
        ranked = _ranked_table(_errors_at(frontier, level, paper), True, paper)
        found += f"\n### Errors at {level:.0f} % of the rows\n\n{ranked}"
    for name, level in _single(frontier).items():
        ranked = _ranked_table(_errors_at(frontier, level, paper), True, paper)
        found += f"\n### {level:.1f} % of the rows, where {name} stands\n\n{ranked}"
    return found + (
        "\n### Methods that scan every key\n\nBound: the rows that were attended, of dense's, as if no scan had been "
        f"needed to choose them.\n\n{_scans_table(frontier)}"
    )


def page() -> str:
    """The whole page."""
    parts = [
        "# Results: every method at equal rows\n\n"
        "Made of the files in these folders by `make results`; no number is typed by hand. `won` and `lost` say that a "
        "95 % interval of the paired difference leaves out zero; nothing says that it does not, "
        f"or that a task has fewer than {FEWEST} prompts. Rows read are Equation "
        "13 (GQA) or 14 (MLA), routing included; they are logical access, not time.\n"
    ]
    parts += [_frontier(folder) for folder in FRONTIERS]
    parts += [_field(folder) for folder in FIELDS]
    for folder, title in RUNS.items():
        summary = _read(f"{folder}/summary.json")
        parts.append(
            f"\n## Task scores: {title}\n\n{summary['mean']}, {_prompts(summary)}; {summary['data']}. Folder "
            f"`{folder}`. `lost` means below dense decoding.\n\n{_scores_table(summary)}"
        )
        if summary.get("against"):
            parts.append(
                f"\nPaired with {summary['against']['setting']}, which reads {summary['against']['access']:.1f} %:\n\n"
                + markdown_table(*against_table(summary))
            )
        if summary["estimators"]:
            span = summary["estimators"]["all"]
            parts.append(
                f"\nPooled minus per head over all settings that have both: {span['value']:+.1f} points "
                f"[{span['low']:+.1f}, {span['high']:+.1f}].\n"
            )
    return "".join(parts)


def with_short(readme: str) -> str:
    """README's text with the ranking between its marks. Raises ValueError if a mark is not there."""
    start, stop = readme.index(MARKS[0]) + len(MARKS[0]), readme.index(MARKS[1])
    return f"{readme[:start]}\n{short()}\n{readme[stop:]}"


if __name__ == "__main__":
    (ROOT / "README.md").write_text(page(), encoding="utf-8")
    readme = ROOT.parent / "README.md"
    readme.write_text(with_short(readme.read_text(encoding="utf-8")), encoding="utf-8")
