"""``latent-santa bench decode``: whole decoding steps of a model, unpatched, dense and sampled, in one paired run."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latent_santa.eval.bench.settings import BASES, PATCHED, SAMPLED, Setting, setting
from latent_santa.eval.commands import options
from latent_santa.eval.commands.config_file import read
from latent_santa.eval.errors import EvalError

if TYPE_CHECKING:
    from latent_santa.eval.bench.decode import Plan

SETTINGS = "transformers,dense,absorbed_dense,per_head,pooled"
SHAPES = ("deepseek-v2-lite", "qwen2.5-7b", "deepseek-v2-236b-layer", "small")
# what a resumed run must have in common with the one before
SAME = ("device", "torch", "triton", "transformers", "fa3", "shape", "layers", "dtype", "settings", "budget", "parents",
        "parents_per_head", "config", "fill")  # fmt: skip


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    additions = ", ".join("+" + name for name in (*SAMPLED, *PATCHED))
    parser = subparsers.add_parser(
        "decode",
        help="milliseconds per token of a whole model: transformers, dense attention and sampling in one run",
        description=(
            "Time whole decoding steps of a model with random weights. All settings take turns on the same cached "
            "rows, each through generate and as a bare hand-made step, so that ratios are paired.\n\n"
            f"A setting is one of {', '.join(BASES)}, with additions: {additions}. transformers is the model without a "
            "patch; dense its own attention and absorbed_dense the fastest exact attention straight from the cache "
            "(FlashAttention-3 and FlashMLA take part where they import), both through the patch, so dense is "
            "transformers in a graph; per_head and pooled are SANTA++'s estimators. On a CUDA device every patched "
            "setting replays its step as a CUDA graph, unless +eager."
        ),
        formatter_class=options.Help,
    )
    add, numbers = parser.add_argument, options.values(options.positive, "1,8")
    add("--shape", default=SHAPES[0], choices=SHAPES, help="sizes; of deepseek-v2-236b-layer as many layers as fit")
    add("--layers", type=int, help="use this many layers instead of the shape's own")
    add("--batch", type=numbers, default="1,8", help="sequences, several separated by commas")
    add("--context", type=numbers, default="32768,131072", help="cached tokens per sequence, separated by commas")
    add(
        "--settings",
        type=options.values(str, "per_head,pooled"),
        help=f"what to compare (default: {SETTINGS}; with --table what its runs have)",
    )
    add("--budget", type=int, default=128, help="S, nominal budget; K = S / (P / R) teams per head")
    add("--parents", default="contiguous", choices=("contiguous", "kmeans"), help="of settings without +kmeans")
    add("--parents-per-head", type=int, default=64, metavar="K1", help="parents per head that +two_stage samples")
    add("--steps", type=int, default=16, help="timed steps of a turn; slow steps take fewer, at least 4")
    add("--repeats", type=int, default=3, help="rounds in which every setting has a turn; and timed prefills")
    add("--minutes", type=float, help="begin no round after this long; every setting has one in any case")
    add(
        "--fill",
        default="rows",
        choices=("rows", "prefill"),
        help="rows: cached rows drawn from those of a short prefill; prefill: those of a whole one, which is timed",
    )
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--device", type=options.word, default="auto", help="cpu, cuda, ...; auto: a GPU if there is one")
    add("--out", type=options.path, metavar="DIR", help="write decode.json, decode.md and decode.png there")
    add("--resume", action="store_true", help="continue the run in --out")
    add(
        "--table",
        type=options.path,
        nargs="+",
        metavar="DIR",
        help="measure nothing: print README.md's table of earlier runs, with the columns of --settings or all",
    )
    add(
        "--config",
        type=read,
        metavar="FILE",
        help="measure the settings that SantaConfig.save wrote too, as the setting config, which takes "
        f"{' and '.join('+' + name for name in PATCHED)}",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything, make the model once, and measure point by point; files are written after every turn."""
    if args.table:
        return _table(args)
    args.settings = args.settings or SETTINGS.split(",")
    import torch

    from latent_santa.eval.bench import decode_report
    from latent_santa.eval.bench.decode import Plan
    from latent_santa.eval.bench.facts import facts
    from latent_santa.eval.bench.shapes import random_model
    from latent_santa.eval.report.tables import output_console
    from latent_santa.eval.run.environment import environment
    from latent_santa.eval.run.models import ModelSpec, check_device
    from latent_santa.eval.run.store import check_writable

    options.at_least(args, steps=4, repeats=1, layers=1)
    check_device(args.device)
    device = ModelSpec(args.shape, device=args.device).resolved_device()
    settings = _settings(args, device)
    if args.resume and not args.out:
        raise EvalError("--resume continues the run in --out: give --out DIR")
    if args.out:
        check_writable(args.out)
    plan = Plan(args.steps, args.repeats)
    config, places, left_out = _fitting(args, device, plan)
    found = facts(device, weights="random", shape=args.shape, layers=config.num_hidden_layers, dtype=args.dtype,
                  settings=",".join(args.settings), budget=args.budget, parents=args.parents,
                  parents_per_head=args.parents_per_head, config=args.config.used() if args.config else None,
                  fill=args.fill, steps=args.steps, fa3=environment().get("fa3-fwd"))  # fmt: skip
    points = _earlier(args, found)
    console = output_console()
    console.print(f"{args.shape}, {config.num_hidden_layers} layers, random weights, {args.dtype}, {found['device']}")
    for line in left_out:
        console.print(f"left out: {line}", markup=False)
    guess = sum(_guessed_seconds(config, args, batch, context) for batch, context in places)
    console.print(f"about {guess / 60:.0f} minutes by what one H200 takes; after each first round its own pace is told")
    begun = time.perf_counter()
    model = random_model(config, getattr(torch, args.dtype), device)
    for number, (batch, context) in enumerate(places):
        share = None
        if args.minutes is not None:
            share = max(0.0, 60 * args.minutes - (time.perf_counter() - begun)) / (len(places) - number)
        point = points.setdefault((batch, context), {"batch": batch, "context": context, "results": {}})
        for _ in _measured(model, point, settings, Plan(args.steps, args.repeats, share), args, console):
            if args.out:
                _write(args.out, found, list(points.values()))
        console.print(decode_report.screen_table(point))
    console.print(decode_report.READING)
    for line in decode_report.missing(list(points.values())):
        console.print(f"left out: {line}", markup=False)
    return 0


