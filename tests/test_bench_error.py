"""``bench error``: references, ratios and files of the operator's attention errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: bench operator's options need it")

from latent_santa.estimator import dense_attention
from latent_santa.eval.bench import errors as bench_errors
from latent_santa.eval.bench.errors import compared, errors, reference
from latent_santa.eval.bench.measure import Setting
from latent_santa.eval.bench.workload import Size, save, synthetic
from latent_santa.eval.cli import main
from latent_santa.rows import Rows
from latent_santa.step import Sampling


def test_the_reference_is_dense_attention_whatever_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    step = synthetic(Size("gqa", 4, 2, 96, 1, 16), device="cpu").step
    step = replace(step, visible=torch.arange(96)[None] >= 40)  # the first piece has no visible row
    rows = Rows(tuple(part.double() for part in step.rows.keys), step.rows.values.double())
    want, _ = dense_attention(tuple(part.double() for part in step.query), rows, step.visible, step.scale)
    monkeypatch.setattr(bench_errors, "ROWS", 36)
    torch.testing.assert_close(reference(step), want, rtol=1e-12, atol=1e-12)


def test_errors_fall_to_rounding_where_everything_is_read_and_draws_differ() -> None:
    workload = synthetic(Size("mla", 2, 1, 96, 1), device="cpu", parent_summary="mean")
    few, two, all_teams = (Setting(Sampling(*given)) for given in ((4,), (4, "pooled", "independent", 2), (1000,)))
    found = errors(workload, [few, two, all_teams], 3)
    assert max(max(draw) for draw in found[all_teams.name]["errors"]) < 1e-5
    assert found[all_teams.name]["rows"] == 96
    assert 0 < found[two.name]["rows"] < found[few.name]["rows"] < 2 * 96
    first, second, _ = found[few.name]["errors"]
    assert len(first) == 2 and first != second
    assert errors(workload, [few], 3)[few.name] == found[few.name]


def test_ratios_pair_draws_and_heads() -> None:
    one = {
        "a": {"errors": [[1.0, 2.0], [3.0, 2.0]], "rows": 10.0},
        "b": {"errors": [[0.5, 1.0], [1.5, 1.0]], "rows": 4.0},
    }
    table = compared([one, one], "a")
    assert table["a"]["error"] == 2.0 and table["b"]["rows"] == 4.0
    # each of b's errors is half of a's, so is every resampled ratio
    assert [table["b"][name] for name in ("ratio", "ratio_low", "ratio_high")] == [0.5, 0.5, 0.5]
    assert 1.0 <= table["a"]["low"] < 2.0 < table["a"]["high"] <= 3.0


def test_the_command_takes_synthetic_and_saved_workloads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(synthetic(Size("mla", 2, 1, 96, 1), device="cpu"), tmp_path / "one_stage.pt")
    small = ["bench", "error", "--budget", "16", "--draws", "2", "--estimators", "per_head"]
    two = ["--routing", "one_stage,two_stage", "--parents-per-head", "2"]
    sizes = ["--layout", "gqa", "--heads", "4", "--groups", "2", "--context", "96", "--workloads", "1"]
    assert main([*small, *two, *sizes, "--out", str(tmp_path / "e.json")]) == 0
    held = json.loads((tmp_path / "e.json").read_text())
    assert list(held["table"]) == ["per head K=4", "per head K1=2 K=4"]
    assert "| per head K1=2 K=4 |" in capsys.readouterr().out
    assert main([*small, *two, "--workload", str(tmp_path / "one_stage.pt")]) == 2
    assert "capture it with --parent-summary" in capsys.readouterr().err
    assert main([*small, "--workload", str(tmp_path / "one_stage.pt")]) == 0
    assert main([*small, *sizes, "--heads", "3"]) == 2
