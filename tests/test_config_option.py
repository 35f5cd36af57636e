"""--config gives a command its settings from a file; what a command cannot take is refused by name."""

from __future__ import annotations

import argparse
import json

import pytest

from latent_santa.config import SantaConfig
from latent_santa.eval.cli import build_parser, main
from latent_santa.eval.commands import options
from latent_santa.eval.errors import EvalError
from latent_santa.eval.run.models import ModelSpec


def saved(directory, **settings) -> tuple[SantaConfig, str]:
    config = SantaConfig(**settings)
    config.save(directory / "settings.json")
    return config, str(directory / "settings.json")


def parsed(*words: str) -> argparse.Namespace:
    return build_parser(words[0]).parse_args(words)


@pytest.mark.parametrize(
    "settings",
    [
        {"budget": 24, "parent_size": 32, "representatives": 8, "estimator": "pooled", "parents": "contiguous"},
        {"routing": "two_stage", "parents_per_head": 7, "parent_summary": "isotropic", "routing_dtype": "int8"},
        {"method": "centroid", "parent_size": 32, "budget": 64, "seed": 5},
        {"method": "quest", "parent_size": 32, "budget": 64},
        {"noise": "shared", "backend": "torch", "kmeans_engine": "torch", "kmeans_seed": 3},
        {"method": "santa", "budget": 20, "draws": "systematic"},
        {"method": "magicpig", "hash_bits": 8, "hash_tables": 75, "seed": 2},
        {"exact_first": 4, "exact_last": 32},
        {"method": "dense"},
    ],
)
@pytest.mark.parametrize("command", ["ruler", "compare", "recommend"])
def test_commands_run_the_settings_of_the_file_beside_dense(tmp_path, command, settings):
    config, path = saved(tmp_path, **settings)
    args = parsed(command, "--model", "builtin:tiny", "--config", path)
    found = options.conditions(args, options.base_config(args, ModelSpec("builtin:tiny", device="cpu")))
    assert found[0].method == "dense" and len(found) == (1 if config.method == "dense" else 2)
    assert found[-1].used() == config.used()


def test_options_behind_the_file_change_it(tmp_path):
    _, path = saved(tmp_path, budget=24, estimator="pooled")
    args = parsed("compare", "--config", path, "--budgets", "8,16", "--seed", "3")
    assert args.budgets == [8, 16] and args.estimators == ["pooled"] and args.seed == 3


def test_a_bench_takes_what_it_has_options_for_and_refuses_the_rest(tmp_path, capsys):
    config, path = saved(tmp_path, representatives=2, routing_dtype="int4", estimator="pooled")
    assert parsed("bench", "decode", "--config", path).config == config  # a setting of its own, whatever it holds
    _, path = saved(tmp_path, representatives=2, routing_dtype="int4", kmeans_seed=9)
    with pytest.raises(SystemExit):
        parsed("bench", "operator", "--config", path)
    assert "kmeans_seed=9" in capsys.readouterr().err
    _, path = saved(tmp_path, first_token="dense")
    with pytest.raises(SystemExit):
        parsed("ruler", "--model", "builtin:tiny", "--config", path)
    assert "first_token='dense', and latent-santa ruler has no option" in capsys.readouterr().err
    _, path = saved(tmp_path, method="centroid", noise="shared")
    with pytest.raises(SystemExit):
        parsed("compare", "--config", path)
    assert "runs centroid with 'independent' only" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ruler --model builtin:tiny", "compare", "recommend", "check", "bench decode"])
def test_a_bad_file_is_refused_by_its_name(tmp_path, capsys, command):
    bad = tmp_path / "bad.json"
    for text, said in (("{", "bad.json"), ('{"budgets": 3}', "unknown setting budgets"), (None, "No such file")):
        if text is None:
            bad.unlink()
        else:
            bad.write_text(text)
        with pytest.raises(SystemExit):
            parsed(*command.split(), "--config", str(bad))
        shown = capsys.readouterr().err
        assert said in shown and str(bad) in shown


