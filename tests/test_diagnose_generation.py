"""`latent-santa diagnose generation`: reads of every stretch, answers behind given tokens, continued runs."""

from __future__ import annotations

import json

import pytest

from latent_santa.eval.cli import main
from latent_santa.eval.diagnose.generation import DENSE, STRETCH, Generation

from .eval_support import save_random_model

WORDS = "--data builtin --tasks niah_single_1,fwe --length 256 --n 2 --first 190 --batch-size 3 --parents contiguous"
SETTINGS = ("--budgets", "16,4096", "--regroup-after", "0,16")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_random_model(tmp_path_factory.mktemp("model")))


def generation(model, out, *words):
    return main(["diagnose", "generation", "--model", model, *WORDS.split(), "--out", str(out), *words])


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "generation"
    assert generation(model, out, *SETTINGS) == 0
    return out


def test_files_and_totals(finished):
    summary = json.loads((finished / "generation.json").read_text())
    results = [json.loads(line) for line in (finished / "results.jsonl").read_text().splitlines()]
    assert len(results) == 4 * 5 and (finished / "generation.png").stat().st_size > 1000
    dense = {one["prompt"]: one for one in results if one["key"] == DENSE}
    assert all(one["read"] == [] and len(one["answer"]) > 4 for one in dense.values())
    lines = {line["name"]: line for line in summary["lines"]}
    for name, line in lines.items():
        own = [one for one in results if one["key"] == name]
        assert line["score"]["mean"] == pytest.approx(sum(one["score"] for one in own) / 4)
        if name == DENSE:
            continue
        for place, share in enumerate(line["curve"]):
            read, whole = (sum(one["read"][place][side] for one in own) for side in (0, 1))
            assert share == pytest.approx(100 * read / whole)
        if "S=4096" in name:  # every team is read: dense attention, and no representative is scored
            assert all(one["answer"] == dense[one["prompt"]]["answer"] for one in own)
            assert line["kv"] == pytest.approx(100) and line["minus_dense"]["mean"] == 0
    never, often = (next(v for k, v in lines.items() if k.endswith(f"S=16 regroup {after}")) for after in (0, 16))
    assert often["exact"] <= 16 < never["exact"] and often["curve"][-1] < never["curve"][-1]
    assert f"{never['kv']:.1f}" in (finished / "generation.md").read_text()


def test_the_same_command_continues(model, finished, monkeypatch):
    before = (finished / "results.jsonl").read_text()
    kept = [line for line in before.splitlines(keepends=True) if "regroup 16" not in line or "fwe/" not in line]
    (finished / "results.jsonl").write_text("".join(kept))
    seen = []
    measure = Generation.measure
    monkeypatch.setattr(
        Generation,
        "measure",
        lambda self, santa, some, key, n: [seen.append(key), measure(self, santa, some, key, n)][1],
    )
    assert generation(model, finished, *SETTINGS, "--no-plot") == 0
    assert len(seen) == 2 and all("regroup 16" in key for key in seen)
    assert sorted(map(json.dumps, map(json.loads, before.splitlines()))) == sorted(
        map(json.dumps, map(json.loads, (finished / "results.jsonl").read_text().splitlines()))
    )


@pytest.mark.parametrize(
    "words, told",
    [
        (["--methods", "dense"], "give another method"),
        (["--regroup-after", "5"], "regroup_after=5: must be 0 (never) or at least P"),
        (["--first", "100000"], "--first 100000"),
    ],
)
def test_refusals(model, tmp_path, capsys, words, told):
    assert generation(model, tmp_path / "new", *words) != 0
    assert told in capsys.readouterr().err
    assert not list(tmp_path.glob("new/results*"))


def test_stretches_are_whole(finished):
    results = [json.loads(line) for line in (finished / "results.jsonl").read_text().splitlines()]
    # calls see 190 rows and more of the longest prompt of their batch, and padding is no row
    for one in results:
        if one["key"] != DENSE:
            assert len(one["read"]) <= -(-(256 - 190) // STRETCH) and all(read > 0 for read, _ in one["read"])
