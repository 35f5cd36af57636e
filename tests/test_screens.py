"""What a terminal of 80 columns shows: whole numbers, sentences worked out from them, answers side by side."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from html import unescape

import pytest
from rich.console import Console

from latent_santa.eval.cli import main
from latent_santa.eval.report import outcomes, page, pairs, screen, tables
from latent_santa.eval.run.comparison import Outcome
from latent_santa.eval.run.store import Store

LONGEST = "SANTA++ contiguous 128/16 per head"


def setting(name, budget, kept, read, score, half=10.25, difference=None, bound=9.25):
    """One entry of a summary's conditions, as far as screens read it."""
    cell = {"retained": kept, "access": read, "access_without_routing": 9.25, "bound": bound, "score": None,
            "difference": None, "paper": None}  # fmt: skip
    if score is not None:
        cell["score"] = {"value": score, "half": half, "low": score - half, "high": score + half}
        if name != "dense (SDPA)":
            low, value, high = difference or (-9.0, -4.0, 1.0)
            cell["difference"] = {"value": value, "half": 5.0, "low": low, "high": high}
    method = "dense" if name.startswith("dense") else "santa++"
    return {"name": name, "S": budget, "method": method, "slug": name, "done": 12, "cells": {"mean": cell}}


def summary(*settings, n=4):
    found = {"mean": "mean of 13 tasks", "n": n, "length": 131072, "model": "deepseek-ai/DeepSeek-V2-Lite-Chat"}
    return found | {"conditions": [setting("dense (SDPA)", None, 100.0, 100.0, 80.0), *settings]}


