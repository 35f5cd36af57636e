"""Nsight Compute's counters of a decoding step's kernels, as in Table 14, where ``ncu`` is installed and allowed."""

from __future__ import annotations

import csv
import io
import shutil
import statistics
import subprocess
from collections.abc import Sequence

import torch

from latent_santa.eval.errors import EvalError

# ncu's metric to the column of Table 14
METRICS = {
    "gpu__time_duration.sum": "ncu us",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occ. %",
    "smsp__warps_eligible.avg.per_cycle_active": "elig.",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM %",
}
# without --print-units base ncu takes a unit for each value
TO_MICROSECONDS = {"nsecond": 1e-3, "ns": 1e-3}
CAPTURES = 3


def check() -> None:
    """Raises EvalError where ncu has nothing to run on, or is not there."""
    if not torch.cuda.is_available():
        raise EvalError("--ncu: there is no CUDA device to run on; leave --ncu out")
    if shutil.which("ncu") is None:
        raise EvalError("--ncu: there is no ncu on the path; install Nsight Compute, or leave --ncu out")


def counters(command: Sequence[str], kernels: Sequence[str]) -> list[tuple[str, dict[str, float]]]:
    """Kernel and Table 14's columns of every launch of one step; medians over `CAPTURES` equal steps.

    command: runs the step so often, in a process of its own.
    kernels: the functions that are counted. PyTorch's own, which also fill the rows, have names such as
        vectorized_elementwise_kernel.

    Raises EvalError: ncu may not read counters here, or says something else.
    """
    options = "--csv --print-units base --cache-control all --clock-control none --metrics"
    named = f"regex:^({'|'.join(sorted(set(kernels)))})$"
    asked = ["ncu", "--kernel-name", named, *options.split(), ",".join(METRICS), *command]
    done = subprocess.run(asked, capture_output=True, text=True)
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        raise EvalError(
            "--ncu: the driver lets only administrators read counters here (ERR_NVGPUCTRPERM): ask for access, or "
            "leave --ncu out"
        )
    if done.returncode:
        raise EvalError(f"--ncu: ncu stopped with {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}")
    return medians(launches(done.stdout))


def launches(output: str) -> list[tuple[str, dict[str, float]]]:
    """Every profiled launch in order, from ncu's CSV: one line per launch and metric, behind ncu's own lines.

    Raises EvalError for a line without a number, such as the n/a of a metric that a device lacks.
    """
    text = "\n".join(line for line in output.splitlines() if line.startswith('"'))
    found: dict[str, tuple[str, dict[str, float]]] = {}
    for line in csv.DictReader(io.StringIO(text)):
        name, text, unit = (str(line.get(f"Metric {what}")) for what in ("Name", "Value", "Unit"))
        try:
            value, column = float(text.replace(",", "")), METRICS[name]
            value *= TO_MICROSECONDS[unit] if column == "ncu us" else 1.0
        except (ValueError, KeyError) as error:
            raise EvalError(f"--ncu: ncu gives {name} as {text!r} {unit}, and this command cannot read that") from error
        found.setdefault(line["ID"], (line["Kernel Name"], {}))[1][column] = value
    return list(found.values())


def medians(found: list[tuple[str, dict[str, float]]]) -> list[tuple[str, dict[str, float]]]:
    """The launches of one step, from those of `CAPTURES` steps in a row. Raises EvalError if these differ."""
    size, rest = divmod(len(found), CAPTURES)
    steps = [found[i * size : (i + 1) * size] for i in range(CAPTURES)]
    if rest or not size or any([name for name, _ in step] != [name for name, _ in steps[0]] for step in steps):
        raise EvalError(f"--ncu: ncu saw {len(found)} launches, which are no {CAPTURES} equal steps")
    return [
        (name, {column: statistics.median(step[i][1][column] for step in steps) for column in values})
        for i, (name, values) in enumerate(steps[0])
    ]
