"""`latent-santa paper`: what makes each of the paper's tables and figures here, and which conditions a run meets."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from latent_santa.eval.commands.options import Help


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "paper",
        help="the command that makes each table and figure of the paper, and which conditions hold in a run",
        description="Without a run: every table and figure of the paper, with the command that makes it here. With "
        "--table: its command, and its conditions. With the directory of a run: for each table of scores what the "
        "paper did, what the run did, and whether they agree."
        "\n\nExample: latent-santa paper --table 11"
        "\n\nExample: latent-santa paper runs/table11 --table 11",
        formatter_class=Help,
    )
    parser.add_argument("directory", type=Path, nargs="?", help="directory of a run (its --out)")
    parser.add_argument("--table", help="only this table: 1 to 18")
    parser.set_defaults(run=run)


def _holds(numbers: str, wanted: str) -> bool:
    """Whether a table's number, or span of numbers such as 15-18, is or holds the wanted one."""
    first, _, last = numbers.partition("-")
    if wanted == numbers or not (wanted.isdigit() and first.isdigit()):
        return wanted == numbers
    return int(first) <= int(wanted) <= int(last or first)


def run(args: argparse.Namespace) -> int:
    """Print the list, or the conditions; 0."""
    from rich.console import Console

    from latent_santa.eval.errors import EvalError
    from latent_santa.eval.report import paper_list, paper_tables
    from latent_santa.eval.run.conditions import from_manifest
    from latent_santa.eval.run.store import Store

    manifest = None
    if args.directory:
        store = Store(args.directory)
        manifest = store.complete_manifest()
        from_manifest(manifest, store.manifest_path)
    listed = [item for item in paper_list.items() if args.table is None or _holds(item.number, args.table)]
    tables = [table for table in paper_tables.TABLES if any(table.number == item.number for item in listed)]
    if not listed or (manifest and not tables):
        among = [t.number for t in paper_tables.TABLES] if manifest else [i.number for i in paper_list.items()]
        raise EvalError(f"--table {args.table}: choose from {', '.join(among)}")
    console = Console()  # 80 columns where it is no terminal
    if manifest is None:
        for item in listed:
            _show_item(item, console)
    for table in tables if manifest or args.table else ():
        _show_conditions(table, manifest, console)
    if manifest is None and args.table is None:
        console.print("--table N: a table's conditions. DIR: which of them hold in a run.", highlight=False)
    return 0


def _show_item(item: Any, console: Any) -> None:
    from rich.text import Text

    from latent_santa.eval.report.paper_list import folded

    name = item.number if item.number.startswith("F") else f"Table{'s' * ('-' in item.number)} {item.number}"
    console.print(Text(f"{name}: {item.shows}" + (f" ({item.note})" if item.note else "")))
    for command in item.commands:
        console.print(folded(command), markup=False, highlight=False, soft_wrap=True)
    console.print()


def _show_conditions(table: Any, manifest: dict[str, Any] | None, console: Any) -> None:
    from rich import box
    from rich.table import Table

    from latent_santa.eval.report import paper_tables

    found = paper_tables.checks(table, manifest)
    heading = f"Table{'s' * ('-' in table.number)} {table.number}"
    shown = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("condition", "paper", *(("run", "verdict") if manifest else ())):
        shown.add_column(name, overflow="fold")
    for check in found:
        shown.add_row(check.what, check.paper, *((check.run, check.verdict) if manifest else ()))
    console.print(shown)
    if manifest:
        holds, missed = (sum(c.verdict == v for c in found) for v in (paper_tables.HOLDS, paper_tables.MISSED))
        console.print(
            f"{holds} hold, {missed} do not, {len(found) - holds - missed} cannot be known from the paper\n",
            highlight=False,
        )
