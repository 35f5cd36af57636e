"""``latent-santa recommend``: the settings that read least and keep a share of what dense decoding does."""

from __future__ import annotations

import argparse
from typing import Any

from latent_santa.eval.commands import options
from latent_santa.eval.errors import EvalError

BUDGETS = {True: [8, 32, 128, 256], False: [64, 128, 256, 512, 1024]}
TASKS = {True: "multivalue,fwe,facts", False: "mla3"}
DESCRIPTION = """\
Decode prompts with dense attention and with every combination of the given settings, and name the one that reads fewest
rows of those that keep the wanted share. With --prompt-file, your own prompts: the share is that of dense's answer
before the first other token. Without, builtin prompts: the share is that of dense's score.

Example: latent-santa recommend --model builtin:tiny --keep 95

Example: latent-santa recommend --model ID_OR_PATH --keep 95 --prompt-file a.txt b.txt --save settings.json
"""


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "recommend",
        help="the settings that read fewest rows and keep a share of dense decoding, on your own prompts",
        description=DESCRIPTION,
        formatter_class=options.Help,
    )
    options.add_model_options(parser, default="builtin:tiny")
    parser.add_argument("--keep", type=float, default=95.0, metavar="PERCENT", help="share of dense that is wanted")
    parser.add_argument("--save", type=options.path, metavar="FILE", help="write the settings there, for --config")
    prompts = options.add_prompt_options(parser, 2048)
    prompts.add_argument(
        "--prompt-file", type=options.path, nargs="+", default=[], help="the user's turns, one file each"
    )
    prompts.add_argument("--n", type=int, default=2, help="builtin prompts per task")
    prompts.add_argument(
        "--tasks", type=options.word, help=f"builtin tasks (default: {TASKS[False]}; builtin:tiny {TASKS[True]})"
    )
    prompts.add_argument("--max-new-tokens", type=int, default=64, help="tokens to generate for prompts of your own")
    shown = {tiny: ",".join(map(str, budgets)) for tiny, budgets in BUDGETS.items()}
    options.add_method_options(parser, f"{shown[False]}; builtin:tiny {shown[True]}", "contiguous")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and recommend; 1 where no setting keeps what is wanted."""
    from rich.text import Text

    import latent_santa
    from latent_santa.eval.report.tables import output_console
    from latent_santa.eval.run import recommending
    from latent_santa.eval.run.generation import make_greedy
    from latent_santa.eval.run.models import check_supported, load, load_config, load_tokenizer
    from latent_santa.eval.run.progress import Progress
    from latent_santa.eval.run.store import check_file

    spec = options.model_spec(args)
    args.budgets, args.parents = args.budgets or BUDGETS[spec.tiny], args.parents or ["contiguous"]
    args.methods = ["dense", *(method for method in args.methods if method != "dense")]
    base = options.base_config(args, spec)
    dense, *asked = options.conditions(args, base)
    options.at_least(args, max_new_tokens=1, length=1, n=1)
    if not 0 < args.keep <= 100:
        raise EvalError(f"--keep must be a share in percent, above 0 and at most 100, got {args.keep}")
    if not asked:
        raise EvalError("--methods dense: give a method that samples")
    if args.save is not None:
        check_file("--save", args.save)
    config = load_config(spec)
    check_supported(spec, config)
    tokenizer = load_tokenizer(spec)
    prompts = _prompts(args, spec, config, tokenizer)
    console = output_console()
    model = load(spec, tokenizer).model
    make_greedy(model, tokenizer)
    with latent_santa.patch(model, base) as santa, Progress(console) as bar:
        bar.stage("prompts", len(prompts))
        found = recommending.measure(santa, tokenizer, prompts, dense, asked, bar.step)
        bar.end_stage()
    best = recommending.best(found, args.keep)
    console.print(recommending.table(found, bool(args.prompt_file), len(prompts)))
    for line in recommending.advice(found, best, args.keep, len(prompts)):
        console.print(Text(line))
    if best is None:
        return 1
    console.print(recommending.patch_line(best.config), markup=False, highlight=False, soft_wrap=True)
    if args.save is not None:
        best.config.save(args.save)
        console.print(f"Settings: {args.save}, for --config", markup=False, highlight=False, soft_wrap=True)
    return 0


def _prompts(args: argparse.Namespace, spec: Any, config: Any, tokenizer: Any) -> list[Any]:
    """The user's own prompts or builtin ones, whose rows are known to fit. Raises EvalError."""
    from latent_santa.eval.run import sizes
    from latent_santa.eval.run.recommending import Wanted
    from latent_santa.eval.sources import Request, family, load_samples
    from latent_santa.eval.sources.tasks import resolve_tasks
    from latent_santa.patches.limits import context_limit

    limit, renderer = context_limit(config), options.renderer(args, tokenizer)

    def fits(rows: int, asked: str) -> None:
        sizes.check_positions(limit, rows, asked, spec.name)
        sizes.check_cache(config, rows, spec, asked)

    found = []
    if args.prompt_file:
        for path in args.prompt_file:
            ids = renderer.encode(options.prompt_text(path), "")
            fits(len(ids) + args.max_new_tokens, f"--prompt-file {path} and --max-new-tokens {args.max_new_tokens}")
            found.append(Wanted(ids, args.max_new_tokens))
        return found
    fits(args.length, f"--length {args.length}")
    tasks = resolve_tasks(args.tasks or TASKS[spec.tiny], family("builtin", spec.tiny))
    sizes.check_ids(args.n * len(tasks), args.length)
    for sample in load_samples(Request("builtin", tasks, args.n, args.length), renderer, spec.tiny).samples:
        renderer.prompt(sample, limit)  # refuses what does not fit
        ids = renderer.encode(sample.input, sample.answer_prefix)
        found.append(Wanted(ids, sample.max_new_tokens, sample))
    return found
