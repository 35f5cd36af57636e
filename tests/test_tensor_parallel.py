"""Heads of a layer over two processes on the CPU: tokens, noise and rows are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch.distributed.tensor")

from .spread_worker import CASES, MODELS, check, seen, two_processes, whole_model


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: whole_model(name) for name in MODELS}


@pytest.fixture(scope="module")
def both(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return two_processes(models, tmp_path_factory.mktemp("spread"), CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")


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
    first, other = (seen(models["deepseek_v2"], {"parents": "kmeans", "kmeans_seed": seed}) for seed in (0, 1))
    assert first["scores"] != other["scores"]
    for two in both:
        check(two["other seeds"], first)


def test_exchanges(both: list[dict[str, Any]]) -> None:
    record = {"rows": [[0], [1], [2]], "bound": [0], "name": [0, None]}
    for rank, two in enumerate(both):
        assert two["exchanges"] == [record, [[0, 0, 1, 1]], [[rank, rank]], [True, False, True], [[rank, rank]]]


def test_one_process_may_ask_alone(both: list[dict[str, Any]]) -> None:
    report = both[0]["report"]
    assert "2 GQA layers patched" in report and "spread over 2 processes" in report
    assert "exchange results" in " ".join(report.split())  # why no step is a graph


def test_what_is_refused(both: list[dict[str, Any]]) -> None:
    for two in both:
        assert "1 KV heads over 2 processes" in two["kv refused"] and "divides 1" in two["kv refused"]
        assert "compile=True" in two["compile refused"] and "leave it out" in two["compile refused"]
