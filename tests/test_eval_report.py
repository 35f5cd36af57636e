"""From results to tables: pooling, missing results, warnings, and the picture."""

from __future__ import annotations

import csv
import io
import json
import re
import struct
import sys
from dataclasses import replace

import pytest

from latent_santa.config import SantaConfig
from latent_santa.eval.cli import main
from latent_santa.eval.errors import EvalError
from latent_santa.eval.report import plots, tables
from latent_santa.eval.report.summary import exit_code, pooled_access, summarise, write_reports
from latent_santa.eval.run.conditions import slug
from latent_santa.eval.run.store import Store
from latent_santa.methods import METHODS
from tests.eval_support import DENSE
from tests.report_runs import PAPER, POOLED, TASKS, make_run, same


def test_scores_retained_differences_and_pooled_access(tmp_path):
    scores = {DENSE: same([1, 1, 1, 0]), PAPER[0]: same([1, 0, 1, 0])}
    summary = summarise(make_run(tmp_path, scores))
    dense, sparse = (row["cells"]["mean"] for row in summary["conditions"])
    assert dense["score"]["value"] == 75 and dense["retained"] == 100 and dense["access"] == 100
    assert dense["difference"] is None
    assert sparse["score"]["value"] == 50 and sparse["retained"] == pytest.approx(66.67)
    assert sparse["difference"]["value"] == -25 and sparse["difference"]["high"] <= 0
    assert sparse["access"] == round(100 * (30 + 31 + 32 + 33) / 240, 2)
    assert sparse["access_without_routing"] == round(100 * (20 + 21 + 22 + 23) / 240, 2)
    assert summary["conditions"][1]["hit_cap"] == 3
    assert summary["warnings"] == ["from the data"]


def test_access_is_pooled_and_not_averaged():
    results = [{"access": {"numerator": 10, "row_read": 5, "denominator": 10}}]
    results.append({"access": {"numerator": 30, "row_read": 30, "denominator": 90}})
    assert [pooled_access(results, False, part) for part in ("numerator", "row_read", "bound")] == [40.0, 35.0, None]
    assert pooled_access([{"access": {}}], dense=True) == 100.0
    assert pooled_access([{"access": {}}], dense=False) is None


def test_missing_and_failed_prompts_leave_no_mean(tmp_path):
    scores = {DENSE: same([1, 1, 1, 1]), PAPER[0]: same([1, 1, 1, 1]), PAPER[1]: same([1, 1, 1, 1])}
    scores[PAPER[0]] = same([1, 1, 1, 1]) | {"fwe": [1, "error", 1, 1]}
    scores[PAPER[1]] = same([1, 1, 1, 1]) | {"qa_1": [1, 1, None, None]}
    summary = summarise(make_run(tmp_path, scores))
    _, failed, missing = summary["conditions"]
    assert failed["cells"]["mean"]["score"] is None and failed["cells"]["fwe"]["score"] is None
    assert failed["cells"]["qa_1"]["score"]["value"] == 100 and failed["failed"] == ["fwe/000001"]
    assert missing["cells"]["mean"]["score"] is None and missing["cells"]["fwe"]["score"]["value"] == 100
    assert any("1 prompts failed (fwe/000001" in text for text in summary["warnings"])
    assert any("2 of 12 prompts have no result" in text for text in summary["warnings"])
    assert "| - |" in tables.markdown(summary) and exit_code(summary) == 1


def test_estimators_are_compared_on_matched_prompts(tmp_path):
    lower, upper = PAPER
    scores = {lower: same([1, 0, 0, 0]), upper: same([1, 1, 0, 0])}
    scores |= {replace(upper, estimator="pooled"): same([1, 1, 1, 0]), POOLED: same([1, 1, 1, 0])}
    summary = summarise(make_run(tmp_path / "both", scores))
    both = summary["estimators"]
    assert [(row["name"], row["S"], row["difference"]["value"]) for row in both["settings"]] == [
        ("SANTA++ k-means 16/4", 256, 25.0),
        ("SANTA++ k-means 16/4", 128, 50.0),
    ]
    # a prompt's mean difference over the two settings is (0, 1/2, 1, 0); pairs vary less than scores do
    assert both["all"]["value"] == 37.5 and 0 <= both["all"]["low"] < 37.5 < both["all"]["high"]
    access = round(100 * (30 + 31 + 32 + 33) / 240, 2)
    assert both["settings"][0]["access"] == {"per_head": access, "pooled": access}
    assert "| all of these together |  |  |  | +37.50 [" in tables.markdown(summary)

    scores[POOLED] = same([1, 1, None, 0])
    assert [row["S"] for row in summarise(make_run(tmp_path / "part", scores))["estimators"]["settings"]] == [256]
    alone = summarise(make_run(tmp_path / "alone", {lower: same([1, 0, 0, 0])}))
    assert alone["estimators"] is None and "Pooled minus per head" not in tables.markdown(alone)


