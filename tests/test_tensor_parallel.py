"""Heads of a layer over two processes on the CPU: tokens, noise and rows are those of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.distributed.tensor")

from latent_santa.eval.cli import main

from .eval_support import results
from .spread_worker import CASES, CLUSTERED, MODELS, RULER, check, seen, two_processes, whole_model


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: whole_model(name) for name in MODELS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spread")


@pytest.fixture(scope="module")
def both(models: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    return two_processes(models, folder, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")


@pytest.mark.parametrize("name", CASES)
def test_two_processes_give_what_one_gives(name: str, models: dict[str, Any], both: list[dict[str, Any]]) -> None:
    model, settings = CASES[name]
    one = seen(models[model], settings, "torch")
    for two in both:
        check(two[name], one)
    if settings.get("method") != "dense":
        totals = one["rows"]["totals"]
        assert 0 < totals["union"] < totals["dense"] - totals["suffix"]  # sampling leaves rows out


def test_teams_are_the_first_processs(models: dict[str, Any], both: list[dict[str, Any]]) -> None:
    first, other = (seen(models["deepseek_v2"], {**CLUSTERED, "kmeans_seed": seed}) for seed in (0, 1))
    assert first["scores"] != other["scores"]
    for two in both:
        check(two["other seeds"], first)


def test_heads_that_every_process_has_are_no_share(models: dict[str, Any], both: list[dict[str, Any]]) -> None:
    """Some plans gather what the projections give, so that each process attends for all heads."""
    one = seen(models["qwen2"], {"estimator": "pooled"})
    for two in both:
        check(two["gathered"], one)


def test_exchanges(both: list[dict[str, Any]]) -> None:
    record = {"short": -2, "rows": [[0], [1], [2]], "bound": [0], "name": [0, None]}
    for rank, two in enumerate(both):
        assert two["exchanges"] == [record, [[0, 0, 1, 1]], [[rank, rank]], [True, False, True], [[rank, rank]]]


def test_one_process_may_ask_alone(both: list[dict[str, Any]]) -> None:
    report = both[0]["report"]
    assert "2 GQA layers patched" in report and "spread over 2 processes" in report
    assert "exchange results" in " ".join(report.split())  # why no step is a graph


def test_what_is_refused(both: list[dict[str, Any]]) -> None:
    for two in both:
        assert "1 KV heads over 2 processes" in two["kv refused"] and "divides 1" in two["kv refused"]
        assert "q_proj, v_proj spread over processes and k_proj whole on each" in two["mixed refused"]
        assert "compile=True" in two["compile refused"] and "leave it out" in two["compile refused"]


def test_ruler_on_a_model_over_two_processes(both: list[dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    assert [two["ruler"] for two in both] == [0, 0] == 2 * [main([*RULER.split(), str(tmp_path / "run")])]
    one, together = results(tmp_path / "run"), results(folder / "ruler")
    assert one.keys() == together.keys() and len(one) == 2
    for name, lines in one.items():
        for mine, theirs in zip(lines, together[name], strict=True):
            assert {key for key in mine if mine[key] != theirs[key]} <= {"run", "seconds"}
    settings = json.loads((folder / "ruler" / "manifest.json").read_text())["settings"]
    assert settings["tensor_parallel"] == 2
