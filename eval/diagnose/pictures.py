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
