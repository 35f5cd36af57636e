"""What the subcommands of ``diagnose`` have in common: prompts, folder, and the way from options to files."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from latent_santa.eval.commands import options
from latent_santa.eval.errors import EvalError

if TYPE_CHECKING:
    from latent_santa.config import SantaConfig
    from latent_santa.eval.diagnose.work import Diagnostic
    from latent_santa.eval.run.models import ModelSpec

# what options mean when they are not given: for a model, and for builtin:tiny
Defaults = dict[bool, dict[str, Any]]


def add_options(parser: argparse.ArgumentParser, defaults: Defaults, calls: bool = True) -> None:
    """Add the options of model, prompts and folder.

    calls: whether the diagnostic can look at fewer calls than the recorded ones.
    """

    def both(name: str) -> str:
        return f"{defaults[False][name]}; builtin:tiny {defaults[True][name]}"

    options.add_model_options(parser, default="builtin:tiny")
    prompts = options.add_prompt_options(parser, None, both("length"))
    add = prompts.add_argument
    add("--data", type=options.word, default="builtin", help="builtin (no RULER prompts), hub, or jsonl:DIR")
    add("--tasks", type=options.word, help=f"names or groups (default: {both('tasks')})")
    add("--n", type=int, help=f"prompts per task (default: {both('n')})")
    add("--data-seed", type=int, default=42, help="seed of prompts and of their selection")
    add("--prompt-file", type=options.path, nargs="+", default=[], help="the user's turns, a file each, instead")
    if calls:
        add(
            "--calls",
            type=int,
            help=f"dense calls looked at per prompt, fewer where the answer ends (default: {both('calls')})",
        )
    parser.add_argument(
        "--out",
        type=options.path,
        metavar="DIR",
        help="folder of the results, continued if it has some (default: out/diagnose-KIND-MODEL)",
    )
    parser.add_argument("--plot", action=argparse.BooleanOptionalAction, default=True, help="draw the pictures")
    parser.set_defaults(calls=None)


def add_grouping_options(parser: argparse.ArgumentParser) -> None:
    """Add what groupings depend on; the diagnostics of groupings sample nothing."""
    add = parser.add_argument_group("grouping").add_argument
    add(
        "--kmeans-engine",
        default="auto",
        choices=("auto", "sklearn", "torch"),
        help="k-means of the parents; auto: PyTorch for rows on a GPU, else scikit-learn",
    )
    add("--kmeans-seed", type=int, default=0, help="seed of k-means")


def start(args: argparse.Namespace, defaults: Defaults) -> tuple[ModelSpec, SantaConfig]:
    """The model and what all settings share, once the options are filled in. Raises EvalError."""
    from latent_santa.config import SantaConfig

    spec = options.model_spec(args)
    fill(args, defaults)
    for name in options.SHARED:  # what only sampling depends on is no option of a diagnostic of groupings
        if not hasattr(args, name):
            setattr(args, name, getattr(SantaConfig(), name))
    return spec, options.base_config(args, spec)


def fill(args: argparse.Namespace, defaults: Defaults) -> None:
    """Give options their default for the model. Raises EvalError for numbers that make no sense."""
    for name, value in defaults[args.model == "builtin:tiny"].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    options.at_least(args, length=1, n=1, calls=1, data_seed=0)


def run(args: argparse.Namespace, diagnostic: Any, spec: ModelSpec, base: SantaConfig, measure: Any = None) -> int:
    """Check everything, measure what is missing, write JSON, Markdown and pictures, and show the table.

    diagnostic: a :class:`~latent_santa.eval.diagnose.work.Diagnostic`, or what ``measure`` takes in its place.
    measure: what measures it, with the arguments of :func:`~latent_santa.eval.diagnose.work.measure`.
    """
    import json
    from pathlib import Path

    from rich.console import Console

    from latent_santa.eval.diagnose import prompts as prompts_of
    from latent_santa.eval.diagnose.folder import Folder
    from latent_santa.eval.diagnose.work import markdown, summarise
    from latent_santa.eval.diagnose.work import measure as measure_recorded
    from latent_santa.eval.report.plots import NoPicture
    from latent_santa.eval.run import models
    from latent_santa.eval.run.locks import run_lock
    from latent_santa.eval.run.store import check_writable

    stem = spec.name.rstrip("/").rpartition("/")[2].replace(":", "-")
    folder = Folder(args.out or Path("out") / f"diagnose-{diagnostic.name}-{stem}", diagnostic.name)
    check_writable(folder.directory)
    config = models.load_config(spec)
    models.check_supported(spec, config)
    tokenizer = models.load_tokenizer(spec)
    prompts, about = _prompts(args, spec, config, tokenizer)
    prompts_of.check_room(prompts, args.calls, diagnostic.least_rows, config, spec)
    settings = {
        "model": spec.name,
        "weights": models.identity(spec, config),
        "dtype": spec.resolved_dtype(),
        "quant": spec.quant,
        "device": spec.resolved_device().partition(":")[0],
        "calls": args.calls,
        **{name: getattr(base, name) for name in options.SHARED},
        **about,
    }
    with run_lock(folder.directory, True):
        folder.begin(settings, {prompt.name: prompt.digest for prompt in prompts})
        console = Console(stderr=True)
        try:
            (measure or measure_recorded)(diagnostic, folder, spec, tokenizer, base, prompts, args.calls, console)
            summary = summarise(diagnostic, folder, prompts)
            folder.write(".json", json.dumps(summary, indent=1) + "\n")
            folder.write(".md", markdown(diagnostic, summary))
            try:
                for end, content in diagnostic.pictures(summary).items() if args.plot else ():
                    folder.write(end, content)
            except NoPicture as reason:
                print(f"note: no picture: {reason}", file=sys.stderr)
        except KeyboardInterrupt as stop:
            told = f"results up to here are kept in {folder.directory}; the same command continues them"
            raise KeyboardInterrupt(told) from stop
    _show(diagnostic, summary)
    print(f"Files: {folder.directory}/{diagnostic.name}.*")
    return 0


def _show(diagnostic: Diagnostic, summary: dict[str, Any]) -> None:
    from latent_santa.eval.report.tables import fitting_table, output_console

    header, lines = next(iter(diagnostic.tables(summary).values()))
    console = output_console()
    console.print(fitting_table(header, lines, console))
    for note in diagnostic.notes:
        console.print(note, markup=False, highlight=False)


def _prompts(args: argparse.Namespace, spec: ModelSpec, config: Any, tokenizer: Any) -> tuple[Any, dict[str, Any]]:
    """The prompts, and what they were made of, for the manifest. Raises EvalError."""
    from latent_santa.eval.diagnose import prompts as prompts_of
    from latent_santa.eval.run import sizes
    from latent_santa.eval.sources import Request, family
    from latent_santa.eval.sources.tasks import resolve_tasks
    from latent_santa.patches.limits import context_limit

    renderer = options.renderer(args, tokenizer)
    about: dict[str, Any] = {**renderer.fingerprint()}
    if args.prompt_file:
        files = [(path, options.prompt_text(path)) for path in args.prompt_file]
        return prompts_of.from_files(files, renderer, args.calls), {"data": prompts_of.OWN, **about}
    tasks = resolve_tasks(args.tasks, family(args.data, spec.tiny))
    limit = context_limit(config)
    sizes.check_positions(limit, args.length, f"--length {args.length}", spec.name)
    sizes.check_cache(config, args.length, spec, f"--length {args.length}")
    sizes.check_ids(args.n * len(tasks), args.length)
    request = Request(args.data, tasks, args.n, args.length, args.data_seed, offline=args.offline)
    about |= {"data": args.data, "tasks": list(tasks), "n": args.n, "length": args.length, "data_seed": args.data_seed}
    try:
        return prompts_of.from_source(request, renderer, spec.tiny, limit), about
    except ValueError as error:
        raise EvalError(str(error)) from error
