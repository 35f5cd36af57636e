"""The page of results is its generator's output, and what the generator says follows from the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from latent_santa.eval.report import results_page

ROOT = Path(__file__).parents[1]


def test_the_page_and_readme_are_what_the_files_give():
    assert (ROOT / "eval/results/README.md").read_text(encoding="utf-8") == results_page.page()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
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
    found = results_page.ranking({"lines": lines, "settings": {"seed": 0}}, 40.0)
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