def test_settings_are_paired_with_the_one_that_is_named(tmp_path):
    lower, upper = sorted(PAPER, key=lambda condition: condition.budget)
    store = make_run(
        tmp_path, {DENSE: same([1, 1, 1, 1]), lower: same([1, 0, 0, 1]), upper: same([1, 1, 0, 0])}, data="builtin"
    )
    named = "SANTA++ k-means 16/4 per head S=256"
    found = summarise(store, against=named)["against"]
    assert found == summarise(store, against=slug(upper))["against"] and found["setting"] == named
    dense, other = sorted(found["lines"], key=lambda line: line["setting"] != "dense (SDPA)")
    reads = round(100 * (30 + 31 + 32 + 33) / 240, 2)
    assert (found["access"], other["access"], other["share"], dense["access"]) == (reads, reads, 1.0, 100.0)
    assert dense["share"] == round(240 / 126, 3) and dense["difference"]["value"] == 50.0
    # differences of (0, -1, 0, 1): zero, with an interval on both sides; unpaired scores would not know the prompts
    assert other["difference"]["value"] == 0 and other["difference"]["low"] == -other["difference"]["high"] < 0
    write_reports(store, plot=False, against=named)
    text = (tmp_path / "table.md").read_text()
    assert f"## Against {named}, mean of 3 tasks" in text and f"It reads {reads:.2f} % itself." in text
    assert "| dense (SDPA) | 100.00 | 1.91 | +50.00 [" in text
    with pytest.raises(EvalError, match="--against 'nothing': the run has dense .SDPA., SANTA"):
        summarise(store, against="nothing")
    lines = list(csv.DictReader(io.StringIO((tmp_path / "answers.csv").read_text())))
    first = {"setting": slug(lower), "prompt": f"{min(TASKS)}/000001", "score": "0"}
    assert len(lines) == 3 * 12 and lines[13] == first | {"numerator": "31", "denominator": "60"}


def test_a_stopped_run_is_compared_on_what_every_setting_answered(tmp_path):
    lower, upper = sorted(PAPER, key=lambda condition: condition.budget)
    part = {task: [1, 0, 1, None] for task in TASKS} | {TASKS[1]: [None, 1, "error", None], TASKS[2]: [None] * 4}
    store = make_run(tmp_path, {DENSE: same([1, 1, 1, 1]), lower: part, upper: same([None] * 4)})
    with pytest.raises(EvalError, match="--against .*--answered compares on those it has"):
        summarise(store, against=slug(lower))
    whole = summarise(store)
    assert whole["conditions"][1]["cells"]["mean"]["score"] is None and exit_code(whole) == 1
    summary = summarise(store, answered=True, against=slug(lower))
    assert summary["tasks"] == list(TASKS[:2]) and (summary["n"], summary["fewest"]) == (3, 1)
    dense, found = summary["conditions"]
    assert (dense["done"], found["done"], found["failed"]) == (4, 4, []) and exit_code(summary) == 0
    assert found["cells"]["mean"]["score"]["value"] == round(100 * (2 / 3 + 1) / 2, 2)
    assert summary["against"]["lines"][0]["difference"]["value"] == round(100 * (1 / 3 + 0) / 2, 2)
    left = [text for text in summary["warnings"] if "left out" in text]
    assert left == [
        "SANTA++ k-means 16/4 per head S=256 has no answer and is left out",
        "4 of 12 prompts, which every setting answered; the others are left out",
    ]
    assert "up to 3 prompts per task" in tables.markdown(summary)
    with pytest.raises(EvalError, match="no prompt has an answer under every setting"):
        summarise(make_run(tmp_path / "none", {DENSE: same([None] * 4)}), answered=True)


def test_sparse_above_dense_and_never_sparse_are_flagged(tmp_path):
    scores = {DENSE: same([0, 0, 1, 1]), PAPER[0]: same([1, 1, 1, 1]), PAPER[1]: same([0, 0, 1, 1])}
    store = make_run(tmp_path, scores)
    assert exit_code(summarise(store)) == 0
    path = store.results_directory / f"{slug(PAPER[1])}.jsonl"
    path.write_text(path.read_text().replace('"sparse_calls": 3', '"sparse_calls": 0'))
    summary = summarise(Store(tmp_path))
    warnings = summary["warnings"]
    assert exit_code(summary) == 1
    assert any(
        text.startswith("SANTA++ k-means 16/4 per head S=128 is above dense on mean of 3 tasks by 50")
        for text in warnings
    )
    assert any(
        text.startswith("INVALID, SANTA++ k-means 16/4 per head S=256: not one sparse call, and") for text in warnings
    )


