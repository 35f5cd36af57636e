"""From results to tables: pooling, missing results, warnings, the paper's values, and the picture."""

from __future__ import annotations

import csv
import io
import json
import re
import struct
import sys
from dataclasses import fields, replace

import numpy as np
import pytest

from latent_santa.config import SantaConfig
from latent_santa.eval.cli import main
from latent_santa.eval.errors import EvalError
from latent_santa.eval.report import paper_tables, plots, tables
from latent_santa.eval.report.summary import exit_code, pooled_access, summarise, write_reports
from latent_santa.eval.run.conditions import SWEPT, expand, from_manifest, slug, swept
from latent_santa.eval.run.freeze import check_resume
from latent_santa.eval.run.store import Prompt, Store
from latent_santa.eval.sources.samples import make_sample
from latent_santa.methods import METHODS
from tests.eval_support import DENSE, santapp

PAPER = [santapp(s, "kmeans", "per_head") for s in (128, 256)]
POOLED = santapp(128, "kmeans", "pooled")
TASKS = paper_tables.MLA_TASKS


def make_run(directory, scores, data="jsonl", model="deepseek-ai/DeepSeek-V2-Lite-Chat", n=4, tokens=8000, **settings):
    """A run whose results are given: condition -> task -> scores. Reads: 10 routing, 20 rows, 60 dense a prompt."""
    store = Store(directory)
    prompts = [
        Prompt(make_sample(task, i, f"Question {i}?", ["x"], max_new_tokens=4, source=data), tokens + i, "hash")
        for task in TASKS
        for i in range(n)
    ]
    base = {"model": model, "length": 8192, "n": n, "tasks": list(TASKS), "data_seed": 42, "data": data, "seed": 0}
    base |= {"kmeans_seed": 0, "first_token": "replay", "noise": "independent", "quant": "int8", "dtype": "bfloat16"}
    base |= {"answer_prefix": "assistant", "select": "sample", "device": "cuda"}
    base |= {"kmeans_engine": "sklearn", "math_sdpa": False}
    manifest = {"settings": base | settings, "conditions": [swept(c) for c in scores], "origin": {"data": data}}
    manifest["loaded"] = {"parameters": 1000, "int8_parameters": 970, "int8_meant": 970}
    store.freeze(manifest | {"warnings": ["from the data"], "environment": {}}, prompts)
    for condition, by_task in scores.items():
        for prompt in prompts:
            number = int(prompt.sample.id[-6:])
            value = by_task[prompt.sample.task][number]
            if value is None:
                continue
            result = {"id": prompt.sample.id, "run": store.manifest()["key"], "text_sha256": prompt.sample.text_sha256}
            if value == "error":
                store.append(slug(condition), result | {"error": "OutOfMemoryError"})
                continue
            reads = (60, 60) if condition == DENSE else (30 + number, 20 + number)
            result |= {"score": value, "output": "x", "hit_cap": number == 0, "n_new": 3}
            result |= {"sparse_calls": 0 if condition == DENSE else 3, "dense_calls": 0, "seconds": 1.0}
            result["access"] = {"numerator": reads[0], "row_read": reads[1], "denominator": 60}
            store.append(slug(condition), result)
    return store


def same(values):
    return {task: values for task in TASKS}


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


