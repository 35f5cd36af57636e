"""`latent-santa ruler`: accuracy against rows read, on official or builtin prompts."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from latent_santa.eval.commands.options import at_least
from latent_santa.eval.errors import EvalError

# What the options mean when they are not given. The tiny model's are a first look of about three minutes on two cores.
DEFAULTS: dict[str, Any] = {
    "length": 8192,
    "tasks": "mla3",
    "n": 50,
    "budgets": [128, 256, 512, 1024],
    "parents": ["kmeans"],
}
TINY_DEFAULTS: dict[str, Any] = {
    "length": 2048,
    "tasks": "multivalue,fwe,facts,multikey_hard",
    "n": 4,
    "budgets": [8, 32, 128],
    "parents": ["contiguous"],  # scikit-learn's k-means would take most of a short run
}


def _list(kind: Callable[[str], Any], example: str) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        try:
            found = [kind(part.strip()) for part in text.split(",") if part.strip()]
        except ValueError:
            found = []
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r}: give values separated by commas, such as {example}")
        return found

    return parse


def _team(text: str) -> tuple[int, int]:
    size, _, representatives = text.partition("/")
    return int(size), int(representatives)


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "ruler",
        help="accuracy against rows read over retrieval tasks, for dense attention and every setting",
        description="Accuracy against rows read, over RULER's tasks or this project's analogues, for dense attention "
        "and every asked setting of sampled attention, on the same frozen prompts.",
    )
    add = parser.add_argument
    add(
        "--model",
        required=True,
        metavar="ID_OR_PATH",
        help="hub id, directory, or builtin:tiny (included, runs on a CPU)",
    )
    add("--revision", help="revision of the model on the hub")
    add("--data", default="builtin", help="builtin (offline, not RULER scores), hub, or jsonl:DIR (builtin)")
    add("--hub-revision", default="main", help="revision of the hub's data; its commit is recorded (default: main)")
    add("--haystack", default="prose", help="filler of builtin prompts: prose, pydoc or file:PATH (prose)")
    add("--length", type=int, help="tokens of prompt and answer together (8192; builtin:tiny 2048)")
    add("--tasks", help="all, mla3 (niah_multivalue, fwe, qa_1) or a list (mla3; builtin:tiny four of its tasks)")
    # Launchers read ahead and take --n for an abbreviation of an option of their own.
    add("--n", "--prompts", type=int, help="prompts a task (50; builtin:tiny 4); write --prompts behind a launcher")
    add("--select", default="sample", choices=("sample", "first"), help="which records of official data (sample)")
    add(
        "--methods",
        type=_list(str, "dense,santa++"),
        default=["dense", "santa++"],
        help="dense,santa,santa++,centroid (dense,santa++)",
    )
    add(
        "--budgets",
        type=_list(int, "128,256"),
        help="nominal budgets S (128,256,512,1024; builtin:tiny 8,32,128)",
    )
    add(
        "--estimators",
        type=_list(str, "per_head,pooled"),
        default=["per_head", "pooled"],
        help="per_head,pooled (both)",
    )
    add(
        "--parents",
        type=_list(str, "kmeans,contiguous"),
        help="kmeans, contiguous or both (kmeans; builtin:tiny contiguous)",
    )
    add("--parent-size", type=int, help="P (16)")
    add("--representatives", type=int, help="R (4)")
    add(
        "--teams",
        type=_list(_team, "16/4,16/1"),
        help="several P/R at once, as 16/4,16/1; instead of the two options above",
    )
    add("--centroid-sizes", type=_list(int, "16,32"), default=[16], help="B of the centroid method (16)")
    add(
        "--noise",
        default="independent",
        choices=("independent", "shared"),
        help="Gumbel noise for every head, or one draw shared by the heads that share rows (independent)",
    )
    add(
        "--routing-dtype",
        default="model",
        choices=("model", "int8", "int4"),
        help="how the frozen routing keys are kept (model: as in the cache)",
    )
    add(
        "--backend",
        default="auto",
        choices=("auto", "torch", "triton"),
        help="operators of the sampled attention (auto: Triton for rows on a GPU, else PyTorch)",
    )
    add(
        "--kmeans-engine",
        default="auto",
        choices=("auto", "sklearn", "torch"),
        help="k-means of the parents (auto: PyTorch for rows on a GPU, else scikit-learn)",
    )
    add(
        "--answer-prefix",
        default="assistant",
        choices=("assistant", "user", "none"),
        help="whose turn the beginning of the answer stands in (assistant)",
    )
    add(
        "--chat-template",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use the tokenizer's, if it has one (yes)",
    )
    add("--context-limit", type=int, help="positions the model takes, if its configuration says less than it can do")
    add("--seed", type=int, default=0, help="base seed of the sampling noise (0)")
    add("--kmeans-seed", type=int, default=0, help="seed of k-means (0)")
    add("--data-seed", type=int, default=42, help="seed of prompts and of their selection (42)")
    add(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="weights and cache (auto: float32 on a CPU, bfloat16 on a GPU)",
    )
    add(
        "--quant",
        default="none",
        choices=("none", "int8"),
        help="int8: LLM.int8 weights, except kv_b_proj and lm_head (none)",
    )
    add("--device", default="auto", help="cpu, cuda, cuda:1, ... (auto)")
    add("--device-map", help="auto: one model over several GPUs")
    add(
        "--batch-size",
        type=int,
        default=1,
        help="prompts of one task generated together (1): faster on a GPU, and more memory",
    )
    add(
        "--keep-prefills",
        type=float,
        metavar="GIB",
        help="memory for what the model computed of the prompts, which is the same for all settings: what fits is "
        "computed once (a quarter of the GPU's free memory, on a CPU 2; 0: compute it for every setting)",
    )
    add("--out", type=Path, help="directory of the run (out/ruler-MODEL-TIME)")
    add("--resume", action="store_true", help="go on with the run in --out, if there is one")
    add("--dry-run", action="store_true", help="build the prompts and show their lengths; only the tokenizer is loaded")
    add("--offline", action="store_true", help="never use the network")
    add("--plot", action=argparse.BooleanOptionalAction, default=True, help="draw access_accuracy.png (yes)")
    add("--floor", type=float, default=50.0, help="stop if dense scores less on single needles (50; 0: never)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run or resume an evaluation; 0 when every prompt has a result, 1 when some failed or a run is invalid."""
    if args.offline:
        # Read by the hub's libraries when they are imported.
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    from latent_santa.eval.commands.evaluate import Evaluation, dry_run

    evaluation = Evaluation.prepare(fill_defaults(args))
    return dry_run(evaluation) if args.dry_run else evaluation.run()


