"""`latent-santa diagnose windows`, `distances` and `jensen` against their definitions in loops."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from latent_santa.config import SantaConfig
from latent_santa.eval.cli import main
from latent_santa.eval.diagnose import work
from latent_santa.eval.diagnose.distances import CONTIGUOUS, KMEANS, RANDOM, Distances, mean_distance, shuffled_chunks
from latent_santa.eval.diagnose.jensen import BINS, MEAN_KEY, REPRESENTATIVE, STEP, Jensen, quantile
from latent_santa.eval.diagnose.jensen_examples import SHAPES, examples, ratio
from latent_santa.eval.diagnose.windows import effectiveness
from latent_santa.eval.run import models

from .diagnose_cases import LENGTH, recorded
from .eval_support import save_random_model

BASE = SantaConfig(method="dense", kmeans_engine="sklearn")


@pytest.mark.parametrize("rows", [12, 13, 15])
def test_window_effectiveness_is_equation_12(rows):
    weights = torch.rand(3, rows, generator=torch.Generator().manual_seed(rows)).double()
    found = effectiveness(weights, width=4, windows=2)
    for own, value in zip(weights.tolist(), found.tolist(), strict=True):
        sums = sorted(sum(own[start : start + 4]) for start in range(0, rows, 4))
        assert value == pytest.approx(sum(sums[-2:]) / sum(sorted(own)[-8:])) and 0 < value <= 1
    heap = torch.zeros(1, rows)
    heap[0, 4:12] = 1 / 8
    assert effectiveness(heap, width=4, windows=2).item() == pytest.approx(1)
    assert effectiveness(heap.roll(-2, 1), width=4, windows=2).item() == pytest.approx(6 / 8)


def test_distances_are_means_over_rows():
    points = torch.randn(1, 2, 11, 3, generator=torch.Generator().manual_seed(0))
    groups = torch.tensor([[[0] * 4 + [1] * 4 + [2] * 3, [2, 0, 2, 0, 1, 1, 0, 2, 2, 1, 0]]])
    wanted = []
    for g in range(2):
        own, of = points[0, g].numpy(), groups[0, g].numpy()
        wanted += [np.linalg.norm(own[i] - own[of == of[i]].mean(0)) for i in range(11)]
    assert mean_distance(points, groups) == pytest.approx(np.mean(wanted), rel=1e-6)


def test_shuffled_chunks_are_one_fixed_partition():
    chunks = shuffled_chunks(40, 16, 0)
    assert chunks.bincount().tolist() == [16, 16, 8] and chunks.equal(shuffled_chunks(40, 16, 0))
    assert not chunks.equal(torch.arange(40) // 16)


@pytest.mark.parametrize("name", ["deepseek_v2-yarn", "qwen2"])
def test_clusters_of_a_prompt_are_the_most_compact(name):
    santa, record = recorded(name)
    found = {key: Distances(BASE).measure(santa, record, key)["distance"] for key in (KMEANS, CONTIGUOUS, RANDOM)}
    assert all(len(layers) == record.layers for layers in found.values())
    assert all(a < min(b, c) for a, b, c in zip(*found.values(), strict=True))


def test_constructed_logits_have_the_papers_ratios():
    found = examples()
    assert {name: round(ratio(logits), 4) for name, logits in found.items()} == {n: r for n, (_, r) in SHAPES.items()}
    assert all(len(logits) == 16 for logits in found.values())
    # Figure 2: an exact mass of about 2.20e4, and a surrogate of about 29
    mass = sum(map(math.exp, found["sparse"]))
    assert mass == pytest.approx(2.2e4, rel=0.01) and mass / 760 == pytest.approx(29, abs=0.5)


@pytest.mark.parametrize("name", ["deepseek_v2-yarn", "qwen2"])
@torch.no_grad()
def test_factors_of_real_groups(name):
    """Both histograms of one partition, against a loop over calls, heads and groups."""
    santa, record = recorded(name)
    diagnostic = Jensen(BASE)
    found = diagnostic.measure(santa, record, "teams k-means 16/4")["histograms"]
    wanted = {what: np.zeros((2, BINS)) for what in (MEAN_KEY, REPRESENTATIVE)}
    for layer, teams in enumerate(record.teams()):
        keys = torch.cat([part[0, :, :LENGTH].double() for part in record.rows(layer).keys], -1).numpy()
        for call in range(record.calls):
            query, scale = record.query(layer, call)
            heads = torch.cat([part[0].double() for part in query], -1).numpy()
            for g in range(len(keys)):
                team = teams.team_of_row[0, g].numpy()
                for head in heads[g]:
                    s = scale * keys[g] @ head
                    for n in range(int(teams.count[0, g])):
                        own = s[team == n]
                        if len(own) < 2:
                            continue
                        mass = np.exp(own).sum()
                        t = {MEAN_KEY: own.mean(), REPRESENTATIVE: s[teams.representative[0, g, n]]}
                        for what, logit in t.items():
                            place = int(abs(math.log10(mass / len(own) / math.exp(logit))) / STEP)
                            wanted[what][0, place] += 1
                            wanted[what][1, place] += mass / np.exp(s).sum()
    for what, histograms in found.items():
        # rounding moves a factor over a bin's edge now and then
        for own, theirs in zip(histograms, wanted[what], strict=True):
            assert sum(own) == pytest.approx(theirs.sum(), rel=1e-5)
            assert np.abs(np.cumsum(own) - np.cumsum(theirs)).max() < 0.02 * theirs.sum()
    assert set(found) == set(wanted)


def test_quantiles_of_a_histogram():
    counts = [0.0] * BINS
    counts[0], counts[50], counts[100] = 5, 4, 1
    assert quantile(counts, 0.5) == 1 and quantile(counts, 0.9) == pytest.approx(10**1.01)
    assert quantile(counts, 0.99) == pytest.approx(10**2.01)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_random_model(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(("kind", "tables"), [("windows", 1), ("distances", 1), ("jensen", 2)])
def test_commands(model, tmp_path, kind, tables, capsys):
    words = "--data builtin --tasks niah_single_1,fwe --length 700 --n 2 --no-plot".split()
    out = tmp_path / kind
    assert main(["diagnose", kind, "--model", model, *words, "--out", str(out)]) == 0
    summary = json.loads((out / f"{kind}.json").read_text())
    assert summary["prompts_per_task"] == {"niah_single_1": 2, "fwe": 2}
    text = (out / f"{kind}.md").read_text()
    assert "2 of niah_single_1, 2 of fwe; builtin at 700 tokens" in text and text.count("\n| --- |") == tables
    assert f"Files: {out}/{kind}.*" in capsys.readouterr().out
    if kind == "windows":
        for own in summary["tasks"].values():
            heads = [own["heads"][x]["mean"] for x in ("0.5", "0.75", "0.9")]
            assert heads == sorted(heads, reverse=True) and own["curve"][50] == pytest.approx(heads[0])


def test_prompts_too_short_for_windows_are_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(work, "load", None)
    words = ["--length", "400", "--n", "1", "--out", str(tmp_path / "run")]
    assert main(["diagnose", "windows", "--model", "builtin:tiny", *words]) == 2
    assert "tokens, and at least 513 are needed" in capsys.readouterr().err


def test_probes_make_a_run_with_bars_and_paired_differences(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = "--data builtin --tasks vt,facts_1 --length 256 --n 2 --budgets 16 --methods dense,santa++".split()
    command = ["diagnose", "probes", "--model", model, *words, "--no-plot"]
    assert main(command) == 0
    out = tmp_path / "out" / f"diagnose-probes-{Path(model).name}"
    found = json.loads((out / "probes.json").read_text())
    scores = {}
    for path in (out / "results").glob("*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            scores[path.stem, line["id"]] = line["score"]
    slugs = sorted({slug for slug, _ in scores})
    keys, probes = (next(slug for slug in slugs if kind in slug) for kind in ("k-means", "probes"))
    assert len(slugs) == 3 and list(found["tasks"]) == ["vt", "facts_1"]
    for task, lines in found["tasks"].items():
        line = next(line for line in lines if "probes" in line["name"])
        ids = [name for slug, name in scores if slug == keys and name.startswith(task)]
        wanted = 100 * np.mean([scores[probes, name] - scores[keys, name] for name in ids])
        assert line["difference"]["value"] == pytest.approx(wanted) and len(ids) == 2
    assert (out / "probes.md").read_text().count("\n| SANTA++ probes 16/4 per head | 16 |") == 2
    monkeypatch.setattr(models, "load", None)
    assert main(command) == 0  # everything is there: no model is loaded