def test_paper_values_stand_beside_the_papers_settings_only(tmp_path):
    scores = {c: same([1, 1, 1, 0]) for c in (DENSE, *PAPER, POOLED)}
    summary = summarise(make_run(tmp_path / "a", scores))
    cells = [row["cells"] for row in summary["conditions"]]
    assert cells[0]["mean"]["paper"] == {"access": 100.0, "score": 86.22, "half": 4.56, "table": "15-18"}
    assert cells[1]["qa_1"]["paper"]["score"] == 54.0 and cells[2]["fwe"]["paper"]["access"] == 62.25
    assert all(cell["paper"] is None for cell in cells[3].values())
    text = tables.markdown(summary)
    assert "paper: KV (%)" in text and "69.67 ± 5.92" in text
    short = summarise(make_run(tmp_path / "short", scores, tokens=600))
    assert "the longest prompt has 603 tokens" in short["warnings"][1]
    assert not any(cell["paper"] for row in short["conditions"] for cell in row["cells"].values())
    others = ({"data": "builtin"}, {"model": "Qwen/Qwen2.5-7B-Instruct"}, {"length": 4096}, {"noise": "shared"})
    for changed in others:
        other = summarise(make_run(tmp_path / str(changed), scores, **changed))
        assert not any(
            cell["paper"]
            for row in other["conditions"]
            for cell in row["cells"].values()
            if changed.get("model") is None
        )
        if "model" in changed:  # Table 11 has these tasks at 8K, but no mean over three of them
            row = other["conditions"][1]["cells"]
            assert row["mean"]["paper"] is None and row["qa_1"]["paper"]["table"] == "11"


def test_the_papers_tables_are_copied_right():
    by_number = {table.number: paper_tables.numbers(table) for table in paper_tables.TABLES}
    sizes = {number: len(cells) for number, cells in by_number.items()}
    helmet = {"2": 16, "3": 13, "8": 16, "9": 10 * 14 + 6 * 4, "10": 10 * 14 + 6 * 4}
    assert sizes == {"4": 19, "11": 13 * 13, "6": 10 * 14, "12": 19 * 13, "15-18": 20} | helmet
    sums = {"4": "12", "6": "6", "15-18": "15-18", "2": "10", "8": "9", "9": "9", "10": "10"}
    for mean_of, parts, tolerance in ((number, of, 0.006) for number, of in sums.items()):
        tasks = next(t for t in paper_tables.TABLES if t.number == mean_of).tasks
        for (method, budget, column), value in by_number[mean_of].items():
            if column == "mean":
                mean = np.mean([by_number[parts][method, budget, task].score for task in tasks])
                assert value.score == pytest.approx(mean, abs=tolerance), (mean_of, method, budget)
    assert by_number["12"]["contiguous", 1024, "niah_multikey_3"].score == 60.20
    assert by_number["11"]["kmeans", 512, "qa_2"].access == 50.27


def test_what_the_numbers_of_helmet_and_longbench_tell():
    by_number = {table.number: paper_tables.numbers(table) for table in paper_tables.TABLES}
    for number in ("9", "10"):  # the interval of the mean over all tasks is no interval of a mean
        dense = [value for (method, _, column), value in by_number[number].items() if method == "dense"]
        *tasks, mean = dense
        assert mean.half == pytest.approx(np.mean([task.half for task in tasks]), abs=0.006)
    for value in by_number["3"].values():  # four answers to each of 503 questions
        steps = value.score * 4 * 503 / 100
        assert abs(steps - round(steps)) < 0.11
    dense = by_number["3"]["dense", None, "mean"]
    assert abs(dense.score * 5.03 - round(dense.score * 5.03)) > 0.4
    share = dense.score / 100
    assert dense.half == pytest.approx(196 * (share * (1 - share) / 2012) ** 0.5, abs=0.05)


def test_conditions_of_helmet_and_longbench(tmp_path):
    manifest = make_run(tmp_path, {DENSE: same([1, 1, 1, 1])}, data="helmet", shots=2, chat="helmet").manifest()
    helmet, longbench = (next(t for t in paper_tables.TABLES if t.number == number) for number in ("10", "3"))
    found = {check.what: check for check in paper_tables.checks(helmet, manifest)}
    assert found["data"].verdict == paper_tables.HOLDS and found["± of the mean"].verdict == paper_tables.MISSED
    assert (found["examples before the question"].run, found["chat template"].run) == ("2", "helmet")
    assert {found[what].verdict for what in ("chat template", "HELMET commit")} == {paper_tables.UNKNOWN}
    assert next(c for c in paper_tables.checks(longbench, manifest) if c.what == "data").verdict == paper_tables.MISSED
    for settings, verdict in (({}, paper_tables.MISSED), ({"suffix": "C3.txt"}, paper_tables.HOLDS)):
        asked = manifest | {"settings": manifest["settings"] | settings, "origin": {"data": "longbench"}}
        found = {check.what: check for check in paper_tables.checks(longbench, asked)}
        assert found["words behind the prompt"].verdict == verdict and found["data"].verdict == paper_tables.HOLDS
        assert found["opening"].verdict == found["answers per prompt"].verdict == paper_tables.MISSED