def test_check_samples_under_the_settings_of_the_file(tmp_path, capsys):
    _, path = saved(tmp_path, parents="contiguous", budget=16, estimator="pooled", parent_size=32)
    assert main(["check", "--length", "300", "--config", path]) == 0
    shown = capsys.readouterr().out
    assert "a budget of 16 samples" in shown and "of dense at S=16" in shown
    _, path = saved(tmp_path, method="santa", budget=16)
    assert main(["check", "--length", "300", "--config", path]) == 0
    _, path = saved(tmp_path, routing="two_stage", parents_per_head=2, budget=16)
    assert main(["check", "--length", "300", "--config", path]) == 0
    _, path = saved(tmp_path, method="dense")
    assert main(["check", "--config", path]) == 2 and '"dense", which samples nothing' in capsys.readouterr().err


def test_a_run_from_a_file_records_its_settings(tmp_path):
    _, path = saved(tmp_path, parents="contiguous", budget=16, estimator="pooled", seed=11)
    words = f"ruler --model builtin:tiny --tasks single --length 300 --n 1 --out {tmp_path / 'run'} --config {path}"
    assert main(words.split()) == 0
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["settings"]["seed"] == 11 and [c["budget"] for c in manifest["conditions"]] == [None, 16]


def conditions(*words: str) -> tuple[SantaConfig, ...]:
    args = parsed("ruler", "--model", "builtin:tiny", "--budgets", "64", "--parents", "kmeans", *words)
    return options.conditions(args, options.base_config(args, ModelSpec("builtin:tiny", device="cpu")))


def test_single_settings_stand_beside_the_combinations(tmp_path):
    mine, path = saved(tmp_path, routing="two_stage", noise="shared", estimator="pooled", parents_per_head=7, budget=24)
    dense, *found = conditions("--methods", "dense", "--seed", "3", "--also", f"recommended,{path}")
    assert dense.method == "dense" and {one.seed for one in (dense, *found)} == {3}
    assert [one.used() | {"seed": 0} for one in found] == [
        SantaConfig.preset("recommended").used() | {"seed": 0},
        mine.used() | {"seed": 0},
    ]
    grid = conditions("--estimators", "pooled", "--also", "recommended")
    assert [one.routing for one in grid] == ["one_stage", "one_stage", "two_stage"]
    again = conditions("--estimators", "pooled", "--routing", "two_stage", "--budgets", "128", "--also", "recommended")
    assert len(again) == 2  # the preset is one of the combinations


def test_single_settings_that_cannot_share_a_run_are_refused(tmp_path):
    with pytest.raises(EvalError, match="--also paper: it needs --regroup-after 0 --kmeans-engine sklearn, which all"):
        conditions("--also", "paper")
    assert conditions("--methods", "dense", "--also", "paper", "--kmeans-engine", "sklearn", "--regroup-after", "0")
    _, path = saved(tmp_path, first_token="dense")
    with pytest.raises(EvalError, match="first_token='dense'; here it is 'replay' always"):
        conditions("--also", path)
    with pytest.raises(EvalError, match="--also nowhere.json.*presets are paper, recommended, many_heads"):
        conditions("--also", "nowhere.json")


@pytest.mark.parametrize(
    ("methods", "option", "users"),
    [
        ("santa", ("--routing-dtype", "int4"), "santa\\+\\+, centroid, top_teams,"),
        ("quest,sparq", ("--backend", "torch"), "santa\\+\\+, centroid"),
        ("quest", ("--draws", "systematic"), "santa:"),
        ("santa", ("--noise", "independent,shared"), "santa\\+\\+, .*uncorrected"),
        ("dense,snapkv", ("--exact-first", "0,16"), "santa\\+\\+, centroid, uncorrected"),
    ],
)
def test_options_that_no_method_of_the_run_uses_are_refused(methods, option, users):
    with pytest.raises(EvalError, match=f"{option[0]} .* none uses it, only {users}"):
        conditions("--methods", methods, *option)
    # one method of the run that uses it is enough, and what all of them share says nothing of any
    assert len(conditions("--methods", f"{methods},santa++,santa,centroid", *option)) > 3
    assert conditions("--methods", methods, "--seed", "3") and conditions("--methods", "dense", *option)
