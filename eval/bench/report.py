"""What the operator benchmark writes: a Markdown table of every workload and a plot of time against context."""

from __future__ import annotations

import io
from typing import Any

from latent_santa.eval.report.tables import markdown_table

HEADER = (
    "workload",
    "method",
    "time",
    "of copy bandwidth",
    "against",
    "ratio [95 %]",
    "goal",
    "error",
    "stages",
    "rows",
)
MODES = {"graph": "inside CUDA graphs", "stream": "launched from a stream"}


def workload_name(w: dict[str, Any]) -> str:
    """``MLA 16 heads, b1, 32K`` or ``GQA 28/4/128, b8, 128K``; a captured workload says its source."""
    size = f"{w['context'] // 1024}K" if w["context"] % 1024 == 0 else f"{w['context']} rows"
    if w["layout"] == "mla":
        name = f"MLA {w['heads']} heads"
    else:
        name = f"GQA {w['heads']}/{w['groups']}/{w['dims'][0]}"
    return f"{name}, b{w['batch']}, {size} ({w['source']})"


def markdown(facts: dict[str, Any], records: list[dict[str, Any]]) -> str:
    """The whole report as Markdown."""
    protocol = ", ".join(f"{key} {value}" for key, value in facts["protocol"].items())
    lines = [
        "# Operator benchmark",
        "",
        f"{facts['device']}, torch {facts['torch']}, Triton {facts['triton']}, {facts['date']}, source "
        f"{facts['commit']}. Command: `{facts['command']}`. Copy bandwidth {facts['copy_bandwidth'] / 1e12:.2f} TB/s "
        "(read plus written).",
        "",
        f"Times are microseconds, medians of round medians ({protocol}; evict in MiB, before every timed call). A "
        "ratio is dense time over sampled time, against the fastest dense method of the same run and mode, with its "
        "bootstrap interval over paired rounds; ratios under CUDA graphs hold in CUDA graphs only. Bandwidth counts "
        "the bytes that each method must read. Error is the attention error: the output against dense attention, "
        "relative, mean over heads, sequences and draws. Rows are those scored in routing and those of the union. "
        "Stages are timed alone, each after an eviction: they do not add up. "
        "Synthetic rows are random, so heads agree on few teams and unions are large.",
    ]
    for mode, title in MODES.items():
        rows = [row for record in records for row in _rows(record, mode)]
        if rows:
            lines += ["", f"## {title}", "", markdown_table(HEADER, rows).rstrip("\n")]
    lines += ["", *_agreement(records)]
    missing = {f"- {name}: {why}" for record in records for name, why in record["missing"].items()}
    if missing:
        lines += ["", "Dense methods that did not run:", "", *sorted(missing)]
    return "\n".join(lines) + "\n"


def short(records: list[dict[str, Any]]) -> str:
    """README's table: every setting in CUDA graphs beside the fastest dense method of its run, in microseconds, and its
    attention error."""
    lines = []
    for record in records:
        workload = workload_name(record["workload"]).removesuffix(" (synthetic)")
        for _, method, us, _, best, ratio, goal, error, *_ in _rows(record, "graph"):
            if best:
                dense = f"{record['dense'][best]['graph']['us']:.1f} ({best})"
                lines.append([workload, method.removeprefix("sampled "), dense, us, ratio, goal, error])
    return markdown_table(("workload", "setting", "fastest dense", "us", "ratio [95 %]", "goal", "error"), lines)


# rounding of 16-bit rows stays far below; a head that selected other teams than its twin is far above
MOST_ERROR = 0.01


def _agreement(records: list[dict[str, Any]]) -> list[str]:
    """What the checks before timing said: a setting's worst head against the PyTorch operator with the same noise."""
    checked = [
        (entry["error"], f"{workload_name(record['workload'])}, {entry['name']}")
        for record in records
        for entry in record["sampled"]
        if entry["error"] is not None
    ]
    total = sum(len(record["sampled"]) for record in records)
    if not checked:
        return ["No output was checked against the PyTorch operator: the workloads are too large."]
    lines = [
        f"Checked against the PyTorch operator with the same noise: {len(checked)} of {total} settings, the largest "
        f"relative error of a head is {max(checked)[0]:.1e}."
    ]
    apart = [f"- {name}: {error:.1e}" for error, name in checked if not error <= MOST_ERROR]
    if apart:
        lines += ["", f"**These differ by more than {MOST_ERROR}, so their times are of something else:**", "", *apart]
    return lines


