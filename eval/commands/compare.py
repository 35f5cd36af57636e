"""``latent-santa compare``: one prompt, dense and every setting side by side."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from latent_santa.eval.commands.options import add_model_options, integers, model_spec

PLANTED = {True: "multivalue", False: "niah_multivalue"}
BUDGETS = {True: "8,32,128", False: "128,256,512"}


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "compare",
        help="one prompt: answers, rows read, agreement and attention error of several settings beside dense",
        description=(
            "Decode one prompt greedily with dense attention and with every combination of the given settings, and "
            "show the answer, the rows read (routing, union and suffix; Equation 14 for MLA, 13 for GQA), how much of "
            "the dense answer is reproduced before the first difference, and the mean relative attention error against "
            "dense on the same cache. Reads are logical access, not time; the prefill is dense in every case."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_model_options(parser, default="builtin:tiny")
    prompt = parser.add_argument_group("prompt")
    prompt.add_argument("--prompt-file", type=Path, help="the user's turn; without it, facts planted in filler text")
    prompt.add_argument("--length", type=int, default=2048, help="tokens of the planted prompt, answer room included")
    prompt.add_argument("--prompt-number", type=int, default=0, help="which planted prompt")
    prompt.add_argument("--no-chat-template", action="store_true", help="give the text to the model as it is")
    prompt.add_argument("--max-new-tokens", type=int, default=64, help="tokens to generate")
    method = parser.add_argument_group("method (Section 2, Appendix A)")
    method.add_argument("--methods", default="dense,santa++", help="of dense, santa++, santa, centroid")
    method.add_argument(
        "--budgets", help="S, nominal budgets; K = S / (P / R) teams a head; builtin:tiny 8,32,128, else 128,256,512"
    )
    method.add_argument(
        "--estimator", default="per_head,pooled", help="whose teams a head uses: its own, or the union's"
    )
    method.add_argument("--parents", default="kmeans", help="kmeans (Algorithm 3) and/or contiguous (Algorithm 4)")
    method.add_argument("--parent-size", type=int, default=16, help="P, nominal rows a parent")
    method.add_argument("--representatives", type=int, default=4, help="R, most representatives a parent")
    method.add_argument("--noise", default="independent", choices=("independent", "shared"), help="draws of heads")
    method.add_argument(
        "--routing-dtype",
        default="model",
        choices=("model", "int8", "int4"),
        help="how the frozen routing keys are kept; counted in bytes, not in rows",
    )
    method.add_argument("--seed", type=int, default=0, help="seed of the sampling noise")
    method.add_argument("--backend", default="auto", choices=("auto", "torch", "triton"), help="implementation")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the comparison and print its table."""
    from rich.console import Console

    import latent_santa
    from latent_santa.eval.errors import EvalError
    from latent_santa.eval.run.comparison import Outcome, run_condition
    from latent_santa.eval.run.conditions import checked_config, expand
    from latent_santa.eval.run.generation import make_greedy
    from latent_santa.eval.run.models import context_limit, load, load_tokenizer
    from latent_santa.eval.run.progress import Progress

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a table in a log is not folded to 80 columns
    spec = model_spec(args)
    budgets = integers("--budgets", args.budgets or BUDGETS[spec.tiny])
    methods = args.methods.split(",")
    conditions = expand(
        ["dense", *(m for m in methods if m != "dense")],
        budgets,
        args.estimator.split(","),
        args.parents.split(","),
        [(args.parent_size, args.representatives)],
        [args.parent_size],
    )
    config = checked_config(
        spec.resolved_device(),
        seed=args.seed,
        noise=args.noise,
        routing_dtype=args.routing_dtype,
        backend=args.backend,
    )
    if min(args.max_new_tokens, args.length, args.prompt_number + 1) < 1:
        raise EvalError("--max-new-tokens and --length must be at least 1, and --prompt-number at least 0")
    if args.json is not None and (args.json.is_dir() or not args.json.resolve().parent.is_dir()):
        raise EvalError(f"--json {args.json}: give a file in an existing directory")
    tokenizer = load_tokenizer(spec)
    ids, references = _prompt(args, spec, tokenizer)
    with console.status(f"loading {spec.name}") if console.is_terminal else nullcontext():
        model = load(spec, tokenizer).model
    limit = context_limit(model.config)
    if limit is not None and len(ids) + args.max_new_tokens > limit:
        raise EvalError(
            f"the prompt has {len(ids)} tokens and --max-new-tokens is {args.max_new_tokens}, but {spec.name} was made "
            f"for {limit} positions: shorten the prompt"
        )
    make_greedy(model, tokenizer)
    outcomes: list[Outcome] = []
    with (
        latent_santa.patch(model, config) as santa,
        Progress(console) as bar,
    ):
        bar.stage("settings", len(conditions))
        for condition in conditions:
            dense = outcomes[0] if outcomes else None
            outcomes.append(run_condition(santa, tokenizer, ids, condition, args.max_new_tokens, dense))
            bar.step(condition.name)
        bar.end_stage()
        layout = santa.layout
    _print(console, spec, outcomes, len(ids), references, layout)
    if args.json:
        record = {"model": spec.name, "prompt_tokens": len(ids), "outcomes": [o.as_dict() for o in outcomes]}
        args.json.write_text(json.dumps(record, indent=1))
    return 0


