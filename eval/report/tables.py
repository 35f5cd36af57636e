"""A summary as tables: Markdown for files, rich for the terminal. Columns as in Table 15, and the paper's values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from latent_santa.eval.report.paper_tables import MEAN
from latent_santa.eval.sources.tasks import mean_label

READS = ("Method", "S", "KV (%)", "without routing (%)")
SCORES = ("Acc (norm) (%)", "Acc (abs) (%)", "minus dense")
PAPER_COLUMNS = ("paper: KV (%)", "paper: Acc (abs) (%)")
BOUND = (
    "Bound: the rows that were attended, of dense's: what a method would read that knew without a scan which rows to "
    "attend. An oracle's cost lies between its bound and what is counted."
)
RETAINED = (90.0, 95.0, 98.0, 99.0)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def has_paper_values(summary: dict[str, Any]) -> bool:
    """Whether any setting of the run is one of the paper's."""
    return any(cell["paper"] for entry in summary["conditions"] for cell in entry["cells"].values())


def has_bound(cell: dict[str, Any]) -> bool:
    """Whether a setting read keys of attended rows in a scan: its bound is then not its access without routing."""
    return cell.get("bound") not in (None, cell["access_without_routing"])


def has_bounds(summary: dict[str, Any]) -> bool:
    """Whether any setting of the run has such a bound."""
    return any(has_bound(cell) for entry in summary["conditions"] for cell in entry["cells"].values())


def header(summary: dict[str, Any]) -> list[str]:
    """The columns of a run's tables."""
    bound, paper = has_bounds(summary), has_paper_values(summary)
    return [*READS, *(["bound (%)"] if bound else []), *SCORES, *(PAPER_COLUMNS if paper else ())]


def _with_half(score: dict[str, float] | None, single: bool) -> str:
    """A score with its half-span; resampling a single prompt has no meaning, so then without."""
    if not score:
        return "-"
    return f"{score['value']:.2f}" + ("" if single else f" ± {score['half']:.2f}")


def _with_span(difference: dict[str, float] | None, single: bool) -> str:
    if not difference:
        return "-"
    return f"{difference['value']:+.2f}" + ("" if single else f" [{difference['low']:+.2f}, {difference['high']:+.2f}]")


def cells(summary: dict[str, Any], entry: dict[str, Any], column: str) -> list[str]:
    """The texts of one line under :func:`header`."""
    cell, single = entry["cells"][column], summary["n"] == 1
    score, difference, value = cell["score"], cell["difference"], cell["paper"]
    texts = [
        entry["name"],
        str(entry["S"] or "-"),
        _number(cell["access"]),
        _number(cell["access_without_routing"]),
        *([_number(cell["bound"])] if has_bounds(summary) else []),
        _number(cell["retained"]),
        _with_half(score, single),
        _with_span(difference, single),
    ]
    if has_paper_values(summary):
        texts += [_number(value["access"]), f"{value['score']:.2f} ± {value['half']:.2f}"] if value else ["-", "-"]
    return texts


def title(summary: dict[str, Any], column: str) -> str:
    """What a table shows: its mean or task, and the prompts behind it."""
    name = summary["mean"] if column == MEAN else column
    if column in summary["groups"]:
        name = mean_label(tuple(summary["groups"][column]))
    prompts = "1 prompt" if summary["n"] == 1 else f"{summary['n']} prompts"
    prompts = prompts if summary["fewest"] == summary["n"] else f"up to {prompts}"
    return f"{name}, {prompts} per task at {summary['length']} tokens, {summary['model']}"


