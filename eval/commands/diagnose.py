"""``latent-santa diagnose``: what attention does on a prompt's real queries. One subcommand per diagnostic."""

from __future__ import annotations

from typing import Any

from latent_santa.eval.commands import diagnose_frontier, diagnose_generation, diagnose_groupings, diagnose_probes


def add_parser(subparsers: Any) -> None:
    """Add the command and its subcommands."""
    parser = subparsers.add_parser(
        "diagnose",
        help="attention on real queries: error against rows read of every setting, and the paper's diagnostics",
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for module in (diagnose_frontier, diagnose_generation, diagnose_groupings, diagnose_probes):
        module.add_parser(kinds)