def test_files_are_rebuilt_the_same(tmp_path):
    store = make_run(tmp_path, {c: same([1, 1, 0, 1]) for c in (DENSE, *PAPER, POOLED)}, data="builtin")
    summary, notes = write_reports(store)
    names = ("summary.json", "summary.csv", "answers.csv", "table.md", "access_accuracy.png")
    before = {name: (tmp_path / name).read_bytes() for name in names}
    for name in names:
        (tmp_path / name).unlink()
    write_reports(Store(tmp_path))
    assert {name: (tmp_path / name).read_bytes() for name in names} == before
    assert notes == [] and json.loads(before["summary.json"]) == summary
    assert struct.unpack(">II", before["access_accuracy.png"][16:24]) == (1125, 750)
    lines = list(csv.DictReader(io.StringIO(before["summary.csv"].decode())))
    assert len(lines) == 4 * 4 and lines[4]["S"] == "128" and lines[4]["score"] == "75.0"
    text = before["table.md"].decode()
    assert "not RULER scores" in text and "paper:" not in text and "all 13" not in text
    assert "RULER" not in text.replace("not RULER scores", "")


def test_a_picture_of_many_methods_has_its_names_below(tmp_path):
    methods = [SantaConfig(method=name, budget=64) for name, method in METHODS.items() if "budget" in method.settings]
    assert len(methods) > plots.FEW
    write_reports(make_run(tmp_path, {c: same([1, 0, 1, 1]) for c in (DENSE, *methods)}))
    assert struct.unpack(">II", (tmp_path / "access_accuracy.png").read_bytes()[16:24]) == (1125, 1350)
    assert len({plots.look(number) for number in range(30)}) == 30


def test_without_results_there_is_no_picture(tmp_path):
    store = make_run(tmp_path, {DENSE: same([None] * 4)})
    summary, picture = summarise(store), tmp_path / "access_accuracy.png"
    picture.write_bytes(b"of results that no longer count")
    assert write_reports(store)[1] == ["no picture: no setting has all of its results yet"] and not picture.exists()
    with pytest.raises(plots.NoPicture, match="no setting has all of its results yet"):
        plots.access_accuracy(summary)
    assert tables.markdown(summary).count("| dense (SDPA) | - | - |") == 4


def test_rows_needed_goes_between_budgets():
    points = [(40.0, 80.0), (60.0, 90.0), (90.0, 100.0)]
    assert tables.rows_needed(points, 85.0) == 50.0
    assert tables.rows_needed(points, 95.0) == 75.0
    assert tables.rows_needed(points, 70.0) == 40.0
    assert tables.rows_needed(points, 100.5) is None


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("matplotlib", "matplotlib is not installed: pip install 'latent-santa[eval]'"),
        ("matplotlib.backends.backend_agg", "matplotlib does not import (No module named 'matplotlib.backends.backend"),
    ],
)
def test_what_the_picture_needs_is_said(tmp_path, monkeypatch, module, said):
    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name == module:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    _, notes = write_reports(make_run(tmp_path, {DENSE: same([1, 1, 1, 1])}))
    assert len(notes) == 1 and notes[0].startswith(f"no picture: {said}")
    assert not (tmp_path / "access_accuracy.png").exists() and (tmp_path / "table.md").exists()


def test_damaged_results_are_named_in_the_table(tmp_path):
    store = make_run(tmp_path, {DENSE: same([1, 1, 1, 1])})
    path = store.results_directory / "dense.jsonl"
    path.write_text(path.read_text().replace('"score": 1', '"score": NaN', 1))
    summary = summarise(Store(tmp_path))
    assert "dense.jsonl: 1 results do not count: score is nan" in summary["warnings"]
    assert summary["conditions"][0]["cells"]["mean"]["score"] is None and exit_code(summary) == 1
    assert "nan" not in tables.markdown(summary).replace("score is nan", "").lower()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"settings": {"tasks": "fwe"}}, "settings.tasks is 'fwe', not of type list"),
        ({"settings": {"n": None}}, "settings.n is None, not of type int"),
        ({"origin": {"data": 3}}, "origin.data is 3, not of type str"),
        ({"conditions": [{"method": "magic"}]}, "conditions.*magic"),
        ({"conditions": [{"method": "dense", "temperature": 2}]}, "conditions.*temperature"),
        ({"conditions": ["dense"]}, "conditions.*'dense'"),
    ],
)
@pytest.mark.parametrize("command", ["report", "paper"])
def test_a_run_of_another_shape_is_refused_by_name(tmp_path, capsys, change, said, command):
    store = make_run(tmp_path, {DENSE: same([1, 1, 1, 1])})
    manifest = store.manifest()
    for name, value in change.items():
        manifest[name] = manifest[name] | value if isinstance(value, dict) else value
    store.write_manifest(manifest)
    assert main([command, str(tmp_path)]) == 2
    assert re.search(f"manifest.json.*{said}", capsys.readouterr().err)
