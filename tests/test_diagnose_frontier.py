"""`latent-santa diagnose frontier`: one recording for all settings, kept one by one, continued, and summed up right."""

from __future__ import annotations

import json

import pytest

from latent_santa.eval.cli import main
from latent_santa.eval.diagnose import frontier_pictures, work
from latent_santa.eval.diagnose.folder import Folder
from latent_santa.eval.diagnose.frontier import Frontier
from latent_santa.eval.diagnose.intervals import over_prompts

from .eval_support import santapp, save_random_model

WORDS = "--data builtin --tasks niah_single_1,fwe --length 256 --n 2 --calls 3 --parents contiguous".split()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_random_model(tmp_path_factory.mktemp("model")))


def frontier(model, out, *words):
    return main(["diagnose", "frontier", "--model", model, *WORDS, "--no-plot", "--out", str(out), *words])


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "frontier"
    assert frontier(model, out, "--methods", "santa++,quest", "--budgets", "16,4096", "--plot") == 0
    return out


def lines(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_files_and_totals(finished):
    summary = json.loads((finished / "frontier.json").read_text())
    results = lines(finished)
    assert len(results) == 4 * (2 * 2 + 2) and summary["calls"] == 12 and len(summary["lines"]) == 6
    assert (finished / "frontier.png").stat().st_size > 1000 and (finished / "frontier_layers.png").exists()
    text = (finished / "frontier.md").read_text()
    for line in summary["lines"]:
        own = [r for r in results if r["key"] == f"{line['name']} S={line['S']}"]
        assert len(own) == 4 and len(line["by_layer"]) == 2
        counts = [layer for r in own for layer in r["counts"]]
        assert line["kv"] == pytest.approx(100 * sum(c[2] for c in counts) / sum(c[3] for c in counts))
        assert all(c[0] + c[1] == c[2] for c in counts)
        mean = sum(sum(r["error_of_layer"]) / 2 for r in own) / 4
        assert line["error"]["mean"] == pytest.approx(mean) and f"| {mean:.4f} [" in text
        assert mean == pytest.approx(sum(sum(r["error_of_call"]) / 3 for r in own) / 4)
        for layer in range(2):
            assert line["by_layer"][layer]["error"] == pytest.approx(sum(r["error_of_layer"][layer] for r in own) / 4)
        assert line["full"] == (line["S"] == 4096)
        assert (mean < 1e-5) == line["full"]
    assert sum(line["best"] for line in summary["lines"]) >= 1


def test_the_same_command_continues_and_settings_may_be_added(model, finished, monkeypatch, capsys):
    before = (finished / "results.jsonl").read_bytes()
    (finished / "results.jsonl").write_bytes(before[:-9])  # killed while it wrote its last line
    assert frontier(model, finished, "--methods", "santa++,quest,streaming_llm", "--budgets", "16,4096") == 0
    after = (finished / "results.jsonl").read_bytes()
    assert after.startswith(before[: before[:-1].rfind(b"\n")])
    assert len(lines(finished)) == 24 + 8
    assert {json.dumps(line) for line in map(json.loads, before.splitlines())} <= set(after.decode().splitlines())
    monkeypatch.setattr(work, "load", None)  # everything is there: no model is loaded
    assert frontier(model, finished, "--methods", "santa++,quest", "--budgets", "16,4096") == 0
    assert len(json.loads((finished / "frontier.json").read_text())["lines"]) == 6
    assert frontier(model, finished, "--seed", "1") == 2
    assert "seed: 0 then, 1 now" in capsys.readouterr().err

    def interrupted(diagnostic, summary):
        raise KeyboardInterrupt

    monkeypatch.setattr(work, "markdown", interrupted)  # Ctrl-C while the files are written
    assert frontier(model, finished, "--methods", "santa++,quest", "--budgets", "16,4096") == 130
    assert f"interrupted; results up to here are kept in {finished}" in capsys.readouterr().err


def test_a_prompt_that_is_decoded_otherwise_is_measured_anew(model, finished, tmp_path):
    out = tmp_path / "copy"
    out.mkdir()
    (out / "manifest.json").write_bytes((finished / "manifest.json").read_bytes())
    kept = [line for line in lines(finished) if line["key"].startswith("SANTA++")][:16]
    name = kept[0]["prompt"]
    for line in kept:
        if line["prompt"] == name:
            line["tokens"] = [1, 2, 3]
    missing = kept.pop(next(n for n, line in enumerate(kept) if line["prompt"] == name))
    (out / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert frontier(model, out, "--budgets", "16,4096", "--methods", "santa++") == 0
    again = [line["key"] for line in lines(out)[15:]]
    assert len(again) == 4 and missing["key"] in again
    assert {r["prompt"] for r in lines(out)[15:]} == {name}


def test_best_settings_are_those_that_nothing_beats_in_both():
    def result(error, read, full=False):
        counts = [[10, read - 10, read, 1000]]
        return {"error_of_layer": [error], "error_of_call": [error], "counts": counts, "full": full, "tokens": [1]}

    settings = [santapp(budget, "contiguous", "pooled") for budget in (16, 32, 64, 128)]
    diagnostic = Frontier(settings)
    numbers = [result(0.3, 100), result(0.4, 200), result(0.1, 300), result(0.0, 900, full=True)]
    results = {key: {"fwe": [number]} for key, number in zip(diagnostic.keys, numbers, strict=True)}
    summary = diagnostic.summary(results, {"seed": 0})
    assert [(line["S"], line["best"]) for line in summary["lines"]] == [
        (16, True),
        (32, False),
        (64, True),
        (128, False),
    ]
    assert summary["lines"][0]["error"] == {"mean": pytest.approx(0.3), "low": None, "high": None}
    assert summary["lines"][0]["kv"] == 10 and summary["lines"][0]["routing"] == 1
    assert all(line["bound"] is None for line in summary["lines"])  # results from before it was counted
    header, shown = diagnostic.tables(summary)[""]
    assert "bound (%)" not in header and len(shown[0]) == len(header)
    for own, bound in zip(numbers, (90, 190, 135, 890), strict=True):  # the third scans keys that it attends
        own["counts"] = [[*own["counts"][0], bound]]
    header, shown = diagnostic.tables(diagnostic.summary(results, {"seed": 0}))[""]
    assert [line[header.index("bound (%)")] for line in shown] == ["-", "-", "13.5", "-"]


def test_a_picture_of_many_lines_names_the_best_alone():
    named = {f"line {n}": [{"best": n % 7 == 0}] for n in range(21)}
    styles = frontier_pictures._styles(named)
    assert [name for name in named if "label" in styles[name]] == ["line 0", "line 7", "line 14"]
    del named["line 20"]
    assert all(style["label"] == name for name, style in frontier_pictures._styles(named).items())


def test_intervals_are_over_prompts_within_tasks():
    found = over_prompts({"a": [1.0, 1.0], "b": [2.0, 4.0]}, seed=0)
    assert found == {"mean": 2.0, "low": 1.5, "high": 2.5}
    assert over_prompts({"a": [1.0, 2.0], "b": [3.0]}, seed=0)["low"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--methods dense", "it has no error"),
        ("--length 100000", "--length 100000: 100,000 positions are more than"),
        ("--calls 0", "--calls must be at least 1"),
        ("--budgets 30", "S must be divisible by P/R"),
        ("--prompt-file /nowhere.txt", "No such file"),
        ("--out /proc/nowhere", "cannot be written to"),
    ],
)
def test_wrong_options_are_refused_before_the_model_is_loaded(monkeypatch, capsys, tmp_path, words, said):
    monkeypatch.setattr(work, "load", None)
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", "frontier", *words.split()]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_own_prompts(model, tmp_path):
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for number, path in enumerate(files):
        path.write_text(f"Flight dimel {4829173 + number} has landed. " * 9 + "Which flight has landed?")
    out = tmp_path / "run"
    words = ["--calls", "2", "--methods", "quest", "--budgets", "32", "--prompt-file", *map(str, files)]
    assert main(["diagnose", "frontier", "--model", model, "--no-plot", "--out", str(out), *words]) == 0
    assert {prompt for prompt, _ in Folder(out, "frontier").results()} == {"a.txt", "b.txt"}
