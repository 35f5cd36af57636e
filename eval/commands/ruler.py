"""`latent-santa ruler`: accuracy against rows read, on official or builtin prompts."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from latent_santa.eval.commands.options import Help, add_method_options, add_model_options, add_prompt_options, word
from latent_santa.eval.commands.run_options import FIRST_LOOK, add_choice_options, add_run_options, evaluate
from latent_santa.eval.errors import EvalError
from latent_santa.eval.run.models import TINY
from latent_santa.eval.sources.tasks import BUILTIN, TINY_HARD
from latent_santa.eval.sources.tasks import TINY as TINY_TASKS

# What the options mean when they are not given. The tiny model's are a first look.
DEFAULTS: dict[str, Any] = {
    "length": 8192,
    "tasks": "mla3",
    "n": 50,
    "budgets": [128, 256, 512, 1024],
    "parents": ["kmeans"],
}
TINY_DEFAULTS: dict[str, Any] = {
    # the representatives are a quarter of the rows at any length; the rest of what is read shrinks with it
    "length": 4096,
    "tasks": "multivalue,fwe,facts,multikey_hard",
    "n": 6,
    "budgets": [64, 128, 256],
    "parents": ["contiguous"],  # scikit-learn's k-means would take most of a short run
}
DESCRIPTION = f"""\
Accuracy against rows read (Tables 15 to 18), over RULER's tasks or this project's analogues, for dense attention and
every requested setting of sampled attention, on the same frozen prompts. Results are kept one by one: --resume
continues a run that stopped.

Tasks of builtin and official prompts: {", ".join(BUILTIN)} (official data: qa_1, qa_2 instead of facts_1, facts_2).
Tasks of builtin:tiny: {", ".join((*TINY_TASKS, *TINY_HARD))}.
Groups: all, mla3 (niah_multivalue, fwe, qa_1); builtin:tiny also hard.

Example: latent-santa ruler --model builtin:tiny --out out/tiny (all defaults: {FIRST_LOOK})
"""


def _default(name: str) -> str:
    def shown(value: Any) -> str:
        return ",".join(map(str, value)) if isinstance(value, list) else str(value)

    return f"{shown(DEFAULTS[name])}; builtin:tiny {shown(TINY_DEFAULTS[name])}"


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "ruler",
        help="accuracy against rows read over retrieval tasks, for dense attention and every setting",
        description=DESCRIPTION,
        formatter_class=Help,
    )
    add_options(parser, _default, "ruler")
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser, shown: Callable[[str], str], command: str, model: str = "") -> None:
    """Add the options of a run over RULER's tasks, for this command and for others that make one.

    shown    the text of an option's default, by its name
    command  what a new folder is called after
    model    the default of --model; none: it must be given
    """
    add_model_options(parser, default=model or None)
    prompts = add_prompt_options(parser, None, shown("length"))
    add = prompts.add_argument
    add("--data", type=word, default="builtin", help="builtin (offline, not RULER scores), hub, or jsonl:DIR")
    add("--hub-revision", type=word, default="main", help="revision of the hub's data; its commit is recorded")
    add("--haystack", type=word, default="prose", help="filler of builtin prompts: prose, pydoc or file:PATH")
    add("--tasks", type=word, help=f"names or groups, separated by commas (default: {shown('tasks')})")
    add_choice_options(prompts, f"prompts per task (default: {shown('n')})")
    add_method_options(parser, shown("budgets"), shown("parents"))
    group = add_run_options(parser, command)
    group.add_argument(
        "--floor",
        type=float,
        default=50.0,
        metavar="PERCENT",
        help="stop if dense scores less on single needles; 0: never",
    )
    parser.set_defaults(more={})


def run(args: argparse.Namespace) -> int:
    """Run or resume an evaluation; 0 when every prompt has a result, 1 when some failed or a run is invalid."""
    return evaluate(args, fill_defaults(args))


def fill_defaults(args: argparse.Namespace) -> list[str]:
    """Give the options that depend on the model their values, and check numbers.

    Returns the options that were filled in for a first look at the tiny model. Raises EvalError for numbers that make
    no sense.
    """
    kind = args.data.partition(":")[0]
    if kind in ("helmet", "longbench"):
        raise EvalError(f"--data {args.data}: these prompts have a command of their own, latent-santa {kind}")
    tiny, filled = args.model == TINY, []
    for name, value in (TINY_DEFAULTS if tiny else DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
            filled.append(f"--{name} {','.join(map(str, value)) if isinstance(value, list) else value}")
    check_floor(args)
    return filled if tiny else []


def check_floor(args: argparse.Namespace) -> None:
    """Raises EvalError for a --floor that is no score."""
    if not 0 <= args.floor <= 100:
        raise EvalError(f"--floor must be a score from 0 to 100 percent, got {args.floor}")