def _rows(record: dict[str, Any], mode: str) -> list[list[str]]:
    name, rows = workload_name(record["workload"]), []
    for method, timed in record["dense"].items():
        if mode in timed:
            own = timed[mode]
            rows.append([name, method, f"{own['us']:.1f}", _percent(own["bandwidth_fraction"]), *[""] * 6])
    for entry in record["sampled"]:
        if mode not in entry:
            continue
        own = entry[mode]
        best, ratio, goal = own["best_dense"], "", ""
        if best is not None:
            r = own["ratios"][best]
            ratio = f"{r['ratio']:.2f} [{r['low']:.2f}, {r['high']:.2f}]"
        if entry["goal"] is not None and mode == "graph" and best is not None:
            met = own["ratios"][best]["ratio"] >= entry["goal"]
            goal = f"{entry['goal']:.1f} ({'met' if met else 'missed'}{_beside_one_stage(record, entry)})"
        stages = ", ".join(f"{stage} {time:.1f}" for stage, time in entry.get("stages_us", {}).items())
        rows.append(
            [name, f"sampled {entry['name']}", f"{own['us']:.1f}", _percent(own["bandwidth_fraction"]), best or "",
             ratio, goal, f"{entry['attention_error']:.3f}", stages if mode == "graph" else "",
             f"{entry['routing_rows']} + {entry['union_rows']}"]
        )  # fmt: skip
    return rows


def _beside_one_stage(record: dict[str, Any], entry: dict[str, Any]) -> str:
    """How a setting of two stages errs beside the same one of one stage, where that was measured too."""
    alike = ("k", "estimator", "noise", "routing_dtype")
    for other in record["sampled"]:
        if entry["parents"] and not other["parents"] and all(other[name] == entry[name] for name in alike):
            return f", error {entry['attention_error'] / other['attention_error']:.2f} of one stage's"
    return ""


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def plot(records: list[dict[str, Any]], mode: str = "graph") -> bytes | None:
    """PNG: time against context, one panel per layout, head count and batch size, dense and sampled; None without
    two contexts of one kind."""
    panels: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        w = record["workload"]
        panels.setdefault((w["layout"], w["heads"], w["batch"]), []).append(record)
    panels = {key: sorted(held, key=_context) for key, held in panels.items() if len({_context(r) for r in held}) > 1}
    if not panels:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure = Figure(figsize=(4 * len(panels) + 2.6, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    looks: dict[str, tuple[str, str]] = {}  # a name looks the same in all panels
    drawn: dict[str, Any] = {}
    for axis, ((layout, heads, batch), held) in zip(axes, sorted(panels.items()), strict=True):
        for name, points in _lines(held, mode).items():
            color, style = looks.setdefault(name, _look(name, list(looks)))
            (drawn[name],) = axis.plot(*zip(*points, strict=True), style, color=color, marker="o", markersize=4)
        axis.set(title=f"{layout.upper()}, {heads} heads, batch {batch}", xlabel="cached rows", ylabel="microseconds")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        contexts = sorted({_context(record) for record in held})
        axis.set_xticks(
            contexts, [f"{context >> 10}K" if context % 1024 == 0 else str(context) for context in contexts]
        )
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.grid(alpha=0.3)
    figure.legend(drawn.values(), drawn.keys(), loc="outside right upper", fontsize=8)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


_GREYS = ("black", "dimgray", "darkgray", "silver", "rosybrown")
_STYLES = {"": "-", "int8": "-.", "int4": ":"}


def _look(name: str, before: list[str]) -> tuple[str, str]:
    """Color and style of a name behind others: greys for dense methods, a color for all routing dtypes of a setting."""
    setting, _, routing = name.partition(" routing ")
    if not name.startswith("sampled"):
        return _GREYS[sum(not other.startswith("sampled") for other in before) % len(_GREYS)], "--"
    settings = dict.fromkeys(other.partition(" routing ")[0] for other in before if other.startswith("sampled"))
    return f"C{list(settings | {setting: None}).index(setting) % 10}", _STYLES[routing]


def _lines(held: list[dict[str, Any]], mode: str) -> dict[str, list[tuple[int, float]]]:
    """Times in microseconds of every method, by context."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for record in held:
        for name, timed in record["dense"].items():
            if mode in timed:
                lines.setdefault(name, []).append((_context(record), timed[mode]["us"]))
        for entry in record["sampled"]:
            if mode in entry:
                lines.setdefault(f"sampled {entry['name']}", []).append((_context(record), entry[mode]["us"]))
    return lines


def _context(record: dict[str, Any]) -> int:
    return int(record["workload"]["context"])
