"""``latent-santa diagnose kl``: Table 1, on any partition and routing key."""

from __future__ import annotations

import argparse
from typing import Any

from latent_santa.eval.commands import diagnosing, options

DEFAULTS: diagnosing.Defaults = {
    True: {"length": 2048, "tasks": "multikey,fwe,facts", "n": 2, "calls": 8},
    False: {"length": 8192, "tasks": "cwe,niah_single_1,qa_1", "n": 20, "calls": 33},
}
DESCRIPTION = """\
Table 1: KL(p || q) of the routing distribution from dense attention over the prompt (Equation 11), on dense decoding's
own queries. The paper compares teams routed by representatives with clusters routed by mean keys; here every partition
is routed by each key that it has, so that partition and key can be told apart.

Writes kl.json, kl.md and kl.png.

Example: latent-santa diagnose kl --model builtin:tiny
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's options."""
    parser = subparsers.add_parser(
        "kl",
        help="Table 1: KL of the routing distribution from dense attention",
        description=DESCRIPTION,
        formatter_class=options.Help,
    )
    diagnosing.add_options(parser, DEFAULTS)
    diagnosing.add_grouping_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, write the files and show the table."""
    spec, base = diagnosing.start(args, DEFAULTS)
    from latent_santa.eval.diagnose.kl import NOTES, Divergence, table

    summary = diagnosing.run(args, Divergence(base), spec, base)
    diagnosing.show(*table(summary), NOTES)
    return 0
