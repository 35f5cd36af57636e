"""`latent-santa paper`: which conditions of the paper's tables a run meets, and which cannot be known."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "paper",
        help="which conditions of the paper's tables hold in a run",
        description="For each of the paper's tables of scores: its conditions, what a run did, and whether they agree. "
        "Without a run, the conditions alone.",
    )
    parser.add_argument("directory", type=Path, nargs="?", help="directory of a run (its --out)")
    parser.add_argument("--table", help="only this table: 2, 3, 4, 6, 8 to 12 or 15-18")
    parser.set_defaults(run=run)


def _holds(numbers: str, wanted: str) -> bool:
    """Whether a table's number, or span of numbers such as 15-18, is or holds the wanted one."""
    first, _, last = numbers.partition("-")
    return wanted == numbers or (wanted.isdigit() and int(first) <= int(wanted) <= int(last or first))


def run(args: argparse.Namespace) -> int:
    """Print the conditions; 0."""
    from rich.table import Table

    from latent_santa.eval.errors import EvalError
    from latent_santa.eval.report import paper_tables, tables
    from latent_santa.eval.run.conditions import from_manifest
    from latent_santa.eval.run.store import Store

    manifest = None
    if args.directory:
        store = Store(args.directory)
        manifest = store.complete_manifest()
        from_manifest(manifest, store.manifest_path)
    chosen = [table for table in paper_tables.TABLES if args.table is None or _holds(table.number, args.table)]
    if not chosen:
        numbers = ", ".join(table.number for table in paper_tables.TABLES)
        raise EvalError(f"--table {args.table}: choose from {numbers}")
    console = tables.output_console()
    for table in chosen:
        found = paper_tables.checks(table, manifest)
        shown = Table(title=f"Table {table.number}", title_justify="left")
        for name in ("condition", "paper", "run", "verdict"):
            shown.add_column(name)
        for check in found:
            shown.add_row(check.what, check.paper, check.run, check.verdict)
        console.print(shown)
        if manifest:
            counts = {v: sum(c.verdict == v for c in found) for v in (paper_tables.HOLDS, paper_tables.MISSED)}
            unknown = len(found) - sum(counts.values())
            console.print(
                f"{counts[paper_tables.HOLDS]} hold, {counts[paper_tables.MISSED]} do not, {unknown} cannot be known "
                "from the paper\n",
                highlight=False,
            )
    return 0
