"""What ``bench decode`` writes: a table per filled cache, a picture of time against context, and the README's table."""

from __future__ import annotations

import io
import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from latent_santa.eval.bench.timing import ratio_interval
from latent_santa.eval.report.tables import markdown_table, plain_table

FASTEST_DENSE, UNPATCHED = "absorbed_dense", "transformers"
SCREEN = ("setting", "token", "step", "x hf", "x abs", "GiB", "rows %", "graph")
FULL = (
    "setting", "generate ms", "step ms", "times as fast as transformers", "as absorbed dense", "peak GiB",
    "prepare ms", "rows %", "steps replayed", "experts in generate",
)  # fmt: skip
READING = (
    "Milliseconds per step of the whole batch, medians of rounds: per token through generate (mean time between tokens "
    "at a streamer), and of a bare step (one hand-made call). Times as fast as transformers (x hf) and as absorbed "
    "dense attention (x abs), compiled where the setting is, if that was measured: through generate, paired by round. "
    "Graph: steps in percent that replayed a CUDA graph."
)


def size(rows: int) -> str:
    """``32K``, or the number itself."""
    return f"{rows >> 10}K" if rows % 1024 == 0 else str(rows)


def heading(point: dict[str, Any]) -> str:
    return f"batch {point['batch']}, {size(point['context'])} cached tokens"


def median(result: dict[str, Any], of: str = "generate_ms") -> float | None:
    """A setting's median over rounds; None before its first."""
    return statistics.median(result[of]) if result.get(of) else None


def ratio(results: dict[str, dict[str, Any]], name: str, base: str) -> tuple[float, float, float] | None:
    """How many times as fast as another setting, with its 95 % interval over paired rounds."""
    slow, fast = (results.get(key, {}).get("generate_ms") or [] for key in (base, name))
    rounds = min(len(slow), len(fast))
    return ratio_interval(slow[:rounds], fast[:rounds]) if rounds else None


def dense_of(results: dict[str, dict[str, Any]], name: str) -> str:
    """The absorbed dense setting to compare with: for a compiled step a compiled one, where there is one."""
    compiled = f"{FASTEST_DENSE}+compile"
    return compiled if "+compile" in name and compiled in results else FASTEST_DENSE


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**30:.1f}"


def _replayed(result: dict[str, Any]) -> str:
    return f"{result['replayed']}/{result['steps']}" if result.get("steps") else "-"


def _replayed_percent(result: dict[str, Any]) -> str:
    return _number(100 * result["replayed"] / result["steps"] if result.get("steps") else None, 0)


def screen_table(point: dict[str, Any]) -> Table:
    """A point's settings in 80 columns."""
    table, results = plain_table(heading(point), SCREEN), point["results"]
    for name, result in results.items():
        if result.get("missing"):
            continue
        ratios = [ratio(results, name, base) for base in (UNPATCHED, dense_of(results, name))]
        table.add_row(
            name, _number(median(result), 2), _number(median(result, "bare_ms"), 2),
            *(_number(None if found is None else found[0], 2) for found in ratios), _gib(result.get("peak")),
            _number(result.get("percent")), _replayed_percent(result),
        )  # fmt: skip
    return table


def missing(points: Sequence[dict[str, Any]]) -> list[str]:
    """A line for every setting that could not run."""
    return [
        f"{heading(point)}, {name}: {result['missing']}"
        for point in points
        for name, result in point["results"].items()
        if result.get("missing")
    ]


