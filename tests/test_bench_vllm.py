"""``latent-santa bench vllm`` without vLLM: what is asked for is read or refused, and a run's rows become a table."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from latent_santa.eval.bench.vllm import Setting
from latent_santa.eval.bench.vllm_report import read, table
from latent_santa.eval.cli import main


def test_settings_are_read() -> None:
    assert Setting.parse("dense") == Setting("dense") and Setting.parse("dense").platform
    assert Setting.parse("dense:128").splits == 128
    assert not Setting.parse("own_dense").platform
    found = Setting.parse("pooled+two_stage:64:32")
    assert (found.budget, found.estimator, found.parents, found.platform) == (64, "pooled", 32, False)
    assert Setting.parse("per_head:128").parents is None


@pytest.mark.parametrize(
    "word",
    ["dense:", "dense:x", "per_head", "pooled:0", "pooled:8:8", "pooled+graphs:64", "pooled+two_stage:64", "santa", ""],
)
def test_other_settings_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match="must be dense, dense:SPLITS"):
        Setting.parse(word)


def test_the_command_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "vllm", "--settings", "fast"]) == 2
    assert "--settings: 'fast': must be dense" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "vllm", "8by32768"])
    assert "'8by32768': two positive numbers are expected" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is there")
def test_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "vllm"]) == 2
    assert "pip install 'latent-santa[vllm]'" in capsys.readouterr().err


def test_a_table_compares_with_the_faster_dense_setting(tmp_path: Path) -> None:
    point = {"batch": 2, "context": 4096}
    load = {"requests": 3, "shortest": 1024, "longest": 2048}
    rows = [
        {"vllm": "0"},
        point | {"setting": "dense", "step_ms": 3.0},
        point | {"setting": "dense:9", "step_ms": 2.0},
        point | {"setting": "pooled:8", "step_ms": 1.0},
        load | {"setting": "dense", "step_ms": 1.0, "tokens_per_second": 1000.4},
        load | {"setting": "pooled:8", "step_ms": 1.0, "tokens_per_second": 1500.6},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert table(read(path)).splitlines()[2:] == [
        "| batch 2, 4K, ms | 3.00 | 2.00 | 1.00 (2.00x) |",
        "| mixed load, 3 requests of 1K to 2K, tokens per second | 1,000 | - | 1,501 (1.50x) |",
    ]


def test_a_file_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n', encoding="utf-8")
    assert main(["bench", "vllm", "--table", str(tmp_path / "other.jsonl")]) == 2
    assert "holds no rows of bench vllm" in capsys.readouterr().err
    (tmp_path / "table.md").write_text("| a |\n", encoding="utf-8")
    assert main(["bench", "vllm", "--table", str(tmp_path / "table.md")]) == 2
    assert "table.md holds no rows of bench vllm" in capsys.readouterr().err
