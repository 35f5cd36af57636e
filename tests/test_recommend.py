"""`latent-santa recommend`: fewest rows that keep a share, measured, told, printed as Python and saved."""

from __future__ import annotations

import ast
import io

import pytest
from rich.console import Console

from latent_santa.config import SantaConfig
from latent_santa.eval.cli import main
from latent_santa.eval.run import recommending
from latent_santa.eval.run.recommending import Candidate

COMMON = "recommend --model builtin:tiny --parents contiguous --budgets 8,4096 --estimators pooled --length 400".split()


def candidate(budget, kept, read, of=(1.0, 1.0)) -> Candidate:
    config = SantaConfig(parents="contiguous", budget=budget, estimator="pooled")
    return Candidate(config, list(kept), list(of), read, 1000)


def test_the_fewest_rows_that_keep_the_share_are_chosen():
    found = [candidate(512, (1, 1), 800), candidate(128, (1, 0.9), 400), candidate(32, (1, 0.8), 200)]
    assert recommending.best(found, 95).config.budget == 128
    assert recommending.best(found, 96).config.budget == 512
    assert recommending.best(found, 90).config.budget == 32
    assert recommending.best(found[1:], 96) is None
    assert "SANTA++ contiguous 16/4 pooled S=128 keeps most, 95.0 %" in recommending.advice(found[1:], None, 96, 2)[0]
    told = recommending.advice(found, found[1], 95, 2)
    assert told[0].endswith("S=128, which keeps 95.0 % and reads 40.0 %.") and "the 2 prompts" in told[1]
    nothing = [candidate(8, (0, 0), 100, of=(0.0, 0.0))]
    assert recommending.best(nothing, 1) is None and "scores 0" in recommending.advice(nothing, None, 1, 2)[0]
    console = Console(file=io.StringIO(), width=80)
    console.print(recommending.table(found, False, 2))
    lines = console.file.getvalue().splitlines()
    shares = [" ".join(line.split()[-5:]) for line in lines if "SANTA++" in line]
    assert shares == ["32 90.0 % 20.0 %", "128 95.0 % 40.0 %", "512 100.0 % 80.0 %"]


def test_the_printed_line_makes_the_settings():
    for config in (
        SantaConfig(),
        SantaConfig(budget=64, estimator="pooled", parents="contiguous", parent_size=32),
        SantaConfig(method="santa", budget=20, draws="systematic"),
    ):
        call = ast.parse(recommending.patch_line(config)).body[0].value
        assert ast.unparse(call.func) == "latent_santa.patch" and ast.unparse(call.args[0]) == "model"
        assert SantaConfig(**{k.arg: ast.literal_eval(k.value) for k in call.keywords}).used() == config.used()


def test_builtin_prompts_are_scored_and_the_settings_saved(tmp_path, capsys):
    path = tmp_path / "settings.json"
    words = [*COMMON, "--tasks", "single,multivalue", "--n", "1", "--keep", "100", "--save", str(path)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    config = SantaConfig.load(path)
    assert config.budget in (8, 4096) and recommending.patch_line(config) in shown and "2 prompts" in shown
    assert "score" in shown and f"S={config.budget}, which keeps 100.0 %" in shown


def test_own_prompts_are_compared_with_denses_answers(tmp_path, capsys):
    files = []
    for number in range(2):
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_text(f"Flight dimel {4829173 + number} has landed. " * 20 + "Which flight has landed?")
    words = [*COMMON, "--max-new-tokens", "12", "--keep", "100", "--prompt-file", *map(str, files)]
    assert main(words) == 0  # 4096 covers every team, so it gives dense's answers
    shown = " ".join(capsys.readouterr().out.split())
    assert "answer" in shown and "which keeps 100.0 %" in shown and "the 2 prompts" in shown


def test_a_share_that_nothing_keeps_is_told(monkeypatch, capsys):
    monkeypatch.setattr(recommending, "best", lambda found, keep: None)
    assert main([*COMMON, "--tasks", "single", "--n", "1", "--budgets", "8"]) == 1
    assert "No setting keeps 95 %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--keep 0", "--keep must be a share"),
        ("--methods dense", "give a method that samples"),
        ("--save /nowhere/at/all.json", "existing directory"),
        ("--length 100000", "--length 100000: 100,000 positions are more than"),
        ("--n 1000000000 --tasks fwe", "the ids of 1,000,000,000 prompts of 2,048 tokens take about"),
        ("--prompt-file /nowhere.txt", "No such file"),
    ],
)
def test_wrong_options_are_refused_before_the_model_is_loaded(monkeypatch, capsys, words, said):
    from latent_santa.eval.run import models

    monkeypatch.setattr(models, "load", None)
    assert main(["recommend", "--model", "builtin:tiny", *words.split()]) == 2
    assert said in capsys.readouterr().err