def fill_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """Options that depend on the model, and lists as lists. Raises EvalError for numbers that make no sense."""
    filled = argparse.Namespace(**vars(args))
    quick = []
    for name, value in (TINY_DEFAULTS if args.model == "builtin:tiny" else DEFAULTS).items():
        if getattr(filled, name) is None:
            setattr(filled, name, value)
            shown = ",".join(map(str, value)) if isinstance(value, list) else value
            quick.append(f"--{name} {shown}")
    filled.quick = quick if args.model == "builtin:tiny" else []
    if filled.teams and (filled.parent_size, filled.representatives) != (None, None):
        raise EvalError("--teams replaces --parent-size and --representatives: give one or the other")
    at_least(filled, parent_size=1, representatives=1, length=1, n=1, batch_size=1, context_limit=1, data_seed=0)
    filled.teams = filled.teams or [(filled.parent_size or 16, filled.representatives or 4)]
    if not 0 <= filled.floor <= 100:
        raise EvalError(f"--floor must be a score from 0 to 100 percent, got {filled.floor}")
    if filled.keep_prefills is not None and not 0 <= filled.keep_prefills < float("inf"):
        raise EvalError(f"--keep-prefills must be a number of GiB, 0 for none, got {filled.keep_prefills}")
    if filled.out is None:
        stem = filled.model.rstrip("/").rpartition("/")[2].replace(":", "-")
        filled.out = Path("out") / f"ruler-{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return filled