def markdown(facts: dict[str, Any], points: Sequence[dict[str, Any]]) -> str:
    """The whole report as Markdown."""
    told = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    lines = ["# Whole decoding steps", "", f"{told}.", "", READING]
    lines.append(
        "Peak is a setting's own: weights, rows, teams and what its turn allocated. Rows are logical access in percent "
        "of dense, and no time. Steps replayed are those of the last turn, all its calls counted."
    )
    for point in points:
        rows = [_full(point["results"], name) for name, r in point["results"].items() if not r.get("missing")]
        rounds = max((len(result.get("generate_ms", ())) for result in point["results"].values()), default=0)
        told = f"{rounds} rounds"
        if point.get("prefill_ms") is not None:
            told += f", prefill {point['prefill_ms']:.1f} ms"
        told += f", {point['row_bytes']:.0f} bytes per cached token"
        lines += ["", f"## {heading(point)}", "", f"{told}.", "", markdown_table(FULL, rows).rstrip("\n")]
        operators = {r["operator"] for r in point["results"].values() if r.get("operator")}
        if operators:
            lines += ["", f"Absorbed dense attention ran as {', '.join(sorted(operators))}."]
    left_out = missing(points)
    if left_out:
        lines += ["", "Left out:", "", *(f"- {line}" for line in left_out)]
    return "\n".join(lines) + "\n"


def _full(results: dict[str, dict[str, Any]], name: str) -> list[str]:
    result = results[name]

    def against(base: str) -> str:
        found = ratio(results, name, base)
        return "-" if found is None else "{:.2f} [{:.2f}, {:.2f}]".format(*found)

    return [
        name, _number(median(result), 2), _number(median(result, "bare_ms"), 2), against(UNPATCHED),
        against(dense_of(results, name)), _gib(result.get("peak")), _number(result.get("prepare_ms")),
        _number(result.get("percent")), _replayed(result), _experts(result["experts"]),
    ]  # fmt: skip


def _experts(ran: dict[str, Any]) -> str:
    if ran["kernels"]:  # earlier runs had none with the bits of the model's own
        return "own kernels, same bits" if ran.get("same_bits") else "own kernels"
    return ", ".join(ran["generate"]) or "-"


def readme_table(runs: Sequence[dict[str, Any]], settings: Sequence[str]) -> str:
    """README's table of finished runs: a line per shape, batch and context, milliseconds per token through generate."""
    lines = []
    for run in runs:
        for point in sorted(run["points"], key=lambda point: (point["batch"], point["context"])):
            times = [point["results"].get(name, {}) for name in settings]
            if any(median(result) is not None for result in times):
                name = f"{run['facts']['shape']}, batch {point['batch']}, {size(point['context'])}"
                lines.append([name, *(_number(median(result)) for result in times)])
    return markdown_table(("ms per token", *(name.replace("_", " ") for name in settings)), lines)


def plot(points: Sequence[dict[str, Any]]) -> bytes | None:
    """PNG: time per token against context, a panel per batch; None without two contexts of one batch."""
    panels: dict[int, list[dict[str, Any]]] = {}
    for point in sorted(points, key=lambda point: (point["batch"], point["context"])):
        panels.setdefault(point["batch"], []).append(point)
    panels = {batch: held for batch, held in panels.items() if len(held) > 1}
    if not panels:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure = Figure(figsize=(4 * len(panels) + 2.6, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    drawn: dict[str, Any] = {}
    names = list(dict.fromkeys(name for held in panels.values() for point in held for name in point["results"]))
    dense = [name for name in names if name.partition("+")[0] in (UNPATCHED, "dense", FASTEST_DENSE)]
    for axis, (batch, held) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for name in names:
            found = [(point["context"], median(point["results"].get(name, {}))) for point in held]
            line = [(context, time) for context, time in found if time is not None]
            if line:
                grey = str(0.6 * dense.index(name) / max(1, len(dense) - 1)) if name in dense else None
                look: dict[str, Any] = {"color": grey or f"C{names.index(name) % 10}"}
                look["linestyle"] = "--" if grey else ":" if "+compile" in name else "-"
                (drawn[name],) = axis.plot(*zip(*line, strict=True), marker="o", markersize=4, **look)
        contexts = [point["context"] for point in held]
        axis.set(title=f"batch {batch}", xlabel="cached tokens", ylabel="milliseconds per token, generate")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(contexts, [size(context) for context in contexts])
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.grid(alpha=0.3)
    figure.legend(drawn.values(), drawn.keys(), loc="outside right upper", fontsize=8)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()
