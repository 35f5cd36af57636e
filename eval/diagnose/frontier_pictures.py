"""Error against rows as pictures: the total with intervals, and a panel per layer."""

from __future__ import annotations

from typing import Any

from .pictures import arms, new_figure, png

MARKERS = "osD^vPX*<>hp"
PANEL_COLUMNS = 6
MOST = 20  # lines that all have a colour and a name
ROWS_READ, ERROR = "rows read, routing included (% of dense decoding)", "relative attention error"
# the error of a setting that reads everything is nothing but rounding, and 0 has no logarithm
FLOOR = 1e-7


def error_against_rows(lines: list[dict[str, Any]], title: str) -> dict[str, bytes]:
    """Both pictures, by the end of their file names. A line joins settings that differ in no more than the budget.

    Settings that select everything are dense attention, and left out where there are others.
    """
    named: dict[str, list[dict[str, Any]]] = {}
    for line in sorted([line for line in lines if not line["full"]] or lines, key=lambda line: line["kv"]):
        named.setdefault(line["name"], []).append(line)
    return {".png": _total(named, title), "_layers.png": _by_layer(named)}


def _total(named: dict[str, list[dict[str, Any]]], title: str) -> bytes:
    styles = _styles(named)
    figure = new_figure(9.5, max(5.5, 0.17 * sum("label" in style for style in styles.values())))
    axes = figure.add_subplot(yscale="log", xlabel=ROWS_READ, ylabel=ERROR)
    labelled: list[tuple[int, float, float]] = []
    for name, own in named.items():
        at, errors = [line["kv"] for line in own], arms([line["error"] for line in own])
        means = [max(line["error"]["mean"], FLOOR) for line in own]
        axes.errorbar(at, means, yerr=errors, capsize=2, **styles[name])
        for x, y, line in zip(at, means, own, strict=True):
            if line["bound"] is not None:
                axes.plot(line["bound"], y, markerfacecolor="none", **{**styles[name], "label": None})
            near = any(s == line["S"] and x - a < 3 and y / b > 0.8 for s, a, b in labelled)
            if line["best"] and line["S"] and not near:
                labelled.append((line["S"], x, y))
                axes.annotate(f"S={line['S']}", (x, y), xytext=(3, -9), textcoords="offset points", fontsize=6)
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=7)
    return png(figure)


def _by_layer(named: dict[str, list[dict[str, Any]]]) -> bytes:
    styles = _styles(named)
    layers = len(next(iter(named.values()))[0]["by_layer"])
    columns = min(PANEL_COLUMNS, layers)
    rows = -(-layers // columns)
    figure = new_figure(2.3 * columns + 1.5, max(2.0 * rows + 0.8, 0.15 * min(len(named), MOST)))
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for layer, axes in enumerate(grid.flat):
        if layer >= layers:
            axes.set_visible(False)
            continue
        for name, own in named.items():
            of_layer = [line["by_layer"][layer] for line in own]
            errors = [max(line["error"], FLOOR) for line in of_layer]
            axes.plot([line["kv"] for line in of_layer], errors, **styles[name])
        axes.set_yscale("log")
        axes.set_title(f"layer {layer}", fontsize=8)
        axes.grid(alpha=0.3)
    figure.supxlabel(ROWS_READ, fontsize=8)
    figure.supylabel(ERROR, fontsize=8)
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside right upper", fontsize=6)
    return png(figure)


def _styles(named: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Each line's colour, marker and label; of many lines, those without a best setting are grey and have no label."""
    shown = [name for name, own in named.items() if len(named) <= MOST or any(line["best"] for line in own)]
    styles: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(shown):
        marker = MARKERS[number % len(MARKERS)]
        styles[name] = {"color": f"C{number % 10}", "marker": marker, "markersize": 4, "linewidth": 1.2, "label": name}
    grey = {"color": "0.8", "marker": ".", "markersize": 4, "linewidth": 0.8, "zorder": 0}
    return {name: styles.get(name, grey) for name in named}