def _measured(model: Any, point: dict[str, Any], settings: list[Setting], plan: Plan, args: Any, console: Any) -> Any:
    """Turns of one point; yields after each."""
    import torch

    from latent_santa.eval.bench.decode import Point
    from latent_santa.eval.bench.filled import collect, filled_by_drawing, filled_by_prefill

    batch, context, results = point["batch"], point["context"], point["results"]
    if all(results.get(s.name, {}).get("missing") or _rounds(results, s) >= plan.rounds for s in settings):
        return
    device = model.get_input_embeddings().weight.device
    collect(device)
    if args.fill == "rows":
        filled = filled_by_drawing(model, batch, context, plan.free)
    else:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(model.config.vocab_size, (batch, context), generator=generator).to(device)
        filled, point["prefill_ms"] = filled_by_prefill(model, ids, plan.free, plan.rounds)
    point["row_bytes"] = filled.row_bytes
    begun, turns = time.perf_counter(), 0
    for name in Point(model, filled, batch, context, settings, plan, results).measure():
        turns += 1
        took = time.perf_counter() - begun
        console.print(_turn_line(point, name), markup=False, highlight=False)
        if turns == len(settings):
            console.print(f"a round took {took:.0f} s; {plan.rounds} take about {took * plan.rounds:.0f}", markup=False)
        yield name


def _rounds(results: dict[str, Any], setting: Setting) -> int:
    return len(results.get(setting.name, {}).get("generate_ms", ()))


def _turn_line(point: dict[str, Any], name: str) -> str:
    from latent_santa.eval.bench.decode_report import heading

    result = point["results"][name]
    reason = result.get("missing") or result.get("dropped")
    if reason:
        return f"{heading(point)}, {name}: {reason}"
    return f"{heading(point)}, {name}: generate {result['generate_ms'][-1]:.2f} ms, step {result['bare_ms'][-1]:.2f} ms"


def _settings(args: argparse.Namespace, device: str) -> list[Setting]:
    """The settings that are asked for, checked."""
    import torch

    from latent_santa.eval.run.conditions import checked_config
    from latent_santa.kernels.support import unsupported_dtype

    shared = {"budget": args.budget, "parents": args.parents, "parents_per_head": args.parents_per_head}
    file = args.config.to_dict() if args.config else None
    if file and not any(word.partition("+")[0] == "config" for word in args.settings):
        args.settings.append("config")
    try:
        settings = [setting(word, shared, file) for word in args.settings]
    except ValueError as error:
        raise EvalError(f"--settings: {error}") from error
    if len({s.name for s in settings}) < len(settings):
        raise EvalError("--settings: one is given twice")
    for one in settings:
        if one.overrides is not None:
            checked_config(device, **one.overrides)
    reason = unsupported_dtype(getattr(torch, args.dtype))
    if reason and any("+triton" in s.name for s in settings):
        raise EvalError(f"--settings with +triton, --dtype {args.dtype}: {reason}")
    return settings


