"""One prompt under several settings, side by side on a terminal of 80 columns: numbers first, then the answers."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from latent_santa.eval.report.tables import BOUND, plain_table
from latent_santa.eval.run.comparison import Outcome

WIDE = 110  # columns from which routing, attention and speed are shown too
PARTS = {"rows": "numerator", "routing": "routing_read", "union+\nsuffix": "row_read", "bound": "bound"}


def label(outcome: Outcome) -> str:
    """The setting with its budget."""
    return outcome.name if outcome.budget is None else f"{outcome.name} S={outcome.budget}"


def has_bounds(outcomes: Sequence[Outcome]) -> bool:
    """Whether any setting read keys in a scan that it also attended."""
    return any(outcome.rows["bound"] != outcome.rows["row_read"] for outcome in outcomes)


def found(outcome: Outcome, references: Sequence[str]) -> int:
    """How many of the references stand in the answer."""
    return sum(reference.lower() in outcome.answer.lower() for reference in references)


def table(outcomes: Sequence[Outcome], references: Sequence[str], width: int) -> Table:
    """What every setting read and reproduced. No number is cut at 80 columns; only the setting's name is folded."""
    wide, bounds = width >= WIDE, has_bounds(outcomes)
    parts = [part for part in PARTS if part == "rows" or (bounds if part == "bound" else wide)]
    reads = [f"{part}\n%" for part in parts]
    planted = ("found",) if references else ()
    header = (
        "Setting",
        "S",
        "K",
        *planted,
        *reads,
        "bytes\n%",
        "as\ndense",
        "error",
        *(("tokens\n/s",) if wide else ()),
    )
    shown = plain_table("", header)
    for o in outcomes:
        rows = o.rows
        shares = ["-"] * len(parts)
        if rows["percent"] is not None:
            shares = [f"{100 * rows[PARTS[part]] / rows['denominator']:.1f}" for part in parts]
        shown.add_row(
            o.name + (" (all teams)" if o.full else ""),
            "-" if o.budget is None else str(o.budget),
            "-" if o.teams_per_head is None else str(o.teams_per_head),
            *((f"{found(o, references)}/{len(references)}",) if references else ()),
            *shares,
            "-" if rows["percent"] is None else f"{rows['bytes_percent']:.1f}",
            f"{o.agreement:.0f}%",
            "-" if o.error is None else f"{o.error:.4f}",
            *((f"{o.tokens_per_second:.1f}",) if wide else ()),
        )
    return shown


def meaning(outcomes: Sequence[Outcome], references: Sequence[str]) -> str:
    """The setting that reads least of those that do all that dense did, in one sentence."""
    dense, *sampled = outcomes
    what = "finds what dense finds" if references else "gives dense's whole answer"

    def equal(o: Outcome) -> bool:
        return found(o, references) >= found(dense, references) if references else o.tokens == dense.tokens

    right = [o for o in sampled if o.rows["percent"] is not None and equal(o)]
    if not right:
        return f"No sampled setting {what}." if sampled else ""
    least = min(right, key=lambda o: o.rows["percent"])
    return f"{label(least)} {what} and reads {least.rows['percent']:.1f} % of its rows. One prompt is an example."


def answers(outcomes: Sequence[Outcome], references: Sequence[str]) -> Table:
    """Every setting's answer under its name, wrapped; one that is dense's token for token says so."""
    lines = Table.grid(padding=(0, 2), pad_edge=False)
    lines.add_column(max_width=36, overflow="fold")
    lines.add_column(overflow="fold")
    if references:
        lines.add_row("wanted", Text(", ".join(references)))
    for o in outcomes:
        same = o is not outcomes[0] and o.tokens == outcomes[0].tokens
        lines.add_row(Text(label(o)), Text("the same" if same else " ".join(o.answer.split())))
    return lines


def show(
    console: Console,
    model: str,
    prompt_tokens: int,
    outcomes: Sequence[Outcome],
    references: Sequence[str],
    layout: str,
) -> None:
    """Print the comparison. layout: the cache's, "mla" or "gqa", which names the equation of the rows."""
    equation = "Equation 14" if layout == "mla" else "Equation 13"
    heading = f"{model}, {prompt_tokens:,} prompt tokens. Rows and bytes read by decoding in % of dense ({equation})"
    console.print(Text(heading))
    console.print(table(outcomes, references, console.width))
    if told := meaning(outcomes, references):
        console.print(Text(told), style="bold")
        console.print()
    console.print(answers(outcomes, references))
    console.print(
        Text(
            "as dense: share of the answer's tokens before it first differs from dense's. error: mean relative error "
            "of attention on the same cache. Rows and bytes are logical access, not time."
        )
    )
    if has_bounds(outcomes):
        console.print(Text(BOUND))
