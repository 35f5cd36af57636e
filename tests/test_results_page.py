"""The page of results is its generator's output, and what the generator says follows from the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from latent_santa.eval.report import equal_rows, results_page

ROOT = Path(__file__).parents[1]


def test_the_page_and_readme_are_what_the_files_give():
    assert (ROOT / "eval/results/README.md").read_text(encoding="utf-8") == results_page.page()
    readme = (ROOT / "eval/README.md").read_text(encoding="utf-8")
    assert results_page.with_short(readme) == readme


def line(name, kv, errors, bound=None):
    return {"name": name, "S": 1, "kv": kv, "bound": bound, "full": False, "error_of_prompt": {"fwe": errors}}


def test_methods_are_compared_at_equal_rows_on_the_same_prompts():
    lines = [
        line(results_page.PAPER, 30.0, [0.4, 0.8]),
        line(results_page.PAPER, 50.0, [0.2, 0.4]),
        line("better", 20.0, [0.3, 0.5]),
        line("better", 60.0, [0.1, 0.3]),
        line("worse", 40.0, [0.5, 0.7]),
        line("out of reach", 41.0, [0.0, 0.0]),
        line("a scan", 100.0, [0.0, 0.0], bound=3.0),
    ]
    found = equal_rows.ranking(equal_rows.errors({"lines": lines}), 40.0, results_page.PAPER, 0, True)
    assert [name for name, _, _ in found] == ["better", results_page.PAPER, "worse"]
    (_, better, minus), (_, paper, nothing), (_, _, lost) = found
    assert (better["mean"], paper["mean"]) == pytest.approx(
        (0.03**0.5 / 2 + 0.15**0.5 / 2, 0.08**0.5 * 1.5)
    ) and nothing is None
    # each prompt's difference of geometric means; resampled means lie between the two
    first, second = 0.03**0.5 - 0.08**0.5, 0.15**0.5 - 0.32**0.5
    assert [minus[end] for end in ("mean", "low", "high")] == pytest.approx([(first + second) / 2, second, first])
    assert results_page.verdict(minus["low"], minus["high"], lower_wins=True) == "won"
    assert results_page.verdict(lost["low"], lost["high"], lower_wins=True) == "lost"


@pytest.mark.parametrize(
    ("span", "said"), [((-2.0, 0.0), ""), ((-2.0, -1.0), "lost"), ((1.0, 2.0), "won"), ((None, None), "")]
)
def test_an_interval_that_reaches_zero_says_nothing(span, said):
    assert results_page.verdict(*span, lower_wins=False) == said


def test_every_committed_run_of_scores_is_on_the_page():
    root = ROOT / "eval/results"
    assert {str(path.parent.relative_to(root)) for path in root.rglob("summary.json")} == set(results_page.RUNS)


def test_scores_at_equal_rows_lie_on_a_straight_line_between_budgets(tmp_path):
    """Scans and dense decoding, which read every row, are left out; prompts are in one order whatever the file's."""
    answers = {"paper": ("10", "11"), "paper2": ("11", "11"), "other": ("00", "10"), "other2": ("10", "11")}
    lines = [f"{name},fwe/{i},{own[0][i]}\n{name},vt/{i},{own[1][i]}" for name, own in answers.items() for i in (1, 0)]
    (tmp_path / "answers.csv").write_text("setting,prompt,score\n" + "\n".join(lines) + "\n")

    def entry(name, slug, budget, access):
        return {"name": name, "slug": slug, "S": budget, "cells": {"mean": {"access": access}}}

    paper, conditions = results_page.PAPER, [entry("dense (SDPA)", "dense", None, 100.0), entry("scan", "s", 8, 100.0)]
    conditions += [entry(paper, "paper", 8, 20.0), entry(paper, "paper2", 16, 40.0)]
    conditions += [entry("other", "other", 8, 25.0), entry("other", "other2", 16, 35.0)]
    methods = equal_rows.scores({"conditions": conditions}, tmp_path / "answers.csv", "mean")
    assert set(methods) == {paper, "other"}
    assert equal_rows.at_rows(methods[paper], 25.0, False) == {"fwe": [1.0, 0.25], "vt": [1.0, 1.0]}
    assert equal_rows.at_rows(methods["other"], 24.0, False) is None
    (name, least, minus), (best, most, nothing) = equal_rows.ranking(methods, 30.0, paper, 0, False)
    assert (name, best, least["mean"], most["mean"], nothing) == ("other", paper, 0.5, 0.875, None)
    assert minus["mean"] == pytest.approx((-0.5 - 0.5 + 0.0 - 0.5) / 4)