def printed(what, width=80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return lines


def test_no_number_of_a_run_is_cut_at_80_columns():
    long = setting(LONGEST, 4096, 112.52, 105.31, 100.0)
    lines = printed(screen.table(summary(long, setting(LONGEST, 8, None, None, None))))
    (line,) = [line for line in lines if "4096" in line]
    assert line.endswith("4096  112.5 %  105.3 %  100.0 ± 10.2  ")
    assert LONGEST in line
    missing = next(line for line in lines if line.split()[-4:] == ["8", "-", "-", "-"])
    assert LONGEST in missing and not any("…" in line for line in lines)
    alone = printed(screen.table(summary(long, n=1)))
    assert not any("±" in line for line in alone)


def test_a_run_with_an_oracle_shows_bounds():
    """The scan of an oracle reads keys that it also attends, so that its bound is a number of its own."""
    plain = setting("b", 8, 96.0, 20.0, 76.0)
    with_oracle = summary(plain, setting("oracle_rows", 8, 97.0, 100.0, 77.0, bound=13.5))
    assert tables.header(summary(plain)) == [*tables.READS, *tables.SCORES]
    assert "bound" not in " ".join(printed(screen.table(summary(plain))))
    lines = printed(screen.table(with_oracle))
    assert any("bound" in line for line in lines)
    assert any("100.0 %  13.5 %  77.0" in line for line in lines) and any(
        "20.0 %   9.2 %  76.0" in line for line in lines
    )
    assert tables.header(with_oracle) == [*tables.READS, "bound (%)", *tables.SCORES]
    (cells,) = [tables.cells(with_oracle, e, "mean") for e in with_oracle["conditions"] if e["name"] == "oracle_rows"]
    assert cells[:5] == ["oracle_rows", "8", "100.00", "9.25", "13.50"] and len(cells) == 8


def test_the_sentence_names_the_fewest_rows_that_keep_the_score():
    settings = (
        setting("a", 512, 101.0, 80.0, 80.8),
        setting("b", 128, 95.0, 41.24, 76.0, difference=(-9.0, -4.0, 1.0)),
        setting("c", 64, 94.99, 20.0, 75.99),
    )
    told = screen.meaning(summary(*settings))
    assert told.startswith("b at S=128 keeps 95.0 % of dense's score and reads 41.2 % of its rows.")
    assert "-4.0 points, 95 % interval -9.0 to +1.0" in told and "4 prompts per task are a first look" in told
    close = setting("e", 128, 97.0, 42.2, 77.6)  # within a point of b's rows: no more to read, and more kept
    assert screen.meaning(summary(*settings, close)).startswith("e at S=128 keeps 97.0 %")
    equal = screen.meaning(summary(setting("f", 64, 100.0, 30.0, 80.0, difference=(0.0, 0.0, 0.0))))
    assert "Each of the 12 prompts scored as it did under dense" in equal and "interval" not in equal
    assert "so few can hide a loss in up to 22 % of prompts (95 % bound)" in equal
    assert screen.meaning(summary(settings[0])).startswith("a at S=512 keeps all of dense's score and reads 80.0 %")
    none = screen.meaning(summary(settings[2], setting("d", 8, 12.0, 5.0, 9.6)))
    assert none.startswith("No setting keeps 95 % of dense's score. The best: c at S=64 keeps 95.0 %")
    assert "interval" not in screen.meaning(summary(settings[1], n=1)) and "1 prompt per task is" in screen.meaning(
        summary(settings[1], n=1)
    )
    assert "first look" not in screen.meaning(summary(settings[1], n=20))
    no_budget = screen.meaning(summary(setting("magicpig K=10 L=150", None, 96.0, 30.0, 76.8)))
    assert no_budget.startswith("magicpig K=10 L=150 keeps 96.0 % of dense's score")
    zero = summary(setting("b", 8, None, 20.0, 0.0))
    zero["conditions"][0] = setting("dense (SDPA)", None, None, 100.0, 0.0)
    assert screen.meaning(zero).startswith("Dense attention scores 0")
    assert "yet" in screen.meaning(summary()) and "yet" in screen.meaning(summary(setting("b", 8, None, None, None)))


def outcome(name, budget, answer, tokens, percent, **changed) -> Outcome:
    rows = {"percent": percent, "denominator": 1000, "bytes_percent": percent}
    rows |= {"numerator": 10 * percent, "routing_read": 250, "row_read": 10 * percent - 250}
    rows["bound"] = rows["row_read"]
    values = {"teams_per_head": 1024, "agreement": 100.0, "error": 0.0312, "full": False, "seconds": 1.0}
    values |= {"peak_bytes": None, **changed}
    return Outcome(name=name, budget=budget, answer=answer, tokens=tokens, rows=rows, **values)


DENSE = outcome("dense (SDPA)", None, " 12, 34", [1, 2], 100.0, teams_per_head=None, error=None)
SAMPLED = (
    outcome(LONGEST, 4096, "12, 34", [1, 2], 87.5),
    outcome("SANTA++ k-means 16/4 pooled", 128, "34 and 12", [2, 1], 40.5, agreement=0.0),
    outcome("SANTA++ k-means 16/4 pooled", 8, "12 " * 60, [1] * 60, 27.25, agreement=1.6),
)


def test_no_number_of_a_comparison_is_cut_at_80_columns():
    wanted = ["12", "34"]
    lines = printed(outcomes.table((DENSE, *SAMPLED), wanted, 80))
    text = " ".join(lines)
    for numbers in (
        "4096 1024 2/2 87.5 87.5 100% 0.0312",
        "128 1024 2/2 40.5 40.5 0% 0.0312",
        "8 1024 1/2 27.2 27.2 2%",
    ):
        assert any(numbers in " ".join(line.split()) for line in lines), (numbers, text)
    assert "…" not in text and "routing" not in text
    wide = printed(outcomes.table((DENSE, *SAMPLED), wanted, 140), 140)
    assert any("87.5 25.0 62.5 87.5" in " ".join(line.split()) for line in wide)
    oracle = outcome("oracle_rows", 8, "12", [1], 100.0)
    oracle.rows["bound"] = 137
    for width, numbers in ((80, "8 1024 1/2 100.0 13.7 100.0"), (140, "8 1024 1/2 100.0 25.0 75.0 13.7 100.0")):
        lines = printed(outcomes.table((DENSE, *SAMPLED, oracle), wanted, width), width)
        assert any(numbers in " ".join(line.split()) for line in lines)


def test_a_comparison_says_what_reads_least_and_shows_every_answer():
    every, wanted = (DENSE, *SAMPLED), ["12", "34"]
    told = "SANTA++ k-means 16/4 pooled S=128 finds what dense finds and reads 40.5 % of its rows."
    assert outcomes.meaning(every, wanted).startswith(told)
    own = outcomes.meaning(every, [])
    assert own.startswith(f"{LONGEST} S=4096 gives dense's whole answer and reads 87.5 %")
    assert outcomes.meaning((DENSE, SAMPLED[2]), wanted) == "No sampled setting finds what dense finds."
    assert outcomes.meaning((DENSE,), wanted) == ""
    lines = printed(outcomes.answers(every, wanted))
    text = " ".join(" ".join(line[36:] for line in lines).split())
    assert text.count("the same") == 1 and text.startswith("12, 34 12, 34 the same 34 and 12")
    assert all(" ".join(o.answer.split()) in text for o in (DENSE, *SAMPLED[1:]))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of the embedded model over two tasks."""
    out = tmp_path_factory.mktemp("runs") / "a run"
    options = "--tasks single,fwe --length 400 --n 2 --budgets 8,32 --estimators pooled --parents contiguous".split()
    assert main(["ruler", "--model", "builtin:tiny", "--out", str(out), *options]) == 0
    return out


def test_a_report_shows_answers_and_paths_on_80_columns(run, monkeypatch, capsys):
    monkeypatch.setattr(tables, "output_console", lambda: Console(width=80))
    capsys.readouterr()
    assert main(["report", str(run)]) == 0
    shown = capsys.readouterr().out
    found = json.loads((run / "summary.json").read_text())
    words = " ".join(shown.split())
    assert screen.meaning(found) in words and f"latent-santa report '{run}'" in words
    assert f"Picture: {run / 'access_accuracy.png'}" in words
    first = Store(run).prompts()[0].sample
    assert f"{first.id} (" in words and ", ".join(first.references) in words
    chosen = screen.chosen(found)
    for slug in ("dense", chosen["slug"]):
        answer = Store(run).results(slug)[first.id]["output"]
        assert "".join(answer.split()) in "".join(shown.split())


def test_a_page_needs_nothing_else_and_has_every_answer(run, capsys):
    assert main(["report", str(run), "--html"]) == 0
    text = (run / "report.html").read_text()
    assert not re.search(r"(src|href)=\"(?!data:)", text) and "http" not in text
    assert f"Page:       {run / 'report.html'}" in capsys.readouterr().out
    found, store = json.loads((run / "summary.json").read_text()), Store(run)
    plain = " ".join(unescape(re.sub(r"</?mark>", "", text)).split())
    assert screen.meaning(found) in plain and all(tables.title(found, c) in plain for c in tables.columns_of(found))
    for entry in found["conditions"]:
        for result in store.results(entry["slug"]).values():
            assert f"<td>{100 * result['score']:.0f}</td><td>{' '.join(result['output'].split())}</td>" in plain


# a table of three columns in as little of a page as the script touches
FAKE_PAGE = """
const cell = text => ({ textContent: text });
const texts = ["9 %|b|-", "10 %|a|+1.5 [1, 2]", "2 %|c|-3.0 [-4, -2]"];
const body = texts.map(line => ({ cells: line.split("|").map(cell) }));
const rows = [{ cells: [] }, ...body];
const parent = { append: row => { rows.splice(rows.indexOf(row), 1); rows.push(row) } };
for (const row of rows) row.parentNode = parent;
const heads = [0, 1, 2].map(place => ({ cellIndex: place, dataset: {}, closest: () => ({ rows: [...rows] }) }));
for (const head of heads) head.parentNode = { cells: heads };
const document = { querySelectorAll: () => heads };
SCRIPT
const firsts = () => rows.slice(1).map(row => row.cells[1].textContent).join("");
console.log([0, 0, 1, 2].map(place => { heads[place].onclick(); return firsts() }).join(" "),
  heads.map(head => head.dataset.sign ?? "none").join(" "));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_a_click_sorts_a_table_of_the_page():
    done = subprocess.run(
        ["node", "-e", FAKE_PAGE.replace("SCRIPT", page.SCRIPT)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["cba", "abc", "abc", "cab", "none", "none", "1"]  # only the last carries a mark


def test_what_was_wanted_is_marked_and_nothing_is_taken_for_html():
    assert (
        page.marked("<b> Paris & Rome", ["paris", "rome", "Oslo"])
        == "&lt;b&gt; <mark>Paris</mark> &amp; <mark>Rome</mark>"
    )
    assert page.marked("abcd", ["abc", "bcd"]) == "<mark>abc</mark><mark>d</mark>"
    assert page.marked("\u0130x", ["x"]) == "\u0130x"


def changed(run, other, slug, change):
    """A copy of a run whose results of one setting are changed."""
    shutil.copytree(run, other)
    path = other / "results" / f"{slug}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in change(lines)))
    return other


def test_two_runs_are_paired_on_prompts_that_both_answered(run, tmp_path, monkeypatch, capsys):
    first, *others = (entry["slug"] for entry in json.loads((run / "summary.json").read_text())["conditions"])

    def change(lines):
        lines[0] |= {"score": 1 - lines[0]["score"], "output": "other"}
        lines[0]["access"] = {name: 2 * count for name, count in lines[0]["access"].items()}
        return lines[:-1]

    other = changed(run, tmp_path / "other", others[0], change)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["settings"]["routing_dtype"] = "int4"
    manifest["conditions"].pop()
    (other / "manifest.json").write_text(json.dumps(manifest))
    found = pairs.compare(Store(run), Store(other))
    same, differing = found["settings_of_both"]
    assert len(found["settings_of_both"]) == 2 and found["only"] == [[others[1]], []]
    assert found["settings"] == ["routing_dtype: 'model' then, 'int4' now"] and found["prompts"] == [4, 4, 4]
    assert same["difference"]["value"] == 0 and same["changed_answers"] == 0 and same["access"] == [100.0, 100.0]
    before, after = (Store(directory).results(others[0]) for directory in (run, other))
    by_task: dict[str, list[float]] = {}
    for name in after:
        by_task.setdefault(name.partition("/")[0], []).append(after[name]["score"] - before[name]["score"])
    mean = 100 * sum(sum(values) / len(values) for values in by_task.values()) / len(by_task)
    assert differing["n"] == 3 and differing["changed_answers"] == 1 and mean != 0
    assert differing["difference"]["value"] == pytest.approx(mean)
    files = {path.name: path.read_bytes() for path in other.iterdir() if path.is_file()}
    monkeypatch.setattr(tables, "output_console", lambda: Console(width=80))
    assert main(["report", "--compare", str(run), str(other)]) == 0
    shown = capsys.readouterr().out
    assert f"{mean:+.1f} [" in shown and "routing_dtype: 'model' then, 'int4' now" in shown and "…" not in shown
    assert {path.name: path.read_bytes() for path in other.iterdir() if path.is_file()} == files


def test_runs_that_share_nothing_are_refused(run, tmp_path, capsys):
    other = tmp_path / "other"
    options = "--tasks single --length 300 --n 1 --methods dense --data-seed 7".split()
    assert main(["ruler", "--model", "builtin:tiny", "--out", str(other), *options]) == 0
    assert main(["report", "--compare", str(run), str(other)]) == 2
    assert "have no equal prompts" in capsys.readouterr().err
    assert main(["report"]) == 2 and main(["report", str(run), "--compare", str(run), str(other)]) == 2
    assert "give the directory of one run, or two with --compare" in capsys.readouterr().err


def test_no_interval_of_a_diagnostic_is_cut_at_80_columns():
    """Words of a heading move first, then intervals; a wide terminal shows lines as they are."""
    header = ("Setting", "regroup after", "KV (%)", "last (%)", "exact", "score", "minus dense")
    line = ["SANTA++ contiguous 16/4 pooled S=64", "never", "104.4", "103.1", "3800"]
    lines = [["dense", "-", "100.0", "100.0", "-", "100.0", "-"], [*line, "97.5 [91.2, 99.9]", "-12.5 [-28.8, -0.1]"]]

    def shown_at(width):
        console = Console(width=width)
        return printed(tables.fitting_table(header, lines, console), width)

    wide, middle, narrow = (" ".join("\n".join(shown_at(width)).split()) for width in (140, 100, 80))
    assert "regroup after KV (%)" in wide and "3800 97.5 [91.2, 99.9] -12.5 [-28.8, -0.1]" in wide
    assert "after (%) (%)" in middle and "3800 97.5 -12.5" in middle and "[91.2, 99.9] [-28.8, -0.1]" in middle
    assert "3800 97.5 -12.5" in narrow and not any("…" in text for text in (middle, narrow))
    assert all(part in narrow for part in ("104.4", "[91.2,", "99.9]", "[-28.8,", "-0.1]"))
