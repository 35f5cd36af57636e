"""The attention error of the sampled operator's settings on one workload, in PyTorch: many draws, no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from latent_santa.estimator import dense_attention, sampled_attention
from latent_santa.eval.bench.measure import Setting, quantised
from latent_santa.eval.bench.workload import Workload
from latent_santa.rows import Rows
from latent_santa.step import DecodeStep

RESAMPLES = 2000
ROWS = 16384  # rows whose float64 copies exist at once


def reference(step: DecodeStep) -> Tensor:
    """Dense attention over all rows in float64, ``(B, G, H, V)``, a piece of the rows at a time."""
    query = tuple(part.double() for part in step.query)
    outs, masses = [], []
    visible = step.visible
    for start in range(0, step.rows.length, ROWS):
        piece = slice(start, start + ROWS)
        keys = tuple(part[:, :, piece].double() for part in step.rows.keys)
        rows = Rows(keys, keys[0] if len(keys) == 2 else step.rows.values[:, :, piece].double())
        out, mass = dense_attention(query, rows, None if visible is None else visible[:, piece], step.scale)
        outs.append(out)
        masses.append(mass)
    share = torch.stack(masses).softmax(0).nan_to_num(0.0)
    return (torch.stack(outs).nan_to_num(0.0) * share[..., None]).sum(0)


def errors(workload: Workload, settings: Sequence[Setting], draws: int) -> dict[str, Any]:
    """Every setting's relative error ``||estimate - dense|| / ||dense||`` on one workload.

    The settings meet the same draws of noise. The reference is float64, the estimates float32 over the rows' dtype.

    Returns:
        By setting's name ``errors``, one list of all heads' errors per draw, and ``rows``, the mean rows read in all
        (routing and union).
    """
    step = workload.step
    want = reference(step)
    steps = {setting.routing_dtype: quantised(workload, setting.routing_dtype).step for setting in settings}
    query = tuple(part.float() for part in step.query)
    found: dict[str, Any] = {setting.name: {"errors": [], "rows": 0.0} for setting in settings}
    for draw in range(draws):
        noise = replace(step.draw, step=step.draw.step + draw)
        for setting in settings:
            drawn = replace(steps[setting.routing_dtype], query=query, draw=noise)
            output = sampled_attention(drawn, setting.sampling)
            error = (output.out.double() - want).norm(dim=-1) / want.norm(dim=-1)
            entry = found[setting.name]
            entry["errors"].append(error.flatten().tolist())
            entry["rows"] += float((output.routing + output.union).sum()) / draws
    return found


def compared(records: Sequence[dict[str, Any]], first: str, seed: int = 0) -> dict[str, dict[str, float]]:
    """Each setting's mean error over workloads, heads and draws, and its ratio to the error of the setting ``first``.

    Intervals are 95 % bootstrap intervals over draws and over the heads of all workloads; the two means of a ratio
    come from the same draws and heads.
    """
    generator = np.random.default_rng(seed)
    names = list(records[0])
    values = {name: np.concatenate([np.asarray(record[name]["errors"]) for record in records], 1) for name in names}
    draws, heads = values[first].shape
    picks = [
        (generator.integers(draws, size=(draws, 1)), generator.integers(heads, size=heads)) for _ in range(RESAMPLES)
    ]
    means = {name: np.array([value[pick].mean() for pick in picks]) for name, value in values.items()}
    table = {}
    for name, value in values.items():
        low, high = np.percentile(means[name], (2.5, 97.5))
        least, most = np.percentile(means[name] / means[first], (2.5, 97.5))
        table[name] = {
            "error": float(value.mean()), "low": float(low), "high": float(high),
            "ratio": float(value.mean() / values[first].mean()), "ratio_low": float(least), "ratio_high": float(most),
            "rows": float(np.mean([record[name]["rows"] for record in records])),
        }  # fmt: skip
    return table


def markdown(table: dict[str, dict[str, float]]) -> str:
    """The settings as a Markdown table of fewer than 80 columns."""
    lines = ["| setting | error [95 %] | over the first [95 %] | rows read |", "| --- | ---: | ---: | ---: |"]
    for name, line in table.items():
        error = f"{line['error']:.3g} [{line['low']:.3g}, {line['high']:.3g}]"
        ratio = f"{line['ratio']:.2f} [{line['ratio_low']:.2f}, {line['ratio_high']:.2f}]"
        lines.append(f"| {name} | {error} | {ratio} | {line['rows']:.0f} |")
    return "\n".join(lines) + "\n"