def columns_of(summary: dict[str, Any]) -> list[str]:
    """The mean first (where it is more than the only task), then every task."""
    tasks = list(summary["tasks"])
    return [MEAN, *summary["groups"], *tasks] if len(tasks) > 1 else tasks


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table with its first column on the left and the others on the right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def lines_of(summary: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Conditions grouped into lines: the same method at its budgets, without dense."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for entry in summary["conditions"]:
        if entry["method"] != "dense":
            lines.setdefault(entry["name"], []).append(entry)
    return lines


def rows_needed(points: Sequence[tuple[float, float]], wanted: float) -> float | None:
    """Least access at which the retained score reaches `wanted`, between measured points by straight lines.

    points  (access, retained) in percent, any order. None if no measured point reaches it. The least access measured
    is returned where it reaches `wanted` already: nothing is known below it.
    """
    ordered = sorted(points)
    for i, (access, kept) in enumerate(ordered):
        if kept >= wanted:
            if i == 0:
                return access
            before, lower = ordered[i - 1]
            return before + (access - before) * (wanted - lower) / (kept - lower)
    return None


def _needed(summary: dict[str, Any]) -> str:
    lines = []
    for name, entries in lines_of(summary).items():
        measured = [entry["cells"][MEAN] for entry in entries]
        points = [
            (c["access"], c["retained"]) for c in measured if c["access"] is not None and c["retained"] is not None
        ]
        if len(points) > 1:
            lowest = min(access for access, _ in points)
            texts = []
            for wanted in RETAINED:
                access = rows_needed(points, wanted)
                texts.append("-" if access is None else ("≤ " if access == lowest else "") + f"{access:.1f}")
            lines.append([name, *texts])
    if not lines:
        return ""
    header = ["KV (%) needed to retain", *(f"{wanted:.0f} %" for wanted in RETAINED)]
    return (
        "\n## Rows needed\n\n"
        + markdown_table(header, lines)
        + "\nBetween measured budgets by straight lines; `≤`: the "
        "smallest budget retains that much already; `-`: no budget does. These have no interval.\n"
    )


def _estimators(summary: dict[str, Any]) -> str:
    """Pooled against per head, where a run has both at the same settings."""
    found = summary["estimators"]
    if found is None:
        return ""
    single = summary["n"] == 1
    lines = [
        [
            entry["name"],
            str(entry["S"]),
            *(_number(entry["access"][estimator]) for estimator in ("per_head", "pooled")),
            _with_span(entry["difference"], single),
        ]
        for entry in found["settings"]
    ]
    lines.append(["all of these together", "", "", "", _with_span(found["all"], single)])
    header = ["Setting", "S", "KV per head (%)", "KV pooled (%)", "pooled minus per head"]
    return (
        f"\n## Pooled minus per head, {summary['mean']}\n\n"
        + markdown_table(header, lines)
        + "\nPaired on the same prompts. Together: a prompt's differences are averaged over the settings first.\n"
    )


def against_table(summary: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of what `report --against` asks for: fewest rows first."""
    found, single = summary["against"], summary["n"] == 1
    lines = [
        [line["setting"], _number(line["access"]), _number(line["share"]), _with_span(line["difference"], single)]
        for line in sorted(found["lines"], key=lambda line: (line["access"] is None, line["access"]))
    ]
    return ["Setting", "KV (%)", "of its rows", "score minus its"], lines


def _against(summary: dict[str, Any]) -> str:
    found = summary.get("against")
    if found is None:
        return ""
    return (
        f"\n## Against {found['setting']}, {summary['mean']}\n\n"
        + markdown_table(*against_table(summary))
        + f"\nPaired on the same prompts. It reads {_number(found['access'])} % itself.\n"
    )


def markdown(summary: dict[str, Any]) -> str:
    """All tables of a run as one Markdown text."""
    parts = [f"# {summary['model']} at {summary['length']} tokens\n\nPrompts: {summary['data']}.\n"]
    for column in columns_of(summary):
        body = [cells(summary, entry, column) for entry in summary["conditions"]]
        parts.append(f"\n## {title(summary, column)}\n\n{markdown_table(header(summary), body)}")
    parts.append(_estimators(summary))
    parts.append(_against(summary))
    parts.append(_needed(summary))
    parts.append("\n## Notes\n\n" + "".join(f"- {note}\n" for note in notes(summary)))
    return "".join(parts)


def notes(summary: dict[str, Any]) -> list[str]:
    """How to read the tables, and the run's warnings."""
    lengths = summary["prompt_tokens"].values()
    found = [
        "KV: rows read of the rows that dense decoding reads, Equation 13 (GQA) or 14 (MLA), routing included, pooled "
        "over prompts, layers and steps"
        + ("" if summary["access_mean"] == "pooled" else f" of a task; over tasks the {summary['access_mean']}")
        + "; logical access, not time.",
        "Acc (norm): score over the dense score. ±: half a 95 % bootstrap interval, prompts resampled within tasks. "
        "Minus dense: paired on the same prompts, with its 95 % interval.",
        f"Prompt tokens, without the answer: {min(v['least'] for v in lengths)} to {max(v['most'] for v in lengths)}.",
    ]
    if has_bounds(summary):
        found.append(BOUND)
    cut = {entry["name"]: entry["hit_cap"] for entry in summary["conditions"] if entry["hit_cap"]}
    if cut:
        most = max(entry["hit_cap"] / max(1, entry["done"]) for entry in summary["conditions"])
        found.append(f"Answers stopped by the task's cap on new tokens: up to {100 * most:.0f} % in a setting.")
    return found + [f"Warning: {warning}" for warning in summary["warnings"]]


def output_console() -> Console:
    """Standard output; where it is no terminal, wide enough for whole lines."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def plain_table(heading: str, header: Sequence[str]) -> Table:
    """An empty table: words on the left, which may be folded, and numbers on the right, which may not."""
    table = Table(
        title=Text(heading) if heading else None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i else "left", overflow="fold", no_wrap=bool(i))
    return table


def fitting_table(header: Sequence[str], lines: Sequence[Sequence[str]], console: Console) -> Table:
    """A table of these lines that the console has room for, without a number that is cut.

    Where it must be, words of a heading stand under one another, then an interval under its value, then its ends too.
    """

    def broken(at: Sequence[str]) -> list[list[str]]:
        """The lines with line feeds behind some spaces of all cells but the first."""
        cells = []
        for first, *others in lines:
            for text in at:
                others = [cell.replace(text, text.replace(" ", "\n")) for cell in others]
            cells.append([first, *others])
        return cells

    name = max(len(line[0]) for line in (header, *lines))
    stacked = [word.replace(" ", "\n") for word in header]
    for names, cells in ((header, lines), (stacked, lines), (stacked, broken([" ["])), (stacked, broken([" "]))):
        table = plain_table("", names)
        for line in cells:
            table.add_row(*map(Text, line))
        whole = table.__rich_measure__(console, console.options.update(max_width=1000)).maximum
        # the first column may be folded, to a third of the line
        if whole - name + min(console.width // 3, name) <= console.width:
            break
    return table
