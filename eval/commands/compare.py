"""``latent-santa compare``: one prompt, dense and every setting side by side."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from typing import Any

from latent_santa.eval.commands.options import (
    Help,
    add_method_options,
    add_model_options,
    add_prompt_options,
    at_least,
    base_config,
    conditions,
    model_spec,
    path,
    prompt_text,
)

PLANTED = {True: "multivalue", False: "niah_multivalue"}
BUDGETS = {True: [8, 32, 128], False: [128, 256, 512]}
DESCRIPTION = """\
Decode one prompt greedily with dense attention and with every combination of the given settings, and show the answer,
the rows read (routing, union and suffix; Equation 14 for MLA, 13 for GQA), how much of the dense answer is reproduced
before the first difference, and the mean relative attention error against dense on the same cache. Reads are logical
access, not time; the prefill is dense in every case.

Example: latent-santa compare --model builtin:tiny --budgets 32,128 --estimators pooled
"""


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "compare",
        help="one prompt: answers, rows read, agreement and attention error of several settings beside dense",
        description=DESCRIPTION,
        formatter_class=Help,
    )
    add_model_options(parser, default="builtin:tiny")
    prompt = add_prompt_options(parser, 2048)
    prompt.add_argument("--prompt-file", type=path, help="the user's turn; without it, facts planted in filler text")
    prompt.add_argument("--prompt-number", type=int, default=0, help="which planted prompt")
    prompt.add_argument("--max-new-tokens", type=int, default=64, help="tokens to generate")
    shown = {tiny: ",".join(map(str, budgets)) for tiny, budgets in BUDGETS.items()}
    add_method_options(parser, f"{shown[False]}; builtin:tiny {shown[True]}", "kmeans")
    parser.add_argument("--json", type=path, metavar="FILE", help="also write everything as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the comparison and print its table."""
    import torch

    import latent_santa
    from latent_santa.eval.report.outcomes import show
    from latent_santa.eval.report.tables import output_console
    from latent_santa.eval.run import sizes
    from latent_santa.eval.run.comparison import Outcome, run_condition
    from latent_santa.eval.run.conditions import label
    from latent_santa.eval.run.generation import make_greedy
    from latent_santa.eval.run.models import check_supported, load, load_config, load_tokenizer
    from latent_santa.eval.run.progress import Progress
    from latent_santa.eval.run.store import check_file, write_atomic
    from latent_santa.patches.limits import context_limit

    console = output_console()
    spec = model_spec(args)
    args.budgets, args.parents = args.budgets or BUDGETS[spec.tiny], args.parents or ["kmeans"]
    args.methods = ["dense", *(method for method in args.methods if method != "dense")]
    base = base_config(args, spec)
    asked = conditions(args, base)
    at_least(args, max_new_tokens=1, length=1, prompt_number=0)
    if args.json is not None:
        check_file("--json", args.json)
    config = load_config(spec)
    check_supported(spec, config)
    limit = context_limit(config)
    if args.prompt_file is None:
        sizes.check_positions(limit, args.length, f"--length {args.length}", spec.name)
        sizes.check_cache(config, args.length, spec, f"--length {args.length}")
    sizes.check_positions(limit, args.max_new_tokens, f"--max-new-tokens {args.max_new_tokens}", spec.name)
    sizes.check_cache(config, args.max_new_tokens, spec, f"--max-new-tokens {args.max_new_tokens}")
    tokenizer = load_tokenizer(spec)
    ids, references = _prompt(args, spec, tokenizer)
    rows = len(ids) + args.max_new_tokens
    sizes.check_positions(
        limit, rows, f"{len(ids)} prompt tokens and --max-new-tokens {args.max_new_tokens}", spec.name
    )
    sizes.check_cache(config, rows, spec, f"{len(ids)} prompt tokens and --max-new-tokens {args.max_new_tokens}")
    with console.status(f"loading {spec.name}") if console.is_terminal else nullcontext():
        model = load(spec, tokenizer).model
    make_greedy(model, tokenizer)
    outcomes: list[Outcome] = []
    with (
        latent_santa.patch(model, base) as santa,
        Progress(console) as bar,
    ):
        bar.stage("settings", len(asked))
        prompt = santa.prefill(torch.tensor([ids], device=model.get_input_embeddings().weight.device))
        for condition in asked:
            dense = outcomes[0] if outcomes else None
            outcomes.append(run_condition(santa, tokenizer, prompt, condition, args.max_new_tokens, dense))
            bar.step(label(condition))
        bar.end_stage()
        layout = santa.layout
    show(console, spec.name, len(ids), outcomes, references, layout)
    if args.json:
        record = {"model": spec.name, "prompt_tokens": len(ids), "outcomes": [o.as_dict() for o in outcomes]}
        write_atomic(args.json, json.dumps(record, indent=1))
    return 0


def _prompt(args: argparse.Namespace, spec: Any, tokenizer: Any) -> tuple[list[int], tuple[str, ...]]:
    """Token ids, and the answers that are looked for (none for a prompt of the user's own)."""
    from latent_santa.eval.commands.options import renderer as renderer_of
    from latent_santa.eval.sources import Request, load_samples

    renderer = renderer_of(args, tokenizer)
    for warning in renderer.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    if args.prompt_file is not None:
        return renderer.encode(prompt_text(args.prompt_file), ""), ()
    request = Request("builtin", (PLANTED[spec.tiny],), 1, args.length, start=args.prompt_number)
    sample = load_samples(request, renderer, spec.tiny).samples[0]
    return renderer.encode(sample.input, sample.answer_prefix), sample.references
