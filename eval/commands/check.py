"""``latent-santa check``: does patching do on this model what it promises."""

from __future__ import annotations

import argparse
from typing import Any

from latent_santa.eval.commands.options import add_model_options, model_spec


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "check",
        help="self-check of a model: what is patched, K = M equals dense, unpatching restores",
        description=(
            "Patch a model and see that every attention layer is patched, that a budget covering every team (K >= M) "
            "gives dense attention, that a small budget samples and is counted, that unsupported caches are refused, "
            "and that unpatching restores attributes and outputs to the bit."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_model_options(parser, default="builtin:tiny")
    parser.add_argument("--length", type=int, default=600, help="tokens of the prompt, drawn from the vocabulary")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompt")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one line a finding; the exit code is 1 when one fails."""
    import random

    from rich.console import Console

    from latent_santa.eval.errors import EvalError
    from latent_santa.eval.run.models import context_limit, load, load_tokenizer
    from latent_santa.eval.run.selfcheck import NEW_TOKENS, run_checks

    console = Console()
    spec = model_spec(args)
    tokenizer = load_tokenizer(spec)
    model = load(spec, tokenizer).model
    limit = context_limit(model.config)
    if not 1 <= args.length <= (limit or args.length + NEW_TOKENS) - NEW_TOKENS:
        raise EvalError(f"--length {args.length}: give 1 to {limit} minus {NEW_TOKENS} new tokens")
    draw = random.Random(args.seed)
    special = set(tokenizer.all_special_ids)
    ordinary = [i for i in range(len(tokenizer)) if i not in special]
    ids = [draw.choice(ordinary) for _ in range(args.length)]
    failed = 0
    try:
        for check in run_checks(model, ids):
            failed += check.passed is False
            mark = {True: "[green]ok  [/green]", False: "[red]FAIL[/red]", None: "n/a "}[check.passed]
            console.print(f"{mark} {check.name}: ", end="")
            console.print(check.seen, markup=False, highlight=False, soft_wrap=True)
    except NotImplementedError as error:
        raise EvalError(str(error)) from error
    console.print(f"{spec.name}: {'all checks passed' if not failed else f'{failed} checks failed'}")
    return 1 if failed else 0
