"""The picture of a run: accuracy against rows read."""

from __future__ import annotations

import io
from typing import Any

from latent_santa.eval.report.paper_tables import MEAN
from latent_santa.eval.report.tables import has_bound, has_bounds, lines_of

_MARKERS = "osD^vPX*<>"
_STROKES = ("-", "--", ":")
FEW = 10  # lines; of more the legend stands below, and budgets are left out


def look(number: int) -> tuple[str, str, str]:
    """Colour, marker and stroke of a line. Ten colours repeat, with other markers and strokes; 30 lines differ."""
    again = number // len(_MARKERS)
    return f"C{number % 10}", _MARKERS[(number + 3 * again) % len(_MARKERS)], _STROKES[again % len(_STROKES)]


class NoPicture(Exception):
    """Why nothing can be drawn, and what to do."""


def access_accuracy(summary: dict[str, Any]) -> bytes:
    """A PNG: one line per method with 95 % intervals, budgets beside the points, and dense's level with its interval.

    Raises NoPicture where matplotlib does not import, or while no condition is complete.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        if error.name == "matplotlib":
            raise NoPicture("matplotlib is not installed: pip install 'latent-santa[eval]'") from error
        raise NoPicture(f"matplotlib does not import ({error})") from error

    # A figure of its own, not pyplot's: no display, no global state.
    lines = lines_of(summary)
    many = len(lines) > FEW
    figure = Figure(figsize=(7.5, 9.0 if many else 5.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    drawn = False
    for entry in summary["conditions"]:
        score = entry["cells"][MEAN]["score"]
        if entry["method"] == "dense" and score:
            axes.axhline(score["value"], color="black", linewidth=1, label=entry["name"])
            axes.axhspan(score["low"], score["high"], color="black", alpha=0.07, linewidth=0)
            drawn = True
    for i, (name, entries) in enumerate(lines.items()):
        points = [(entry["cells"][MEAN], entry["S"]) for entry in entries]
        points = [(cell, budget) for cell, budget in points if cell["score"] and cell["access"] is not None]
        if not points:
            continue
        points.sort(key=lambda point: point[0]["access"])
        x = [cell["access"] for cell, _ in points]
        y = [cell["score"]["value"] for cell, _ in points]
        below = [cell["score"]["value"] - cell["score"]["low"] for cell, _ in points]
        above = [cell["score"]["high"] - cell["score"]["value"] for cell, _ in points]
        color, marker, stroke = look(i)
        bars = {"capsize": 0, "elinewidth": 0.5, "markersize": 4} if many else {"capsize": 3}
        drawing: dict[str, Any] = {"color": color, "marker": marker, "linestyle": stroke, "linewidth": 1.3, **bars}
        axes.errorbar(x, y, yerr=[below, above], label=name, **drawing)
        for (cell, budget), at_x, at_y in zip(points, x, y, strict=True):
            if budget and not many:
                axes.annotate(f"S={budget}", (at_x, at_y), xytext=(4, -10), textcoords="offset points", fontsize=7)
            if has_bound(cell):
                axes.plot((cell["bound"], at_x), (at_y, at_y), color=color, linestyle=":", linewidth=0.8)
                axes.plot(cell["bound"], at_y, color=color, marker=marker, markerfacecolor="none")
        drawn = True
    if not drawn:
        raise NoPicture("no setting has all of its results yet")
    bounds = "; hollow: their bound" if has_bounds(summary) else ""
    axes.set_xlabel(f"rows read, routing included (% of dense decoding{bounds})")
    axes.set_ylabel(f"accuracy (%), {summary['mean']}")
    axes.set_title(
        f"{summary['model']}, {summary['length']} tokens, {summary['n']} prompts per task\n{summary['data']}",
        fontsize=9,
    )
    axes.margins(x=0.1)
    axes.grid(alpha=0.3)
    if many:
        figure.legend(loc="outside lower center", ncols=2, fontsize=7)
    else:
        axes.legend(fontsize=8)
    content = io.BytesIO()
    # Without the software's version in the file, the same summary gives the same bytes.
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()
