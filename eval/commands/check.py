"""``latent-santa check``: does patching do on this model what it promises."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from latent_santa.eval.commands.config_file import read
from latent_santa.eval.commands.options import Help, add_model_options, at_least, model_spec
from latent_santa.eval.errors import EvalError


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
        formatter_class=Help,
    )
    add_model_options(parser, default="builtin:tiny")
    parser.add_argument("--length", type=int, default=600, help="tokens of the prompt, drawn from the vocabulary")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompt")
    parser.add_argument(
        "--config", type=read, metavar="FILE", help="check under the settings that SantaConfig.save wrote to this file"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one line per finding; the exit code is 1 when one fails."""
    import random

    from rich.console import Console

    from latent_santa.eval.run import sizes
    from latent_santa.eval.run.models import check_supported, load, load_config, load_tokenizer
    from latent_santa.eval.run.selfcheck import NEW_TOKENS, run_checks
    from latent_santa.patches.limits import context_limit

    console = Console()
    spec = model_spec(args)
    at_least(args, length=1)
    if args.config is not None and args.config.method == "dense":
        raise EvalError('--config: its method is "dense", which samples nothing; give settings of a sampled method')
    config = load_config(spec)
    check_supported(spec, config)
    rows, asked = args.length + NEW_TOKENS, f"--length {args.length} with {NEW_TOKENS} new tokens"
    sizes.check_positions(context_limit(config), rows, asked, spec.name)
    sizes.check_cache(config, rows, spec, asked)
    tokenizer = load_tokenizer(spec)
    model = load(spec, tokenizer).model
    draw = random.Random(args.seed)
    special = set(tokenizer.all_special_ids)
    ordinary = [i for i in range(len(tokenizer)) if i not in special]
    ids = [draw.choice(ordinary) for _ in range(args.length)]
    counts: Counter[bool | None] = Counter()
    try:
        for check in run_checks(model, ids, args.config):
            counts[check.passed] += 1
            mark = {True: "[green]ok  [/green]", False: "[red]FAIL[/red]", None: "n/a "}[check.passed]
            console.print(f"{mark} {check.name}: ", end="")
            console.print(check.seen, markup=False, highlight=False, soft_wrap=True)
    except NotImplementedError as error:
        raise EvalError(str(error)) from error
    told = f"{counts[False]} of {counts.total()} checks failed" if counts[False] else f"{counts[True]} checks passed"
    skipped = f", {counts[None]} could not be made" if counts[None] else ""
    console.print(f"{spec.name}: {told}{skipped}", markup=False, highlight=False, soft_wrap=True)
    return 1 if counts[False] else 0
