"""`latent-santa check` says what it saw, what it could not see, and what failed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from latent_santa.eval.cli import main
from latent_santa.eval.run import models, selfcheck

from .eval_support import save_random_model
from .tiny_models import tiny_model


def findings(length: int, name: str = "deepseek_v2") -> dict[str, selfcheck.Check]:
    model = tiny_model(name, max_position_embeddings=1024)
    ids = [1 + 7 * i % 90 for i in range(length)]
    return {check.name: check for check in selfcheck.run_checks(model, ids)}


@pytest.mark.parametrize("name", ["deepseek_v2", "qwen2"])
def test_a_long_prompt_is_sampled(name: str) -> None:
    found = findings(400, name)
    assert all(check.passed for check in found.values())
    assert found["a budget of 128 samples"].seen == "8 of 8 sparse calls leave teams out"
    assert "every team" not in found["rows are counted"].seen


@pytest.mark.parametrize("length", [1, 40])
def test_a_short_prompt_leaves_nothing_to_sample_and_that_is_said(length: int) -> None:
    found = findings(length)
    sampled = found.pop("a budget of 128 samples")
    assert sampled.passed is None
    assert sampled.seen == f"{length} tokens have too few teams to leave any out; give a longer prompt"
    assert found["rows are counted"].seen == "100.0 % of dense at S=128, with every team"
    assert all(check.passed for check in found.values())


def test_the_command_counts_what_passed_failed_and_could_not_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["check", "--model", str(save_random_model(tmp_path)), "--device", "cpu", "--length"]
    assert main([*command, "400"]) == 0
    passed = capsys.readouterr().out.splitlines()
    assert passed[-1] == f"{tmp_path}: {len(passed) - 1} checks passed"
    assert main([*command, "30"]) == 0
    short = capsys.readouterr().out.splitlines()
    assert short[-1] == f"{tmp_path}: {len(passed) - 2} checks passed, 1 could not be made"
    states = itertools.count()
    monkeypatch.setattr(selfcheck, "_state", lambda model: {"changes": next(states)})
    assert main([*command, "30"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "FAIL unpatching restores every attribute: 1 attributes compared" in lines
    assert lines[-1] == f"{tmp_path}: 1 of {len(passed) - 1} checks failed, 1 could not be made"


def test_lengths_are_checked_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_random_model(tmp_path)

    def load(*args: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(models, "load", load)
    for length, told in (("0", "--length must be at least 1"), ("4089", "4,097 positions are more than the 4,096")):
        assert main(["check", "--model", str(model), "--length", length]) == 2
        assert told in capsys.readouterr().err
