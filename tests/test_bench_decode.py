"""``bench decode`` on a tiny model: settings take turns on the same rows, graphs have a stand-in, nothing is lost."""

from __future__ import annotations

import io
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from latent_santa.eval.bench import decode, decode_report, shapes
from latent_santa.eval.bench import filled as filled_cache
from latent_santa.eval.bench.decode import UNTIMED, Clock, Plan, Point
from latent_santa.eval.bench.filled import FilledCache, filled_by_drawing
from latent_santa.eval.bench.settings import setting
from latent_santa.eval.cli import main

from .call_again import on_the_cpu

TINY = "--shape small --layers 1 --device cpu --dtype float32 --batch 2 --context 64 --budget 8 --steps 4".split()
SHARED = {"budget": 8, "parents": "contiguous", "parents_per_head": 2}


@pytest.fixture(scope="module")
def model() -> Any:
    return shapes.random_model(shapes.shape_config("small", 1, torch.float32), torch.float32, "cpu")


@pytest.fixture(scope="module")
def filled(model: Any) -> FilledCache:
    return filled_by_drawing(model, 2, 64, Plan(4).free)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is not looked at on a CPU, so nothing needs to be collected for it."""
    monkeypatch.setattr(decode, "collect", lambda device: None)
    monkeypatch.setattr(filled_cache, "collect", lambda device: None)


def point(model: Any, filled: FilledCache, names: str, rounds: int = 1) -> Point:
    return Point(model, filled, 2, 64, [setting(name, SHARED) for name in names.split(",")], Plan(4, rounds), {})


def test_every_patched_setting_replays_its_step_on_the_same_rows(model: Any, filled: FilledCache) -> None:
    rows = [(state.keys.clone(), state.values.clone()) for state in filled._plain]
    names = "transformers,dense,absorbed_dense,per_head,pooled,pooled+two_stage,pooled+eager"
    measured = point(model, filled, names, 2)
    steps = {}
    with on_the_cpu():
        for number, name in enumerate(measured.measure()):
            result = measured.results[name]
            steps[name, number // 7] = (result.get("replayed"), result.get("steps"))
    # of the first turn's two kinds of call the first step is captured; a later turn finds both graphs
    total = 2 * (UNTIMED + 4) + 1
    for name in names.split(","):
        eager = {"transformers": (0, None), "pooled+eager": (0, total)}.get(name)
        assert steps[name, 0] == (eager or (total - 2, total)), name
        assert steps[name, 1] == (eager or (total, total)), name
        result = measured.results[name]
        assert len(result["bare_ms"]) == len(result["generate_ms"]) == 2 and min(result["generate_ms"]) > 0
        assert (result["percent"] == 100) == (name in ("transformers", "dense", "absorbed_dense"))
        # the one layer has none
        assert result["experts"] == {"bare": [], "generate": [], "kernels": False, "same_bits": False}
    for state, (keys, values) in zip(filled._plain, rows, strict=True):
        assert state.keys.equal(keys) and state.values.equal(values)
    # per head and pooled share their teams; those of sampled steps have room behind them
    teams = [states[0].grouped.teams for states, _ in filled._grouped.values()]
    assert [None if found is None else found.room is not None for found in teams] == [None, None, True, True, True]


def test_a_turn_that_groups_generated_rows_starts_over(model: Any) -> None:
    plan = Plan(62, 2)
    rows = filled_by_drawing(model, 1, 64, plan.free)
    measured = Point(model, rows, 1, 64, [setting("pooled", {**SHARED, "regroup_after": 32})], plan, {})
    with on_the_cpu():
        for _ in measured.measure():
            result = measured.results["pooled"]
            # records have no common room, so each turn captures both kinds of call again
            assert result["steps"] > 2 * 62 and result["replayed"] == result["steps"] - 2
    assert all(state.grouped.stop == 64 for states, _ in rows._grouped.values() for state in states)


def test_orders_alternate_and_one_that_does_not_fit_is_left_out(
    model: Any, filled: FilledCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = type(model).generate

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_latent_santa" not in vars(self.model.layers[0].self_attn):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "generate", generate)
    measured = point(model, filled, "transformers,absorbed_dense,per_head", 2)
    collected = []
    monkeypatch.setattr(decode, "collect", collected.append)
    assert list(measured.measure()) == ["transformers", "absorbed_dense", "per_head", "per_head", "absorbed_dense"]
    assert measured.results["transformers"] == {"missing": "does not fit in the device's memory"}
    assert len(collected) == 5  # before each first turn, and around the second attempt
    (line,) = decode_report.missing([{"batch": 2, "context": 64, "results": measured.results}])
    assert line == "batch 2, 64 cached tokens, transformers: does not fit in the device's memory"


def test_rounds_of_a_setting_that_no_longer_fits_stay(
    model: Any, filled: FilledCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = point(model, filled, "transformers,absorbed_dense", 3)
    turns = measured.measure()
    assert [next(turns), next(turns), next(turns)] == ["transformers", "absorbed_dense", "absorbed_dense"]

    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measured, "_bare", full)
    assert next(turns) == "transformers"
    monkeypatch.undo()
    assert list(turns) == ["absorbed_dense"]
    result = measured.results["transformers"]
    assert len(result["generate_ms"]) == 1 and result["dropped"] == "does not fit in the device's memory"


def test_no_round_begins_after_the_time_is_over(model: Any, filled: FilledCache) -> None:
    measured = Point(model, filled, 2, 64, [setting("absorbed_dense", {})], Plan(4, 3, 0.0), {})
    assert list(measured.measure()) == ["absorbed_dense"]


def test_time_between_tokens_is_the_mean_of_the_timed_ones() -> None:
    clock = Clock()
    # the prompt, the untimed tokens, and three intervals
    clock.times = [0.0, *(float(n) for n in range(1, UNTIMED + 1)), 10.0, 10.1, 10.5, 10.6]
    assert clock.milliseconds() == pytest.approx(200)


def test_a_run_is_written_goes_on_and_makes_the_readmes_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, "--settings", "absorbed_dense,pooled", "--fill", "prefill", "--out", str(tmp_path)]
    assert main(["bench", "decode", *words, "--repeats", "1"]) == 0
    shown = capsys.readouterr().out
    assert "batch 2, 64 cached tokens, pooled: generate" in shown and "a round took" in shown
    first = json.loads((tmp_path / "decode.json").read_text())
    results = first["points"][0]["results"]
    assert first["points"][0]["row_bytes"] == 4 * 80  # a latent of 64 and a rotary key of 16 in float32
    assert first["points"][0]["prefill_ms"] > 0 and results["absorbed_dense"]["operator"] == "products"
    assert first["facts"]["layers"] == 1 and "commit" in first["facts"]

    assert main(["bench", "decode", *words]) == 2
    assert "holds a run already: give --resume to continue it" in capsys.readouterr().err
    assert main(["bench", "decode", *words, "--resume", "--budget", "16"]) == 2
    assert "has budget 8, and this run 16" in capsys.readouterr().err

    results["pooled"]["bare_ms"].append(1.0)  # of a round that was interrupted
    (tmp_path / "decode.json").write_text(json.dumps(first))
    assert main(["bench", "decode", *words, "--resume", "--repeats", "2"]) == 0
    later = json.loads((tmp_path / "decode.json").read_text())["points"][0]["results"]
    for name, result in results.items():
        assert later[name]["generate_ms"][:1] == result["generate_ms"]
        assert len(later[name]["generate_ms"]) == len(later[name]["bare_ms"]) == 2
    capsys.readouterr()
    assert main(["bench", "decode", "--table", str(tmp_path), "--settings", "pooled,absorbed_dense"]) == 0
    times = [f"{statistics.median(later[name]['generate_ms']):.1f}" for name in ("pooled", "absorbed_dense")]
    assert capsys.readouterr().out.splitlines()[-1] == f"| small, batch 2, 64 | {' | '.join(times)} |"
    assert main(["bench", "decode", "--table", str(tmp_path)]) == 0  # every setting of the run
    names = [name.strip().replace(" ", "_") for name in capsys.readouterr().out.splitlines()[0].split("|")[2:-1]]
    assert names == list(later)


def made_up(batch: int, context: int) -> dict[str, Any]:
    def result(milliseconds: float, **more: Any) -> dict[str, Any]:
        rounds = [milliseconds, 1.1 * milliseconds, 0.9 * milliseconds]
        experts = {"bare": ["grouped_mm"], "generate": ["grouped_mm"], "kernels": milliseconds < 50}
        experts |= {"same_bits": True} if 10 <= milliseconds < 50 else {}
        return {
            "generate_ms": rounds,
            "bare_ms": rounds,
            "percent": 100.0,
            "peak": 100 << 30,
            "experts": experts,
            **more,
        }

    results = {
        "transformers": result(context / 240, replayed=0),
        "absorbed_dense": result(18.0, replayed=1000, steps=1002, operator="FA3"),
        "pooled+two_stage+compile": result(9.0, replayed=1000, steps=1002, prepare_ms=12.3),
        "dense": {"missing": "does not fit in the device's memory"},
    }
    return {"batch": batch, "context": context, "results": results, "row_bytes": 31104.0}


def test_tables_and_picture() -> None:
    points = [made_up(batch, context) for batch in (1, 8) for context in (32768, 131072)]
    stream = io.StringIO()
    Console(file=stream, width=200).print(decode_report.screen_table(points[-1]))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert lines[0] == "batch 8, 128K cached tokens" and max(map(len, lines)) <= 80
    shown = " ".join(lines[-2].split())
    assert shown == "pooled+two_stage+compile 9.00 9.00 60.68 2.00 100.0 100.0 100"
    text = decode_report.markdown({"device": "a GPU", "shape": "small"}, points)
    assert "| pooled+two_stage+compile | 9.00 | 9.00 | 60.68 [60.68, 60.68] | 2.00 [2.00, 2.00] |" in text
    for ran in ("grouped_mm", "own kernels", "own kernels, same bits"):
        assert text.count(f"| {ran} |") == 4
    assert "Absorbed dense attention ran as FA3." in text and text.count("dense: does not fit in the device's") == 4
    compiled = {**points[0]["results"]["absorbed_dense"], "generate_ms": [12.0] * 3}
    points[0]["results"]["absorbed_dense+compile"] = compiled
    text = decode_report.markdown({}, points[:1])
    assert "| 1.33 [" in text and "| 2.00 [" not in text  # compiled against compiled
    del points[0]["results"]["absorbed_dense+compile"]
    table = decode_report.readme_table(
        [{"facts": {"shape": "small"}, "points": points}], ["dense", "absorbed_dense", "pooled+two_stage+compile"]
    )
    assert table.splitlines()[0] == "| ms per token | dense | absorbed dense | pooled+two stage+compile |"
    assert table.splitlines()[-1] == "| small, batch 8, 128K | - | 18.0 | 9.0 |"
    pytest.importorskip("matplotlib")
    picture = decode_report.plot(points)
    assert picture is not None and picture.startswith(b"\x89PNG") and decode_report.plot(points[:1]) is None


def test_a_setting_is_one_word() -> None:
    file = {"method": "quest", "budget": 32}
    assert setting("transformers", SHARED).overrides is None
    assert setting("dense+compile", SHARED).overrides == {"method": "dense"}
    assert setting("config+eager", SHARED, file).overrides == file
    found = setting("pooled+two_stage+int4+compile", SHARED)
    assert found.compile and not found.eager
    assert found.overrides == {**SHARED, "estimator": "pooled", "routing": "two_stage", "routing_dtype": "int4"}
    with pytest.raises(ValueError, match="'config' is no setting"):
        setting("config", SHARED)
