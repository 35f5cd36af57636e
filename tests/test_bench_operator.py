"""The operator benchmark without a GPU: its arithmetic, its report, its files, and its refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from latent_santa.eval.bench import paper_protocol, report
from latent_santa.eval.bench.capture import capture
from latent_santa.eval.bench.goals import GOALS, goal_of
from latent_santa.eval.bench.measure import Setting, bytes_read, measure, quantised
from latent_santa.eval.bench.timing import DeviceClock, Rounds, ratio_interval
from latent_santa.eval.bench.workload import Size, Workload, load, save, synthetic
from latent_santa.eval.cli import main
from latent_santa.eval.errors import EvalError
from latent_santa.step import Output, Sampling

from .tiny_models import tiny_model

FACTS: dict[str, Any] = {
    "device": "a device", "torch": "2.x", "triton": "3.x", "date": "2026-01-01", "commit": "abc",
    "command": "bench operator", "copy_bandwidth": 4e12,
    "protocol": {"rounds": 2, "observations": 3, "warmup": 1, "evict": 4},
}  # fmt: skip


class FakeClock:
    """Says that the n-th method took 10 n microseconds in round one, 1 more in each next; runs single stages once."""

    rounds = paper_protocol.ROUNDS

    def captured(self, launch: Any) -> Any:
        return launch

    def paired(self, methods: dict[str, Any], in_order: bool = False) -> dict[str, list[float]]:
        for launch in methods.values() if in_order else ():
            launch()
        return {name: [10.0 * n + r for r in range(3)] for n, name in enumerate(methods, 1)}

    def rotated(self, parts: dict[str, Any], observations: int) -> dict[str, list[float]]:
        assert observations == 500
        return self.paired(parts, in_order=True)


def small(layout: str = "mla", batch: int = 1, context: int = 96, parent_summary: str | None = None) -> Workload:
    size = Size(layout, 4, 1 if layout == "mla" else 2, context, batch, 32)
    return synthetic(size, dtype=torch.float16, device="cpu", parent_summary=parent_summary)


def test_ratio_and_its_interval() -> None:
    slow, fast = [30.0, 31.0, 29.0, 30.5], [10.0, 10.5, 9.5, 10.2]
    point, low, high = ratio_interval(slow, fast, 500)
    assert point == pytest.approx(30.25 / 10.1)
    assert low < point < high and 2.8 < low and high < 3.2
    # rounds are resampled in pairs: a drift that both methods share cancels
    point, low, high = ratio_interval([2.0 * t for t in range(1, 20)], [1.0 * t for t in range(1, 20)], 500)
    assert (point, low, high) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("layout", ["mla", "gqa"])
def test_synthetic_workloads(layout: str) -> None:
    w = small(layout, batch=2)
    assert (w.step.batch, w.step.groups, w.step.heads, w.context) == (
        (2, 1, 4, 96) if layout == "mla" else (2, 2, 2, 96)
    )
    assert w.row_bytes == 2 * (576 if layout == "mla" else 64)
    assert w.teams.count.tolist() == [[24] * w.step.groups] * 2
    assert (w.teams.team_of_row >= 0).all() and w.describe()["source"] == "synthetic"
    assert not torch.equal(w.step.rows.values[0], w.step.rows.values[1])


def test_bytes_a_call_must_read() -> None:
    w = small("gqa")
    rows = {"union": torch.tensor([[10, 0]]), "suffix": torch.tensor([[1, 2]])}
    one = Output(torch.empty(0), torch.empty(0), torch.tensor([[24, 24]]), **rows)
    assert bytes_read(w, Sampling(2), one) == {"routing": 48 * (64 + 4), "union": 1280, "suffix": 384}
    assert bytes_read(quantised(w, "int4"), Sampling(2), one)["routing"] == 48 * (16 + 2 * 2 + 4)
    two = replace(one, routing=torch.tensor([[2 * 6 + 8, 2 * 6 + 4]]))  # 6 parents of two vectors, and their teams
    w = small("gqa", parent_summary="diagonal")
    assert bytes_read(w, Sampling(2, parents=2), two)["routing"] == 12 * (2 * 64 + 4) + 12 * (64 + 4)


def test_a_saved_workload_is_the_same(tmp_path: Path) -> None:
    w = small("gqa", batch=2, parent_summary="diagonal")
    save(w, tmp_path / "sub" / "w.pt")
    again = load(tmp_path / "sub" / "w.pt", "cpu")
    assert (
        again.describe() == w.describe()
        and again.step.scale == w.step.scale
        and again.teams.row_bound == w.teams.row_bound
    )
    tensors = [
        (*x.step.query, *x.step.rows.keys, x.step.rows.values, x.teams.parents.of_team, *x.teams.parents.spread)
        for x in (w, again)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*tensors, strict=True))
    latent = small("mla")
    save(latent, tmp_path / "l.pt")
    again = load(tmp_path / "l.pt", "cpu")
    assert again.step.rows.values is again.step.rows.keys[0]
    with pytest.raises(EvalError, match="no workload file"):
        load(tmp_path / "missing.pt", "cpu")
    torch.save({"format": 0}, tmp_path / "old.pt")
    with pytest.raises(EvalError, match="no workload of format"):
        load(tmp_path / "old.pt", "cpu")


@pytest.mark.parametrize("layout", ["mla", "gqa"])
def test_capturing_a_models_layer(layout: str) -> None:
    model = tiny_model("deepseek_v2" if layout == "mla" else "llama")
    ids = [3 + n % 90 for n in range(80)]
    w = capture(model, ids, 1, 3, "tiny", parents="contiguous", budget=16)
    assert (w.layout, w.step.batch, w.step.draw.layer, w.source) == (layout, 1, 1, "tiny layer 1")
    assert w.teams.length == 80 and w.context == 80 + w.step.suffix.index.numel() > 80
    with pytest.raises(EvalError, match="--layer 7"):
        capture(model, ids, 7, 2, "tiny", parents="contiguous", budget=16)


def test_measuring_and_reporting(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed: the kernels cannot run")
    from latent_santa.eval.bench import measure as module
    from latent_santa.kernels.support import interpreting

    if not interpreting():
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(module, "baselines", lambda w: ({"dense": lambda: None}, {"FA3": "ImportError: none"}))
    settings = [Setting(Sampling(2)), Setting(Sampling(2, "pooled", parents=2), "int8")]
    records = [
        measure(small("gqa", context=c, parent_summary="mean"), settings, FakeClock(), ("graph",), 4e12, True)
        for c in (64, 96)
    ]
    first = records[0]
    json.dumps(records)
    assert first["dense"]["dense"]["graph"]["us"] == 11 and first["sampled"][1]["graph"]["us"] == 31
    assert all(entry["error"] < 2e-3 for entry in first["sampled"])
    assert list(first["sampled"][0]["stages_us"]) == ["route", "select", "attend", "combine"]
    assert list(first["sampled"][1]["stages_us"])[:2] == ["route parents", "select parents"]
    assert all(0 < entry["attention_error"] < 3 for entry in first["sampled"])
    assert first["sampled"][0]["graph"]["ratios"]["dense"]["ratio"] == pytest.approx(11 / 21)
    text = report.markdown(FACTS, records)
    assert "| GQA 4/2/32, b1, 64 rows (synthetic) | sampled per head K=2 | 21.0 |" in text
    assert "0.52 [" in text and "- FA3: ImportError: none" in text and "## launched from a stream" not in text
    assert "Checked against the PyTorch operator with the same noise: 4 of 4 settings" in text and "**" not in text
    first["sampled"][1]["error"] = 0.3
    assert "- GQA 4/2/32, b1, 64 rows (synthetic), pooled K1=2 K=2 routing int8: 3.0e-01" in report.markdown(
        FACTS, records
    )
    picture = report.plot(records)
    assert picture is not None and picture.startswith(b"\x89PNG")
    assert report.plot(records[:1]) is None


def test_the_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """From options to files, with a stand-in for the device: its clock, its name and its memory."""
    pytest.importorskip("triton", reason="triton is not installed: the kernels cannot run")
    from latent_santa import kernels
    from latent_santa.eval.bench import facts, measure, timing, workload
    from latent_santa.eval.run import sizes
    from latent_santa.kernels.support import interpreting

    if not interpreting():
        pytest.skip("needs Triton's interpreter")
    original = workload.synthetic
    monkeypatch.setattr(workload, "synthetic", lambda *a, **k: original(*a, **k, dtype=torch.float16, device="cpu"))
    monkeypatch.setattr(measure, "baselines", lambda w: ({"dense": lambda: None}, {}))
    monkeypatch.setattr(timing, "DeviceClock", lambda rounds, device: FakeClock())
    monkeypatch.setattr(timing, "copy_bandwidth", lambda device: 4e12)
    monkeypatch.setattr(facts, "facts", lambda device, **settings: {**FACTS, **settings})
    monkeypatch.setattr(sizes, "free_bytes", lambda device: 1 << 30)
    monkeypatch.setattr(kernels, "unavailable", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    options = (
        "--layout gqa --heads 4 --groups 2 --head-dim 32 --context 64 --budgets 8 --estimators pooled --modes graph"
    )
    two = "--routing two_stage --noise shared --parents-per-head 2 --parent-summary isotropic"
    assert (
        main(["bench", "operator", *options.split(), "--query-dtype", "float32", *two.split(), "--out", str(tmp_path)])
        == 0
    )
    shown = capsys.readouterr().out
    assert "GQA 4/2/32, b1, 64 rows (synthetic) measured" in shown and "source abc" in shown
    saved = json.loads((tmp_path / "operator.json").read_text())
    assert saved["facts"]["protocol"] == {"rounds": 20, "observations": 100, "warmup": 20, "evict": 256}
    (record,) = saved["results"]
    assert record["workload"]["query_dtype"] == "float32" and record["sampled"][0]["error"] < 2e-3
    assert record["sampled"][0]["name"] == "pooled K1=2 K=2 shared"
    assert (tmp_path / "operator.md").read_text().strip() == shown[shown.index("# Operator") :].strip()
    assert main(["bench", "operator", "--table", str(tmp_path / "operator.json")]) == 0
    (line,) = capsys.readouterr().out.splitlines()[2:]
    assert line.startswith("| GQA 4/2/32, b1, 64 rows | pooled K1=2 K=2 shared | 11.0 (dense) | 21.0 | 0.52 [")
    assert main(["bench", "operator", "--table", str(tmp_path / "none")]) == 2
    assert "none holds no run of bench operator (FileNotFoundError)" in capsys.readouterr().err


def test_the_papers_own_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appendix E's numbers are the defaults; launches, stages, ratio and error go into table and file."""
    pytest.importorskip("triton", reason="triton is not installed: the kernels cannot run")
    from latent_santa.kernels.support import interpreting

    if not interpreting():
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(paper_protocol, "SETTING", Setting(Sampling(3)))
    monkeypatch.setattr(paper_protocol, "GQA", {"SDPA flash": lambda step: lambda: None})
    monkeypatch.setattr(paper_protocol, "kernel_names", lambda launch: ["a", "b"])
    w = small("gqa", context=64)
    step = w.step.draw.step.clone()
    record = paper_protocol.measure(w, FakeClock())
    assert record["us"] == {"SDPA flash": 11.0, "SANTA++": 21.0} and 0 < record["error"] < 2e-3
    assert list(record["stages_us"]) == ["route", "select", "attend", "combine"] and torch.equal(step, w.step.draw.step)
    json.dumps(record)
    text = paper_protocol.markdown({**FACTS, "protocol": vars(paper_protocol.ROUNDS)}, record)
    assert "| SANTA++ | 21.00 | 20.00 to 22.00 | 2 |" in text and "Ratio 0.524 [" in text and "- SANTA++: a, b" in text
    assert "rounds 20, observations 1000, warmup 300, evict 512" in text and "float16, K = 3" in text