def test_conditions_of_a_table_hold_miss_or_are_unknown(tmp_path):
    conditions = expand(DENSE, ["dense", "santa++"], [128, 256, 512, 1024], ["per_head"], ["kmeans"], [(16, 4)], [16])
    store = make_run(tmp_path, {c: same([1, 1, 1, 1]) for c in conditions}, n=4)
    table = next(t for t in paper_tables.TABLES if t.number == "15-18")
    verdicts = {check.what: check.verdict for check in paper_tables.checks(table, store.manifest())}
    assert verdicts.pop("prompts per task") == paper_tables.MISSED
    unknown = {what for what, verdict in verdicts.items() if verdict == paper_tables.UNKNOWN}
    assert unknown == {"answer prefix", "which prompts were selected", "RULER commit", "tokenizer that sized the data"}
    assert all(verdicts[what] == paper_tables.HOLDS for what in set(verdicts) - unknown)
    qwen = {check.what: check.verdict for check in paper_tables.checks(paper_tables.TABLES[0], store.manifest())}
    assert qwen["model"] == paper_tables.MISSED and qwen["weights"] == paper_tables.UNKNOWN
    assert {qwen[what] for what in ("first token", "k-means engine", "k-means seed")} == {paper_tables.HOLDS}
    assert {check.verdict for check in paper_tables.checks(table, None)} == {paper_tables.UNKNOWN}
    builtin = {
        check.what: check.verdict
        for check in paper_tables.checks(table, store.manifest() | {"origin": {"data": "builtin"}})
    }
    assert builtin["data"] == paper_tables.MISSED


LINEAR_ONLY = {"parameters": 1000, "int8_parameters": 60, "int8_meant": 970}
# what is not as in the paper: the changed settings, what the manifest says of the weights, and how it is told
DEVIATIONS = {
    "first token": ({"first_token": "dense"}, {}, "dense"),
    "k-means engine": ({"kmeans_engine": "auto"}, {}, "torch"),
    "k-means seed": ({"kmeans_seed": 1}, {}, "1"),
    "SDPA's math backend": ({"math_sdpa": True}, {}, "enabled"),
    "seeds: sampling, data": ({"seed": 7}, {}, "7, 42"),
    "weights": ({}, {"loaded": LINEAR_ONLY}, "int8, 6.0 % of the parameters, of 97.0 %"),
}


@pytest.mark.parametrize("what", DEVIATIONS)
def test_a_condition_that_a_run_does_not_meet_is_told(tmp_path, what):
    settings, facts, told = DEVIATIONS[what]
    table = next(t for t in paper_tables.TABLES if t.number == "15-18")
    store = make_run(tmp_path, {DENSE: same([1, 1, 1, 1])})
    met, unmet = (
        {check.what: check for check in paper_tables.checks(table, manifest)}
        for manifest in (
            store.manifest(),
            store.manifest() | facts | {"settings": store.manifest()["settings"] | settings},
        )
    )
    assert met[what].verdict == paper_tables.HOLDS and unmet[what].verdict == paper_tables.MISSED
    assert unmet[what].run == told


def test_what_a_run_does_not_record_does_not_hold(tmp_path):
    """Runs from before the share of quantised parameters, the math backend and the engine were recorded."""
    store = make_run(tmp_path, {DENSE: same([1, 1, 1, 1])})
    manifest = {name: value for name, value in store.manifest().items() if name != "loaded"}
    manifest["settings"] = {
        name: value for name, value in manifest["settings"].items() if name not in ("math_sdpa", "kmeans_engine")
    }
    table = next(t for t in paper_tables.TABLES if t.number == "15-18")
    found = {check.what: check for check in paper_tables.checks(table, manifest)}
    for what in ("weights", "SDPA's math backend", "k-means engine"):
        assert found[what].verdict == paper_tables.MISSED, what
    assert found["weights"].run == "int8, of a share of the parameters that the run does not tell"


