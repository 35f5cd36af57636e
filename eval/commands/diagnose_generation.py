"""``latent-santa diagnose generation``: what long generations read, and what they still know."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from latent_santa.eval.commands import diagnosing, options
from latent_santa.eval.errors import EvalError

DEFAULTS: diagnosing.Defaults = {
    True: {"length": 2048, "tasks": "multivalue", "n": 2, "budgets": [128]},
    False: {"length": 8192, "tasks": "mla3", "n": 2, "budgets": [128]},
}
DESCRIPTION = """\
Rows read while a model writes a long text, and whether it can be asked about that text. The beginning of each prompt is
prefilled; the rest is given one token per decoding call, as if the model had written it; then the model answers. Every
setting is measured under each --regroup-after: the most rows that stay exact before they are grouped into teams too.

Every token of every prompt costs a decoding call, so begin with few prompts. Writes generation.json, generation.md and
generation.png; the same command continues an interrupted run.

Example: latent-santa diagnose generation --model builtin:tiny --regroup-after 0,64
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's options."""
    parser = subparsers.add_parser(
        "generation",
        help="rows read by long generations, and answers about the generated text",
        description=DESCRIPTION,
        formatter_class=options.Help,
    )
    diagnosing.add_options(parser, DEFAULTS, calls=False)
    parser.add_argument("--first", type=int, default=256, help="tokens of each prompt that are prefilled")
    parser.add_argument("--new-tokens", type=options.positive, default=128, help="most tokens of an answer")
    parser.add_argument("--batch-size", type=options.positive, default=8, help="prompts that are decoded together")
    shown = {tiny: ",".join(map(str, own["budgets"])) for tiny, own in DEFAULTS.items()}
    options.add_method_options(
        parser, f"{shown[False]}; builtin:tiny {shown[True]}", "contiguous", several_regroupings=True
    )
    parser.set_defaults(run=run, methods="santa++", estimators="pooled")


def run(args: argparse.Namespace) -> int:
    """Measure, write the files and show the table."""
    regroup, args.regroup_after = args.regroup_after, "auto"
    options.at_least(args, first=1)
    spec, base = diagnosing.start(args, DEFAULTS)
    args.parents, args.calls = args.parents or ["contiguous"], args.new_tokens
    asked = [condition for condition in options.conditions(args, base) if condition.method != "dense"]
    if not asked:
        raise EvalError("--methods dense: dense decoding reads everything; give another method")
    if args.first >= args.length:
        raise EvalError(f"--first {args.first} must be less than --length {args.length}: the rest is generated")
    from latent_santa.eval.diagnose.generation import Generation, measure

    try:
        diagnostic = Generation(asked, regroup, args.first)
    except ValueError as error:
        raise EvalError(str(error)) from error
    return diagnosing.run(args, diagnostic, spec, base, partial(measure, batch=args.batch_size))
