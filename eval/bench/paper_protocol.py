"""Appendix E's own protocol, for numbers that stand beside Tables 5 and 13: K = 31, SDPA's flash kernel as the dense
peer, a stream and no graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch

from latent_santa.estimator import sampled_attention
from latent_santa.eval.bench.baselines import GQA
from latent_santa.eval.bench.measure import Setting, operator, stages
from latent_santa.eval.bench.report import workload_name
from latent_santa.eval.bench.timing import Launch, Rounds, ratio_interval
from latent_santa.eval.bench.workload import Size, Workload
from latent_santa.eval.report.tables import markdown_table
from latent_santa.kernels import Workspace
from latent_santa.step import Output, Sampling

ROUNDS = Rounds(rounds=20, observations=1000, warmup=300, evict=512)
STAGE_OBSERVATIONS = 500  # in a round of 1,000 of the whole operator
SETTING = Setting(Sampling(31))
SIZE = Size("gqa", 28, 4, 32768, 1, 128)
DENSE = "SDPA flash"
REALISATIONS = 3  # draws of which the output is checked


class Clock(Protocol):
    """What measures: :class:`latent_santa.eval.bench.timing.DeviceClock`, or a stand-in in tests."""

    rounds: Rounds

    def paired(self, methods: dict[str, Launch]) -> dict[str, list[float]]:
        """Each method's round medians, microseconds."""

    def rotated(self, parts: dict[str, Launch], observations: int) -> dict[str, list[float]]:
        """Each part's round medians, microseconds, when the parts before it have run."""


def kernel_names(launch: Launch) -> list[str]:
    """The kernels of one call in their order, as PyTorch's profiler sees them on the device."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    launch()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        launch()
        torch.cuda.synchronize()
    events = (event for event in seen.events() if event.device_type == DeviceType.CUDA)
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


def largest_error(w: Workload, launch: Callable[[], Output]) -> float:
    """The largest absolute difference from the PyTorch operator, over three sampling realisations."""
    errors = []
    for _ in range(REALISATIONS):
        w.step.draw.step.add_(1)
        want = sampled_attention(replace(w.step, query=tuple(part.float() for part in w.step.query)), SETTING.sampling)
        errors.append(float((launch().out - want.out).abs().max()))
    w.step.draw.step.sub_(REALISATIONS)
    return max(errors)


def measure(w: Workload, clock: Clock) -> dict[str, Any]:
    """Check, list the launches, then time both methods in pairs and every stage after what comes before it.

    Returns a record ready for JSON; times are microseconds, medians of round medians.

    Raises:
        KeyError, RuntimeError: ``w`` is no workload that the dense kernel takes.
    """
    space = Workspace()
    calls: dict[str, Launch] = {DENSE: GQA[DENSE](w.step), "SANTA++": operator(w, SETTING, space)}
    error = largest_error(w, operator(w, SETTING, space))
    kernels = {name: kernel_names(call) for name, call in calls.items()}
    rounds = clock.paired(calls)
    share = clock.rounds.observations * STAGE_OBSERVATIONS // ROUNDS.observations
    parts = clock.rotated(stages(w, SETTING, space), max(share, 1))
    point, low, high = ratio_interval(rounds[DENSE], rounds["SANTA++"])
    return {
        "workload": w.describe(),
        "k": SETTING.sampling.k,
        "error": error,
        "kernels": kernels,
        "rounds": rounds,
        "us": {name: statistics.median(times) for name, times in rounds.items()},
        "ratio": {"ratio": point, "low": low, "high": high},
        "stages_us": {name: statistics.median(times) for name, times in parts.items()},
    }


def markdown(facts: dict[str, Any], record: dict[str, Any]) -> str:
    """The record as Markdown, in the order of Appendix E."""
    ratio, rounds = record["ratio"], record["rounds"]
    protocol = ", ".join(f"{key} {value}" for key, value in facts["protocol"].items())
    spans = [
        [name, f"{record['us'][name]:.2f}", f"{min(times):.2f} to {max(times):.2f}", str(len(record["kernels"][name]))]
        for name, times in rounds.items()
    ]
    lines = [
        "# The operator under Appendix E's protocol",
        "",
        f"{facts['device']}, torch {facts['torch']}, Triton {facts['triton']}, {facts['date']}, source "
        f"{facts['commit']}. Command: `{facts['command']}`.",
        "",
        f"{workload_name(record['workload'])}, {record['workload']['dtype']}, K = {record['k']} teams per head, "
        f"launched from a stream. Times are microseconds, medians of round medians ({protocol}; evict in MiB).",
        "",
        markdown_table(("method", "median", "round medians", "launches"), spans).rstrip("\n"),
        "",
        f"Ratio {ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]; the paper's is 1.69 on an RTX 5090 "
        f"Laptop GPU. Largest absolute difference from the PyTorch operator over {REALISATIONS} draws: "
        f"{record['error']:.1e}.",
        "",
        "Stages, each alone after an eviction; they do not add up (Table 13):",
        "",
        markdown_table(("stage", "median"), [[n, f"{us:.2f}"] for n, us in record["stages_us"].items()]).rstrip("\n"),
        "",
        "Launches that the profiler saw:",
        "",
        *(f"- {name}: {', '.join(seen)}" for name, seen in record["kernels"].items()),
    ]
    return "\n".join(lines) + "\n"