def _prompt(args: argparse.Namespace, spec: Any, tokenizer: Any) -> tuple[list[int], tuple[str, ...]]:
    """Token ids, and the answers that are looked for (none for a prompt of the user's own)."""
    from latent_santa.eval.commands.options import prompt_text
    from latent_santa.eval.run.render import Renderer
    from latent_santa.eval.sources import Request, load_samples

    renderer = Renderer(tokenizer, chat=not args.no_chat_template)
    if args.prompt_file is not None:
        return renderer.encode(prompt_text(args.prompt_file), ""), ()
    request = Request("builtin", (PLANTED[spec.tiny],), args.prompt_number + 1, args.length)
    row = load_samples(request, renderer, spec.tiny).samples[-1]
    return renderer.encode(row.input, row.answer_prefix), row.references


def _print(
    console: Any, spec: Any, outcomes: list[Any], prompt_tokens: int, references: tuple[str, ...], layout: str
) -> None:
    from rich.table import Table

    equation = "Equation 14" if layout == "mla" else "Equation 13"
    table = Table(
        title=f"{spec.name}, {prompt_tokens} prompt tokens. Reads of decoding in % of dense ({equation}), not time",
        title_justify="left",
    )
    reads = ("routing", "union+suffix", "reads", "bytes")
    for name in ("setting", "S", "K", *reads, "as dense", "attn error", "tokens/s"):
        table.add_column(name, justify="left" if name == "setting" else "right", no_wrap=True)
    if references:
        table.add_column("found", justify="right", no_wrap=True)
    for o in outcomes:
        cells = [
            o.name + (" (all teams)" if o.full else ""),
            "-" if o.budget is None else str(o.budget),
            "-" if o.teams_per_head is None else str(o.teams_per_head),
            *_reads(o.rows),
            f"{o.agreement:.0f}%",
            "-" if o.error is None else f"{o.error:.4f}",
            f"{o.tokens_per_second:.1f}",
        ]
        if references:
            cells.append(f"{sum(r.lower() in o.answer.lower() for r in references)}/{len(references)}")
        table.add_row(*cells)
    console.print(table)
    for o in outcomes:
        label = o.name if o.budget is None else f"{o.name}, S={o.budget}"
        console.print(f"{label}: {o.answer.strip()!r}", markup=False, highlight=False)


def _reads(rows: dict[str, Any]) -> list[str]:
    """Routing, attention and all reads in percent of dense ones, and their bytes."""
    if rows["percent"] is None:
        return ["-"] * 4
    parts = (rows["routing_read"], rows["row_read"], rows["numerator"])
    return [*(f"{100 * part / rows['denominator']:.1f}" for part in parts), f"{rows['bytes_percent']:.1f}"]