def _fitting(args: argparse.Namespace, device: str, plan: Plan) -> tuple[Any, list[tuple[int, int]], list[str]]:
    """The configuration, the batches and contexts that fit, and a line for each that does not.

    Raises EvalError where positions are too few, or nothing fits.
    """
    import torch

    from latent_santa.eval.bench.shapes import IN_PART, fitting_layers, shape_config, weight_bytes
    from latent_santa.eval.run import sizes

    dtype = getattr(torch, args.dtype)
    config = shape_config(args.shape, args.layers, dtype)
    asked = f"--context {max(args.context)} and --steps {args.steps}"
    sizes.check_positions(config.max_position_embeddings, max(args.context) + plan.free, asked, args.shape)
    free = sizes.free_bytes(device)
    if args.shape in IN_PART and not args.layers and free is not None:
        row = _cache_bytes(config, 1, args.dtype) // config.num_hidden_layers
        rows = max(args.batch) * max(args.context)
        # two thirds: what is left is for teams, and for the expanded rows of a layer
        config = shape_config(args.shape, fitting_layers(args.shape, dtype, row, rows, 2 * free // 3), dtype)
    weights = weight_bytes(config)
    places, left_out, first = [], [], None
    for batch in args.batch:
        for context in args.context:
            cache = _cache_bytes(config, batch * (context + plan.free), args.dtype)
            taker = f"--shape {args.shape}, --batch {batch} and --context {context}: weights and cached rows take"
            try:
                sizes.check_memory(weights + cache, device, taker)
                places.append((batch, context))
            except EvalError as error:
                first = first or error
                left_out.append(str(error))
    if first is not None and not places:
        raise first
    return config, places, left_out


def _cache_bytes(config: Any, rows: int, dtype: str) -> int:
    from latent_santa.eval.run import sizes

    size = sizes.cache_bytes(config, rows, dtype)
    assert size is not None, "the shapes say what a row is"
    return size


def _guessed_seconds(config: Any, args: argparse.Namespace, batch: int, context: int) -> float:
    """What a point takes on one H200: a floor per step, and a time per byte of cached rows."""
    gigabytes = _cache_bytes(config, batch * context, args.dtype) / 1e9
    total = 5.0 + 0.3 * gigabytes  # filling and grouping
    for name in args.settings:
        expands = name.partition("+")[0] in ("transformers", "dense")
        floor = 70.0 if name == "transformers" or "+eager" in name else 10.0
        slow = expands and hasattr(config, "kv_lora_rank")
        step = floor + (config.num_attention_heads if slow else 0.5) * gigabytes
        counted = 3 + max(4, min(args.steps, 2000 / step))
        total += 2.0 + args.repeats * (2 * counted * step / 1000 + 1.0)
    return total


def _earlier(args: argparse.Namespace, found: dict[str, Any]) -> dict[tuple[int, int], dict[str, Any]]:
    """Points of the run in --out. Raises EvalError if it is there and is not to be resumed, or is of something else."""
    path = args.out / "decode.json" if args.out else None
    if path is None or not path.exists():
        return {}
    if not args.resume:
        raise EvalError(f"{path} holds a run already: give --resume to continue it, or another --out")
    run = _read(path)
    for name in SAME:
        if run["facts"].get(name) != found.get(name):
            raise EvalError(
                f"{path} has {name} {run['facts'].get(name)}, and this run {found.get(name)}: times of both cannot be "
                "paired; give another --out"
            )
    return {(point["batch"], point["context"]): point for point in run["points"]}


def _read(path: Path) -> dict[str, Any]:
    try:
        run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not {"facts", "points"} <= run.keys():
            raise KeyError("points")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise EvalError(f"{path} holds no run of bench decode ({type(error).__name__})") from error
    return run


def _write(out: Path, found: dict[str, Any], points: list[dict[str, Any]]) -> None:
    from latent_santa.eval.bench import decode_report
    from latent_santa.eval.run.store import write_atomic

    write_atomic(out / "decode.json", json.dumps({"facts": found, "points": points}, indent=1))
    write_atomic(out / "decode.md", decode_report.markdown(found, points))
    try:
        picture = decode_report.plot(points)
    except ImportError:
        return  # the picture is an extra; its numbers are in the other files
    if picture is not None:
        write_atomic(out / "decode.png", picture)


def _table(args: argparse.Namespace) -> int:
    from latent_santa.eval.bench.decode_report import readme_table

    runs = [_read(directory / "decode.json") for directory in args.table]
    measured = dict.fromkeys(name for run in runs for point in run["points"] for name in point["results"])
    print(readme_table(runs, args.settings or list(measured)), end="")
    return 0