def test_a_table_asks_for_its_methods_and_lengths(tmp_path):
    conditions = [DENSE, *(SantaConfig(method="santa", budget=s) for s in (128, 256, 512, 1024))]
    manifest = make_run(tmp_path, {c: same([1, 1, 1, 1]) for c in conditions}).manifest()
    table = next(t for t in paper_tables.TABLES if t.number == "15-18")
    found = {check.what: check for check in paper_tables.checks(table, manifest)}
    assert found["methods"].run == "dense" and found["methods"].verdict == paper_tables.MISSED
    budgets = found["budgets, with P=16, R=4, per head"]
    assert budgets.run == "" and budgets.verdict == paper_tables.MISSED
    assert found["length"].verdict == paper_tables.HOLDS
    short = manifest | {"origin": manifest["origin"] | {"most_tokens": 640}}
    length = next(check for check in paper_tables.checks(table, short) if check.what == "length")
    assert length.run == "8192, longest prompt 640" and length.verdict == paper_tables.MISSED


def test_files_are_rebuilt_the_same(tmp_path):
    store = make_run(tmp_path, {c: same([1, 1, 0, 1]) for c in (DENSE, *PAPER, POOLED)}, data="builtin")
    summary, notes = write_reports(store)
    names = ("summary.json", "summary.csv", "table.md", "access_accuracy.png")
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


def test_without_results_there_is_no_picture(tmp_path):
    summary = summarise(make_run(tmp_path, {DENSE: same([None] * 4)}))
    with pytest.raises(plots.NoPicture, match="no setting has all of its results yet"):
        plots.access_accuracy(summary)
    assert tables.markdown(summary).count("| dense (SDPA) | - | - |") == 4


def test_rows_needed_goes_between_budgets():
    points = [(40.0, 80.0), (60.0, 90.0), (90.0, 100.0)]
    assert tables.rows_needed(points, 85.0) == 50.0
    assert tables.rows_needed(points, 95.0) == 75.0
    assert tables.rows_needed(points, 70.0) == 40.0
    assert tables.rows_needed(points, 100.5) is None


