"""``latent-santa diagnose frontier``: attention error against rows read, for every requested setting."""

from __future__ import annotations

import argparse
from typing import Any

from latent_santa.eval.commands import diagnosing, options
from latent_santa.eval.errors import EvalError

METHODS = "santa++,santa,top_teams,oracle_rows,quest,streaming_llm"
DEFAULTS: diagnosing.Defaults = {
    True: {"length": 2048, "tasks": "multivalue,fwe", "n": 2, "calls": 6, "budgets": [32, 128, 512]},
    False: {"length": 8192, "tasks": "mla3", "n": 2, "calls": 16, "budgets": [128, 256, 512, 1024]},
}
DESCRIPTION = """\
Relative attention error against rows read (Equation 13 or 14), by layer and in total, for every combination of the
given settings. Each prompt is prefilled and decoded densely once; all settings then attend the same queries and rows,
those of dense decoding, so nothing drifts. Minutes, not hours: look here before task scores are paid for.

Writes frontier.json, frontier.md, frontier.png and frontier_layers.png. Results are kept one by one, and the same
command continues them; settings may be added.

Example: latent-santa diagnose frontier --model builtin:tiny

Example: latent-santa diagnose frontier --model ID_OR_PATH --methods santa++,quest --routing one_stage,two_stage \
--parents-per-head 32,64,128 --budgets 64,128,256,512
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's options."""
    parser = subparsers.add_parser(
        "frontier",
        help="attention error against rows read, for every requested setting on the same queries",
        description=DESCRIPTION,
        formatter_class=options.Help,
    )
    diagnosing.add_options(parser, DEFAULTS)
    shown = {tiny: ",".join(map(str, own["budgets"])) for tiny, own in DEFAULTS.items()}
    options.add_method_options(parser, f"{shown[False]}; builtin:tiny {shown[True]}", "contiguous")
    parser.set_defaults(run=run, methods=METHODS)


def run(args: argparse.Namespace) -> int:
    """Measure, write the files and show the table."""
    spec, base = diagnosing.start(args, DEFAULTS)
    args.parents = args.parents or ["contiguous"]
    asked = [condition for condition in options.conditions(args, base) if condition.method != "dense"]
    if not asked:
        raise EvalError("--methods dense: it has no error; give another method")
    from latent_santa.eval.diagnose.frontier import Frontier

    return diagnosing.run(args, Frontier(asked), spec, base)
