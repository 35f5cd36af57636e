"""``latent-santa bench decode``: time and memory of a whole model, patched and unpatched in one run."""

from __future__ import annotations

import argparse
import json
from typing import Any

from latent_santa.eval.commands import options
from latent_santa.eval.commands.config_file import add_config_option
from latent_santa.eval.errors import EvalError

HEADER = (
    "setting",
    "batch",
    "context",
    "prefill",
    "prepare",
    "decode step",
    "peak GiB",
    "cache bytes per token",
    "rows %",
)


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "decode",
        help="prefill, preparation, decode step, peak memory and bytes per token of a whole model",
        description=(
            "Time a whole model with random weights, unpatched and patched in the same run and on the same tokens. "
            "Times are medians; the prefill is dense in every case and is timed without preparation."
        ),
        formatter_class=options.Help,
    )
    add, numbers, words = parser.add_argument, options.values(options.positive, "1,8"), options.values(str, "a,b")
    add("--shape", default="deepseek-v2-lite", choices=("deepseek-v2-lite", "small"), help="sizes")
    add("--layers", type=int, help="use this many layers instead of the shape's own")
    add("--batch", type=numbers, default="1,8", help="sequences, several separated by commas")
    add("--context", type=numbers, default="8192,32768", help="cached tokens per sequence, several separated by commas")
    add("--budget", type=int, default=128, help="S, nominal budget; K = S / (P / R) teams per head")
    add("--parents", type=words, default="contiguous,kmeans", help="of kmeans (Algorithm 3), contiguous (Algorithm 4)")
    add("--estimators", type=words, default="per_head", help="of per_head, pooled")
    add("--backends", type=words, default="torch", help="of torch, triton")
    add("--steps", type=int, default=20, help="timed decoding steps")
    add("--repeats", type=int, default=3, help="timed prefills and preparations")
    add(
        "--fill",
        default="prefill",
        choices=("prefill", "rows"),
        help="rows: cached rows drawn from those of a short prefill, for contexts whose prefill takes minutes",
    )
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--device", type=options.word, default="auto", help="cpu, cuda, ...; auto: a GPU if there is one")
    add("--out", type=options.path, metavar="DIR", help="write decode.json and decode.md there")
    add_config_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print a line per setting, and write the table after each; sizes are checked before a model is made."""
    import torch

    from latent_santa.eval.bench.decode import measure, random_model, shape_config
    from latent_santa.eval.bench.facts import facts
    from latent_santa.eval.report.tables import output_console
    from latent_santa.eval.run.models import ModelSpec, check_device
    from latent_santa.eval.run.store import check_writable

    options.at_least(args, steps=1, repeats=1, layers=1)
    check_device(args.device)
    device = ModelSpec(args.shape, device=args.device).resolved_device()
    jobs = _settings(args, device)
    dtype = getattr(torch, args.dtype)
    config = shape_config(args.shape, args.layers, dtype)
    if args.out:
        check_writable(args.out)
    _check_sizes(args, config, device)
    kept = {name: getattr(args, name) for name in ("shape", "layers", "budget", "steps", "repeats", "fill", "dtype")}
    found = facts(device, weights="random", **kept)
    console = output_console()
    console.print(f"{args.shape}, random weights, {args.dtype}, {found['device']}, torch {found['torch']}")
    model = random_model(config, dtype, device)
    results: list[dict[str, Any]] = []
    for batch in args.batch:
        for context in args.context:
            for timing in measure(model, batch, context, args.steps, args.repeats, jobs, args.fill):
                results.append({"batch": batch, "context": context, **timing.as_dict()})
                console.print(_line(results[-1]), markup=False, highlight=False)
                if args.out:
                    args.out.mkdir(parents=True, exist_ok=True)
                    (args.out / "decode.json").write_text(json.dumps({"facts": found, "results": results}, indent=1))
                    (args.out / "decode.md").write_text(_markdown(found, results))
    return 0


def _settings(args: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """Every combination of parents, estimator and backend, checked."""
    import torch

    from latent_santa.eval.run.conditions import checked_config
    from latent_santa.kernels.support import unsupported_dtype

    settings = [
        {"parents": parents, "estimator": estimator, "backend": backend, "budget": args.budget}
        for parents in args.parents
        for estimator in args.estimators
        for backend in args.backends
    ]
    for setting in settings:
        checked_config(device, **setting)
    reason = unsupported_dtype(getattr(torch, args.dtype))
    if reason and "triton" in args.backends:
        raise EvalError(f"--backends triton --dtype {args.dtype}: {reason}")
    return settings


def _check_sizes(args: argparse.Namespace, config: Any, device: str) -> None:
    """See that positions, and weights with the largest cache, are there."""
    from latent_santa.eval.bench.decode import UNTIMED, weight_bytes
    from latent_santa.eval.run import sizes

    batch, longest = max(args.batch), max(args.context) + args.steps + UNTIMED
    asked = f"--context {max(args.context)} and --steps {args.steps}"
    sizes.check_positions(config.max_position_embeddings, longest, asked, args.shape)
    cache = sizes.cache_bytes(config, batch * longest, args.dtype)
    assert cache is not None, "the shapes say what a row is"
    taker = f"--shape {args.shape}, --batch {batch} and --context {max(args.context)}: weights and cached rows take"
    sizes.check_memory(weight_bytes(config) + cache, device, taker)


def _line(row: dict[str, Any]) -> str:
    peak = "-" if row["decode_peak"] is None else f"{row['decode_peak'] / 2**30:.2f} GiB"
    prefill = "-" if row["prefill_ms"] is None else f"{row['prefill_ms']:.1f} ms"
    return (
        f"b{row['batch']} {row['context']} tokens, {row['name']}: prefill {prefill}, prepare {row['prepare_ms']:.1f} "
        f"ms, step {row['step_ms']:.2f} ms, peak {peak}, {row['bytes_per_token']:.0f} bytes per token, rows "
        f"{row['percent']:.1f} %"
    )


def _markdown(facts: dict[str, Any], results: list[dict[str, Any]]) -> str:
    from latent_santa.eval.report.tables import markdown_table

    lines = []
    for row in results:
        peak = "-" if row["decode_peak"] is None else f"{row['decode_peak'] / 2**30:.2f}"
        prefill = "-" if row["prefill_ms"] is None else f"{row['prefill_ms']:.1f}"
        figures = (row["prepare_ms"], row["step_ms"])
        lines.append(
            [row["name"], str(row["batch"]), str(row["context"]), prefill, *(f"{figure:.1f}" for figure in figures),
             peak, f"{row['bytes_per_token']:.0f}", f"{row['percent']:.1f}"]
        )  # fmt: skip
    told = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    return (
        f"# Whole-model decode\n\n{told}. Medians in milliseconds; rows are Equation 14's percent of dense, logical "
        f"access and not time.\n\n{markdown_table(HEADER, lines)}"
    )
