"""Figures of their own, not pyplot's: no display, no global state."""

from __future__ import annotations

import io
from typing import Any

from latent_santa.eval.report.plots import NoPicture


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches. Raises NoPicture without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoPicture("matplotlib is not installed: pip install 'latent-santa[eval]'") from error
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Any) -> bytes:
    """The figure as a PNG, without the software's version, so that the same numbers give the same bytes."""
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def arms(intervals: list[dict[str, Any]]) -> list[list[float]]:
    """Lengths of error bars below and above the means; 0 where there is no interval."""
    known = [
        one if one["low"] is not None else dict.fromkeys(("mean", "low", "high"), one["mean"]) for one in intervals
    ]
    return [[one["mean"] - one["low"] for one in known], [one["high"] - one["mean"] for one in known]]


def bars(heights: dict[str, dict[str, dict[str, Any]]], label: str, title: str) -> bytes:
    """Grouped bars with intervals: for each name its tasks' means."""
    tasks = list(dict.fromkeys(task for own in heights.values() for task in own))
    figure = new_figure(max(7.5, 1.2 * len(tasks) + 4.5), 4.5)
    axes = figure.add_subplot(ylabel=label)
    width = 0.8 / len(heights)
    for number, (name, own) in enumerate(heights.items()):
        at = [place + (number - (len(heights) - 1) / 2) * width for place, task in enumerate(tasks) if task in own]
        intervals = [own[task] for task in tasks if task in own]
        means = [interval["mean"] for interval in intervals]
        axes.bar(at, means, width, yerr=arms(intervals), capsize=2, label=name, color=f"C{number % 10}")
    axes.set_xticks(range(len(tasks)), tasks, fontsize=8)
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3, axis="y")
    figure.legend(loc="outside right upper", fontsize=7)
    return png(figure)