def test_conditions_expand_check_and_name_themselves():
    conditions = expand(
        DENSE,
        ["santa++", "santa", "dense", "centroid"],
        [128, 256],
        ["per_head", "pooled"],
        ["kmeans", "contiguous"],
        [(16, 4), (16, 1)],
        [4, 16],
    )
    assert conditions[0] == DENSE
    assert len(conditions) == 1 + 2 + 2 * 2 * 2 * 2 + 2 * 2 * 2
    own = expand(DENSE, ["santa", "snapkv"], [4], ["per_head"], [], [], [], budgets_of={"snapkv": [7, 9]})
    assert [(condition.method, condition.budget) for condition in own] == [("santa", 4), ("snapkv", 7), ("snapkv", 9)]
    slugs = [slug(condition) for condition in conditions]
    assert len(set(slugs)) == len(slugs) and "santapp_k-means_16-4_per_head_s128" in slugs and "dense" in slugs
    # A slug must never be the beginning of another's file name before a dot.
    assert all(set(slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_") for slug in slugs)
    assert from_manifest({"conditions": [swept(condition) for condition in conditions]}, "here") == list(conditions)
    # Files of finished runs have these names.
    assert {
        "dense",
        "santa_s128",
        "centroid_b16_k-means_s128",
        "centroid_b4_contiguous_s256",
        "santapp_contiguous_16-1_pooled_s256",
        "santapp_k-means_16-4_per_head_s128",
    } <= set(slugs)
    assert swept(conditions[0]) == {"method": "dense"} | dict.fromkeys(SWEPT)
    stages = [{"routing": "one_stage"}, *({"routing": "two_stage", "parents_per_head": k} for k in (32, 64))]
    routed = expand(DENSE, ["santa++", "santa"], [128], ["pooled"], ["contiguous"], [(16, 4)], [16], stages)
    assert [slug(condition) for condition in routed] == [
        "santapp_contiguous_16-4_pooled_s128",
        "santapp_contiguous_16-4_pooled_two-stage_k1-32_s128",
        "santapp_contiguous_16-4_pooled_two-stage_k1-64_s128",
        "santa_s128",
    ]
    assert from_manifest({"conditions": [swept(condition) for condition in routed]}, "here") == list(routed)
    noisy = expand(
        DENSE, ["santa++"], [128], ["pooled"], ["contiguous"], [(16, 4)], [16], noise=["independent", "shared"]
    )
    assert [slug(condition) for condition in noisy] == [
        "santapp_contiguous_16-4_pooled_s128",
        "santapp_contiguous_16-4_pooled_shared_noise_s128",
    ]
    kept = [{"exact_first": 0, "exact_last": 0}, {"exact_first": 16, "exact_last": 48}]
    exact = expand(DENSE, ["santa++", "centroid"], [128], ["pooled"], ["contiguous"], [(16, 4)], [16], exact=kept)
    assert [slug(condition) for condition in exact] == [
        "santapp_contiguous_16-4_pooled_s128",
        "santapp_contiguous_16-4_pooled_exact_16-48_s128",
        "centroid_b16_contiguous_s128",
        "centroid_b16_contiguous_exact_16-48_s128",
    ]
    assert from_manifest({"conditions": [swept(condition) for condition in exact]}, "here") == list(exact)
    assert not {"routing", "parents_per_head"} & {key for key, value in swept(routed[0]).items() if value is not None}
    with pytest.raises(EvalError, match="unknown estimator 'mean'.*per_head, pooled"):
        expand(DENSE, ["santa++"], [128], ["mean"], ["kmeans"], [(16, 4)], [16])
    with pytest.raises(EvalError, match="S=130.*divisible by P/R = 4"):
        expand(DENSE, ["santa++"], [130], ["pooled"], ["kmeans"], [(16, 4)], [16])


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


def test_options_of_two_stages_belong_to_two_stages(capsys):
    for options in (["--parents-per-head", "32"], ["--parent-summary", "diagonal"]):
        assert main(["ruler", "--model", "builtin:tiny", "--dry-run", *options]) == 2
        assert "are of --routing two_stage: add it, or leave them out" in capsys.readouterr().err


def test_every_condition_sets_every_field():
    """What a method does not use is as in the base, so nothing is left of the condition that ran before it."""
    base = replace(DENSE, seed=5, noise="shared", kmeans_seed=2, routing_dtype="int8")
    conditions = expand(base, list(METHODS), [128], ["pooled"], ["contiguous"], [(32, 2)], [8])
    assert [condition.method for condition in conditions] == sorted(METHODS, key=lambda method: method != "dense")
    for condition in conditions:
        own = {field for field, value in swept(condition).items() if value is not None}
        shared = {field.name for field in fields(condition)} - own
        assert all(getattr(condition, field) == getattr(base, field) for field in shared - {"method"})
        # baselines without representatives are per head, whatever was asked for
        used = METHODS[condition.method].settings
        assert condition.estimator == ("pooled" if {"estimator", "representatives"} <= set(used) else "per_head")


def test_santa_of_an_old_run_is_not_santa_of_today(tmp_path):
    santa = SantaConfig(method="santa", budget=128)
    manifest = {"settings": {}, "conditions": [swept(santa)], "environment": {}}
    store = Store(tmp_path / "old")
    store.freeze(manifest, [])
    with pytest.raises(EvalError, match="SANTA S=128: rows without replacement then, with replacement now"):
        check_resume(store, {}, (santa,))
    warning = "SANTA of this run sampled rows without replacement, as the method gumbel_rows does now"
    scores = {DENSE: same([1, 1, 1, 1]), santa: same([1, 1, 1, 1])}
    assert warning in summarise(make_run(tmp_path / "a", scores))["warnings"]
    assert warning not in summarise(make_run(tmp_path / "b", scores, draws="independent"))["warnings"]
