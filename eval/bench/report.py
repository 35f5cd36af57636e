"""What the operator benchmark writes: a Markdown table of every workload and a plot of time against context."""

from __future__ import annotations

import io
from typing import Any

HEADER = ("workload", "method", "time", "of copy bandwidth", "against", "ratio [95 %]", "goal", "stages", "union rows")
MODES = {"graph": "CUDA-graph replay", "stream": "launched from a stream"}


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
        f"{facts['device']}, torch {facts['torch']}, Triton {facts['triton']}, {facts['date']}. Command: "
        f"`{facts['command']}`. Copy bandwidth {facts['copy_bandwidth'] / 1e12:.2f} TB/s (read plus written).",
        "",
        f"Times are microseconds, medians of round medians ({protocol}; evict in MiB, before every timed call). A "
        "ratio is dense time over sampled time, against the fastest dense method of the same run, with its bootstrap "
        "interval over paired rounds. Bandwidth counts the bytes each method must read. Stages are timed alone, each "
        "after an eviction: they do not add up. Synthetic rows are random, so heads agree on few teams and unions are "
        "large.",
    ]
    for mode, title in MODES.items():
        rows = [row for record in records for row in _rows(record, mode)]
        if rows:
            lines += ["", f"## {title}", "", _line(HEADER), _line(["---"] * len(HEADER)), *map(_line, rows)]
    missing = {f"- {name}: {why}" for record in records for name, why in record["missing"].items()}
    if missing:
        lines += ["", "Dense methods that did not run:", "", *sorted(missing)]
    return "\n".join(lines) + "\n"


def _line(texts: Any) -> str:
    return "| " + " | ".join(texts) + " |"


def _rows(record: dict[str, Any], mode: str) -> list[list[str]]:
    name, rows = workload_name(record["workload"]), []
    for method, timed in record["dense"].items():
        if mode in timed:
            own = timed[mode]
            rows.append([name, method, f"{own['us']:.1f}", _percent(own["bandwidth_fraction"]), "", "", "", "", ""])
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
            goal = f"{entry['goal']:.1f} ({'met' if met else 'missed'})"
        stages = ", ".join(f"{stage} {time:.1f}" for stage, time in entry.get("stages_us", {}).items())
        rows.append(
            [name, f"sampled {entry['name']}", f"{own['us']:.1f}", _percent(own["bandwidth_fraction"]), best or "",
             ratio, goal, stages if mode == "graph" else "", str(entry["union_rows"])]
        )  # fmt: skip
    return rows


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def plot(records: list[dict[str, Any]], mode: str = "graph") -> bytes | None:
    """PNG: time against context, one panel a layout, head count and batch size, dense and sampled; None without
    two contexts of one kind."""
    panels: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        w = record["workload"]
        panels.setdefault((w["layout"], w["heads"], w["batch"]), []).append(record)
    panels = {key: sorted(held, key=_context) for key, held in panels.items() if len({_context(r) for r in held}) > 1}
    if not panels:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4), squeeze=False)
    for axis, ((layout, heads, batch), held) in zip(axes[0], sorted(panels.items()), strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for record in held:
            for name, timed in record["dense"].items():
                if mode in timed:
                    lines.setdefault(name, []).append((_context(record), timed[mode]["us"]))
            for entry in record["sampled"]:
                if mode in entry:
                    lines.setdefault(f"sampled {entry['name']}", []).append((_context(record), entry[mode]["us"]))
        for name, points in lines.items():
            style = "-" if name.startswith("sampled") else "--"
            axis.plot(*zip(*points, strict=True), style, marker="o", label=name)
        axis.set(title=f"{layout.upper()}, {heads} heads, batch {batch}", xlabel="cached rows", ylabel="microseconds")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.legend(fontsize=7)
    figure.tight_layout()
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120)
    pyplot.close(figure)
    return out.getvalue()


def _context(record: dict[str, Any]) -> int:
    return int(record["workload"]["context"])
