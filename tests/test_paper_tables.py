"""The paper's values beside a run's, and which of its conditions a run meets."""

from __future__ import annotations

import numpy as np
import pytest

from latent_santa.config import SantaConfig
from latent_santa.eval.report import paper_tables, tables
from latent_santa.eval.report.summary import summarise
from latent_santa.eval.run.conditions import expand
from tests.eval_support import DENSE
from tests.report_runs import PAPER, POOLED, make_run, same


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
