"""What the commands that make a run have in common: which prompts, the run's folder, and the way from options to it."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from latent_santa.eval.commands.options import at_least, path

FIRST_LOOK = "about two minutes of one CPU core"  # as measured with the tiny model's defaults


def add_choice_options(group: Any, number: str, more: tuple[str, ...] = ()) -> None:
    """Add how prompts are chosen to the group of prompt options. number: what --n is; more: further ways to select."""
    add = group.add_argument
    # Launchers read ahead and take --n for an abbreviation of an option of their own.
    add("--n", "--prompts", type=int, help=f"{number}; write --prompts after a launcher")
    add("--select", default="sample", choices=("sample", "first", *more), help="which records of official data")
    add("--data-seed", type=int, default=42, help="seed of prompts and of their selection")
    add("--context-limit", type=int, help="positions the model takes, if its configuration says less than it can do")


def add_run_options(parser: argparse.ArgumentParser, command: str) -> Any:
    """Add the run's folder and how it runs; returns the group, for a command's own options."""
    group = parser.add_argument_group("run")
    add = group.add_argument
    add("--out", type=path, metavar="DIR", help=f"directory of the run (default: out/{command}-MODEL-TIME)")
    add("--resume", action="store_true", help="continue the run in --out, if there is one")
    add(
        "--dry-run",
        action="store_true",
        help="build the prompts and show their lengths and the work; builtin:tiny is timed, no other model is loaded",
    )
    add("--batch-size", type=int, default=1, help="prompts of one task generated together: faster on a GPU")
    add(
        "--tensor-parallel",
        action="store_true",
        help="the launcher's processes hold one model together, each some of its heads, instead of a model each",
    )
    add("--plot", action=argparse.BooleanOptionalAction, default=True, help="draw access_accuracy.png")
    return group


def evaluate(args: argparse.Namespace, quick: list[str] | None = None) -> int:
    """Run or resume an evaluation; 0 when every prompt has a result, 1 when some failed or a run is invalid.

    quick  options that were filled in for a first look, for the greeting
    """
    at_least(args, length=1, n=1, batch_size=1, context_limit=1, data_seed=0)
    if args.offline:
        # Read by the hub's libraries when they are imported.
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    from latent_santa.eval.commands.evaluate import prepare

    evaluation = prepare(args)
    if args.dry_run:
        from latent_santa.eval.commands.dry_run import dry_run

        return dry_run(evaluation)
    stem = args.model.rstrip("/").rpartition("/")[2].replace(":", "-")
    new = Path("out") / f"{args.command}-{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return evaluation.run(args.out or new, args.resume, quick)