def test_a_stage_is_timed_after_what_comes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every turn another stage is first, and each finds what the stages before it have written."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            pass

        def record(self) -> None:
            ran.append("|")

        def elapsed_time(self, other: Any) -> float:
            return 0.002

    ran: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock = DeviceClock(Rounds(2, 9, 1, 0), torch.device("cpu"))
    parts = {name: lambda name=name: ran.append(name) for name in "abc"}
    assert clock.rotated(parts, 2) == {name: [2.0, 2.0] for name in "abc"}
    assert "".join(ran[: len(ran) // 2]) == "|a|a|b|ab|c|" + "a|b|ab|c||a|" + "ab|c||a|a|b|"


def test_goals_belong_to_their_settings() -> None:
    assert goal_of("mla", 16, 8, 131072, "per_head", 32, "model") == 3.0
    assert goal_of("mla", 16, 8, 131072, "per_head", 32, "int4") == 5.0
    assert goal_of("mla", 16, 8, 131072, "pooled", 32, "model") is None
    assert goal_of("mla", 16, 8, 131072, "per_head", 8, "model") is None
    assert [goal_of("mla", 16, 32, 65536, "pooled", 32, "model", two) for two in (False, True)] == [None, 3.5]
    many = ("mla", 128, 8, 131072, "pooled", 16, "model", True)
    assert [goal_of(*many, noise) for noise in ("shared", "independent")] == [2.0, None]
    assert len({goal.key for goal in GOALS}) == len(GOALS)


def test_a_goal_of_two_stages_says_their_error() -> None:
    against = {"best_dense": "FA3", "ratios": {"FA3": {"ratio": 3.3, "low": 3.2, "high": 3.4}}}
    timed = {"us": 90.0, "bandwidth_fraction": 0.3, **against}
    shared = {"k": 32, "estimator": "per_head", "noise": "independent", "routing_rows": 2, "union_rows": 1}
    one = {"name": "one", "parents": None, "attention_error": 2.0, "routing_dtype": "model", "goal": None}
    two = {**one, "name": "two", "parents": 16, "attention_error": 1.5, "goal": 3.3}
    coded = {**two, "name": "coded", "routing_dtype": "int8"}  # its one stage was not measured
    record = {
        "workload": {"layout": "mla", "heads": 16, "batch": 8, "context": 131072, "source": "synthetic"},
        "dense": {"FA3": {"graph": {"us": 300.0, "bandwidth_fraction": 0.9}}},
        "sampled": [{**entry, **shared, "graph": timed} for entry in (one, two, coded)],
    }
    lines = report.short([record]).splitlines()[2:]
    start = "| MLA 16 heads, b8, 128K | {} | 300.0 (FA3) | 90.0 | 3.30 [3.20, 3.40] | {} |"
    goals = ("", "3.3 (met, error 0.75 of one stage's)", "3.3 (met)")
    for line, name, goal in zip(lines, ("one", "two", "coded"), goals, strict=True):
        assert line.startswith(start.format(name, goal))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layout", "gqa", "--heads", "30"], "multiple of --groups 4"),
        (["--modes", "eager"], "'eager' is not one of graph, stream"),
        (["--budget", "126"], "divisible by P/R"),
        (["--noise", "none"], "'none' is not one of independent, shared"),
        (["--routing", "both"], "'both' is not one of one_stage, two_stage"),
        (["--paper", "--goals"], "without --workload and --paper"),
        (["--estimator", "mean"], "'mean' is not one of per_head, pooled"),
    ],
)
def test_wrong_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "operator", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device would be timed")
def test_no_device_to_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "operator"]) == 2
    assert "there is no CUDA device" in capsys.readouterr().err
