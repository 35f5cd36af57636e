"""`latent-santa report DIR`: rebuild every table and picture of a run from its files, or compare two runs."""

from __future__ import annotations

import argparse
from typing import Any

from latent_santa.eval.commands.options import Help, path
from latent_santa.eval.errors import EvalError


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "report",
        help="rebuild the tables and pictures of a finished or interrupted run",
        description="Rebuild summary.json, summary.csv, answers.csv, table.md and access_accuracy.png of a run, and "
        "with --html one page with the answers side by side. Or compare two runs on the prompts that both have. No "
        "model is loaded."
        "\n\nExample: latent-santa report out/tiny --html"
        "\n\nExample: latent-santa report --compare out/before out/after",
        formatter_class=Help,
    )
    parser.add_argument("directory", type=path, nargs="?", help="directory of the run (its --out)")
    parser.add_argument("--plot", action=argparse.BooleanOptionalAction, default=True, help="draw access_accuracy.png")
    parser.add_argument(
        "--answered",
        action="store_true",
        help="only prompts that every setting has answered: tables of a run that was stopped",
    )
    parser.add_argument(
        "--against",
        metavar="SETTING",
        help='a setting that the others are paired with, such as "SANTA++ k-means 16/4 per head S=512"',
    )
    parser.add_argument("--html", action="store_true", help="also write report.html, a file that needs nothing else")
    parser.add_argument(
        "--compare",
        type=path,
        nargs=2,
        metavar=("RUN1", "RUN2"),
        help="paired differences of two runs on equal prompts, RUN2 minus RUN1; writes nothing",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Rebuild and show; the run's exit code. For two runs their differences, and 0."""
    from rich.text import Text

    from latent_santa.eval.report import page, pairs, screen
    from latent_santa.eval.report.summary import exit_code, write_reports
    from latent_santa.eval.report.tables import against_table, fitting_table, output_console
    from latent_santa.eval.run.store import Store

    if (args.directory is None) == (args.compare is None):
        raise EvalError("give the directory of one run, or two with --compare RUN1 RUN2")
    if args.compare:
        pairs.show(pairs.compare(*map(Store, args.compare)), output_console())
        return 0
    store = Store(args.directory)
    summary, notes = write_reports(store, args.plot, args.answered, args.against)
    written = page.write(store, summary) if args.html else None
    console = output_console()
    screen.show(store, summary, notes, console, written)
    if summary["against"] is not None:
        console.print(Text(f"Paired with {summary['against']['setting']}:"))
        console.print(fitting_table(*against_table(summary), console))
    return exit_code(summary)
