"""What a run says on a terminal of 80 columns: plain words, what they mean, one prompt's answers, and the files."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from latent_santa.eval.report.paper_tables import MEAN
from latent_santa.eval.report.tables import BOUND, has_bounds, plain_table, title
from latent_santa.eval.run.store import Store

KEPT = 95.0  # percent of dense's score that the sentence looks for
EQUAL = 1.0  # points of rows read that are no difference
FEW = 20  # prompts per task; with fewer, the sentence says so
HOW_TO_READ = (
    "score kept: of dense's score. rows read: cached rows that decoding read, routing included, of those that dense "
    "decoding reads (Equation 13 or 14); logical access, not time or memory. score: ± half a 95 % interval."
)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} %"


def table(summary: dict[str, Any]) -> Table:
    """Every setting with what it keeps and what it reads, over all tasks. No number is cut at 80 columns."""
    bounds = has_bounds(summary)
    shown = plain_table("", ("Setting", "S", "score\nkept", "rows\nread", *(["bound"] if bounds else []), "score"))
    for item in summary["conditions"]:
        cell = item["cells"][MEAN]
        score = cell["score"]
        half = "" if summary["n"] == 1 or not score else f" ± {score['half']:.1f}"
        shown.add_row(
            item["name"],
            str(item["S"] or "-"),
            _percent(cell["retained"]),
            _percent(cell["access"]),
            *([_percent(cell["bound"])] if bounds else []),
            f"{score['value']:.1f}{half}" if score else "-",
        )
    return shown


def chosen(summary: dict[str, Any]) -> dict[str, Any] | None:
    """Of the settings that keep `KEPT` percent the one that reads fewest rows; where none does, the best.

    Of settings that read equal rows, to within `EQUAL` points, it is the one that keeps most. None while no sampled
    setting has a score to be compared with dense's.
    """
    sampled = [item for item in summary["conditions"] if item["method"] != "dense"]
    known = [item for item in sampled if None not in (item["cells"][MEAN]["retained"], item["cells"][MEAN]["access"])]
    enough = [item for item in known if item["cells"][MEAN]["retained"] >= KEPT]
    if enough:
        least = min(item["cells"][MEAN]["access"] for item in enough)
        known = [item for item in enough if item["cells"][MEAN]["access"] <= least + EQUAL]
    return max(known, key=lambda item: item["cells"][MEAN]["retained"], default=None)


def meaning(summary: dict[str, Any]) -> str:
    """The table in a sentence or two, worked out from its numbers."""
    item = chosen(summary)
    if item is None:
        dense = next(
            (item["cells"][MEAN]["score"] for item in summary["conditions"] if item["method"] == "dense"), None
        )
        if dense and dense["value"] == 0:
            return "Dense attention scores 0 on these prompts, so there is no score to keep."
        return "No sampled setting can be compared with dense yet."
    cell = item["cells"][MEAN]
    kept = "all" if cell["retained"] >= 100 else _percent(cell["retained"])
    access = _percent(cell["access"])
    budget = f" at S={item['S']}" if item["S"] else ""
    told = f"{item['name']}{budget} keeps {kept} of dense's score and reads {access} of its rows."
    if cell["retained"] < KEPT:
        told = f"No setting keeps {KEPT:.0f} % of dense's score. The best: {told}"
    span, n = cell["difference"], summary["n"]
    if not any(span[end] for end in ("low", "value", "high")):
        lost = 100 * (1 - 0.05 ** (1 / item["done"]))  # the share that as many prompts miss in one case of twenty
        told += (
            f" Each of the {item['done']} prompts scored as it did under dense; so few can hide a loss in up to "
            f"{lost:.0f} % of prompts (95 % bound)."
        )
    elif n > 1:
        told += (
            f" Its score minus dense's, on the same prompts: {span['value']:+.1f} points, 95 % interval "
            f"{span['low']:+.1f} to {span['high']:+.1f}."
        )
    if n < FEW:
        told += f" {n} {'prompt' if n == 1 else 'prompts'} per task {'is' if n == 1 else 'are'} a first look."
    return told


def answers(store: Store, summary: dict[str, Any]) -> Table | None:
    """The first prompt that both have answered, under dense and under the sentence's setting."""
    item = chosen(summary)
    dense = next((item for item in summary["conditions"] if item["method"] == "dense"), None)
    if item is None or dense is None:
        return None
    plain, sampled = store.results(dense["slug"]), store.results(item["slug"])
    for prompt in store.prompts():
        sample = prompt.sample
        if not all("output" in found.get(sample.id, {}) for found in (plain, sampled)):
            continue
        question = " ".join(sample.input.split()[-25:])
        lines = Table.grid(padding=(0, 2), pad_edge=False)
        heading = f"{sample.id} ({prompt.n_tokens:,} tokens), answered by dense attention and under that setting"
        lines.title, lines.title_justify = Text(heading), "left"
        lines.add_column(no_wrap=True)
        lines.add_column(overflow="fold")
        for label, text in (
            ("its end", f"... {question} {sample.answer_prefix}"),
            ("wanted", sample.wanted),
            ("dense", plain[sample.id]["output"].strip()),
            ("sampled", sampled[sample.id]["output"].strip()),
        ):
            lines.add_row(Text(label), Text(" ".join(text.split())))
        return lines
    return None


def show(store: Store, summary: dict[str, Any], notes: list[str], console: Console, page: Path | None = None) -> None:
    """Print the run: table, meaning, answers, how to read them, warnings and notes, and where everything is."""

    def say(text: str, style: str | None = None) -> None:
        console.print(Text(text), style=style)

    directory = store.directory
    say(title(summary, MEAN))
    console.print(table(summary))
    say(meaning(summary), "bold")
    console.print()
    if (side_by_side := answers(store, summary)) is not None:
        console.print(side_by_side)
        console.print()
    say(f"Prompts: {summary['data']}.")
    say(HOW_TO_READ)
    if has_bounds(summary):
        say(BOUND)
    for warning in summary["warnings"]:
        say(f"Warning: {warning}", "yellow")
    for note in notes:
        say(f"Note: {note}")

    def path(label: str, text: str) -> None:  # never broken, so that it can be copied
        console.print(f"{label} {text}", markup=False, highlight=False, soft_wrap=True)

    if (directory / "access_accuracy.png").is_file():
        path("Picture:   ", str(directory / "access_accuracy.png"))
    if page is not None:
        path("Page:      ", str(page))
    path("All tables:", str(directory / "table.md"))
    path("Rebuild:   ", f"latent-santa report {shlex.quote(str(directory))}")
