"""``latent-santa bench capture``: save a real model's workload for ``bench operator --workload``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from latent_santa.eval.commands import options
from latent_santa.eval.errors import EvalError


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "capture",
        help="save one layer's queries, cache and teams of a real model and prompt to a file",
        description=(
            "Prefill a prompt, decode a few tokens with sampled attention, and save what the last step gave one "
            "layer's operator: queries, cache, teams and noise keys. `bench operator --workload FILE` times it."
        ),
        formatter_class=options.Help,
    )
    options.add_model_options(parser, default="builtin:tiny")
    parser.add_argument("--prompt-file", type=options.path, help="text to prefill; without it, lines of filler")
    parser.add_argument("--length", type=int, default=2048, help="prompt tokens; a longer text is cut")
    parser.add_argument("--layer", type=int, help="layer to save; the middle one if not given")
    parser.add_argument("--steps", type=int, default=2, help="tokens to decode first")
    parser.add_argument("--parents", default="kmeans", choices=("kmeans", "contiguous"))
    parser.add_argument(
        "--parent-summary", choices=("mean", "isotropic", "diagonal"), help="save parents too, for two stages"
    )
    parser.add_argument("--budget", type=int, default=128, help="S while decoding; the file can be timed at any K")
    parser.add_argument(
        "--out", type=options.path, default=Path("workload.pt"), metavar="FILE", help="where to write it"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Capture and save; sizes are checked before the model is loaded."""
    from latent_santa.eval.bench.capture import capture
    from latent_santa.eval.bench.workload import save
    from latent_santa.eval.run import sizes
    from latent_santa.eval.run.conditions import checked_config
    from latent_santa.eval.run.models import load, load_config, load_tokenizer
    from latent_santa.eval.run.store import check_writable
    from latent_santa.patches.limits import context_limit

    options.at_least(args, length=2, steps=1, layer=0)
    spec = options.model_spec(args)
    settings = {"parents": args.parents, "budget": args.budget}
    if args.parent_summary is not None:
        settings |= {"routing": "two_stage", "parent_summary": args.parent_summary}
    checked_config(spec.resolved_device(), **settings)
    check_writable(args.out.parent)
    if args.out.is_dir():
        raise EvalError(f"--out {args.out} is a directory: give a file to write")
    config = load_config(spec)
    layers = config.get_text_config().num_hidden_layers
    if args.layer is not None and args.layer >= layers:
        raise EvalError(f"--layer {args.layer}: the model has layers 0 to {layers - 1}")
    rows, asked = args.length + args.steps, f"--length {args.length} and --steps {args.steps}"
    sizes.check_positions(context_limit(config), rows, asked, spec.name)
    sizes.check_cache(config, rows, spec, asked)
    tokenizer = load_tokenizer(spec)
    text = options.prompt_text(args.prompt_file) if args.prompt_file else _filler(args.length)
    ids = tokenizer(text, truncation=True, max_length=args.length)["input_ids"]
    if len(ids) < args.length:
        raise EvalError(f"the prompt has {len(ids)} tokens: --length {args.length} needs a longer text")
    model = load(spec, tokenizer).model
    workload = capture(model, ids, args.layer, args.steps, spec.name, **settings)
    save(workload, args.out)
    print(f"{args.out}: {workload.source}, {workload.context} rows, {int(workload.teams.count.sum())} teams")
    return 0


def _filler(tokens: int) -> str:
    """More words than ``tokens``, no line like another."""
    return "\n".join(f"Line {n} says that {n * n} is the square of {n}." for n in range(max(16, tokens // 4)))
