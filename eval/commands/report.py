"""`latent-santa report DIR`: rebuild every table and picture of a run from its files, without a model."""

from __future__ import annotations

import argparse
from typing import Any

from latent_santa.eval.commands.options import Help, path


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "report",
        help="rebuild the tables and pictures of a finished or interrupted run",
        description="Rebuild summary.json, summary.csv, table.md and access_accuracy.png of a run. No model is loaded."
        "\n\nExample: latent-santa report out/tiny",
        formatter_class=Help,
    )
    parser.add_argument("directory", type=path, help="directory of the run (its --out)")
    parser.add_argument("--plot", action=argparse.BooleanOptionalAction, default=True, help="draw access_accuracy.png")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Rebuild and show; the run's exit code."""
    from latent_santa.eval.report.screen import show
    from latent_santa.eval.report.summary import exit_code, write_reports
    from latent_santa.eval.report.tables import output_console
    from latent_santa.eval.run.store import Store

    store = Store(args.directory)
    summary, notes = write_reports(store, args.plot)
    show(store, summary, notes, output_console())
    return exit_code(summary)
