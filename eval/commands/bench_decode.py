"""``latent-santa bench decode``: time and memory of a whole model, patched and unpatched in one run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from latent_santa.eval.commands.options import at_least, integers


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "decode",
        help="prefill, preparation, decode step, peak memory and bytes a token of a whole model",
        description=(
            "Time a whole model with random weights, unpatched and patched in the same run and on the same tokens. "
            "Times are medians; the prefill is dense in every case and is timed without preparation."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--shape", default="deepseek-v2-lite", choices=("deepseek-v2-lite", "small"), help="sizes")
    parser.add_argument("--layers", type=int, help="use this many layers instead of the shape's own")
    parser.add_argument("--batch", default="1,8", help="sequences, several separated by commas")
    parser.add_argument("--context", default="8192,32768", help="cached tokens a sequence, several separated by commas")
    parser.add_argument("--budget", type=int, default=128, help="S, nominal budget; K = S / (P / R) teams a head")
    parser.add_argument("--parents", default="contiguous,kmeans", help="kmeans (Algorithm 3), contiguous (Algorithm 4)")
    parser.add_argument("--estimator", default="per_head", help="per_head, pooled, or both")
    parser.add_argument("--backend", default="torch", help="torch, triton, or both")
    parser.add_argument("--steps", type=int, default=20, help="timed decoding steps")
    parser.add_argument("--repeats", type=int, default=3, help="timed prefills and preparations")
    parser.add_argument(
        "--fill",
        default="prefill",
        choices=("prefill", "rows"),
        help="rows: cached rows drawn from those of a short prefill, for contexts whose prefill takes minutes",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="auto", help="cpu, cuda, ...; auto: a GPU if there is one")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write decode.json and decode.md there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, and write it after every setting."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    import torch

    from latent_santa.eval.decode_bench import SHAPES, measure, random_model
    from latent_santa.eval.run.models import check_device
    from latent_santa.eval.run.store import check_writable

    check_device(args.device)
    device = args.device if args.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    jobs = _settings(args, device)
    batches, contexts = integers("--batch", args.batch), integers("--context", args.context)
    at_least(args, steps=1, repeats=1, layers=1)
    if args.out:
        check_writable(args.out)
    if args.layers:
        SHAPES[args.shape]["num_hidden_layers"] = args.layers
    facts = _facts(args, device)
    console.print(f"{args.shape}, random weights, {args.dtype}, {facts['device']}, torch {facts['torch']}")
    model = random_model(args.shape, getattr(torch, args.dtype), device)
    results: list[dict[str, Any]] = []
    for batch in batches:
        for context in contexts:
            for timing in measure(model, batch, context, args.steps, args.repeats, jobs, args.fill):
                results.append({"batch": batch, "context": context, **timing.as_dict()})
                console.print(_line(results[-1]), markup=False, highlight=False)
                if args.out:
                    args.out.mkdir(parents=True, exist_ok=True)
                    (args.out / "decode.json").write_text(json.dumps({"facts": facts, "results": results}, indent=1))
                    (args.out / "decode.md").write_text(_markdown(facts, results))
    return 0


def _settings(args: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """Every combination of parents, estimator and backend, checked."""
    import torch

    from latent_santa.eval.errors import EvalError
    from latent_santa.eval.run.conditions import checked_config
    from latent_santa.kernels.support import unsupported_dtype

    settings = [
        {"parents": parents, "estimator": estimator, "backend": backend, "budget": args.budget}
        for parents in args.parents.split(",")
        for estimator in args.estimator.split(",")
        for backend in args.backend.split(",")
    ]
    for setting in settings:
        checked_config(device, **setting)
    reason = unsupported_dtype(getattr(torch, args.dtype))
    if reason and any(setting["backend"] == "triton" for setting in settings):
        raise EvalError(f"--backend triton --dtype {args.dtype}: {reason}")
    return settings


def _facts(args: argparse.Namespace, device: str) -> dict[str, Any]:
    import datetime
    import platform
    from importlib import metadata

    import torch
    import transformers

    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"CPU ({platform.machine()})"
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": metadata.version("triton") if "triton" in args.backend.split(",") else None,
        "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(),
        "weights": "random",
        **{
            k: v
            for k, v in vars(args).items()
            if k in ("shape", "layers", "budget", "steps", "repeats", "fill", "dtype")
        },
    }


def _line(row: dict[str, Any]) -> str:
    peak = "-" if row["decode_peak"] is None else f"{row['decode_peak'] / 2**30:.2f} GiB"
    return (
        f"b{row['batch']} {row['context']} tokens, {row['name']}: prefill {_milliseconds(row['prefill_ms'])}, prepare "
        f"{row['prepare_ms']:.1f} ms, step {row['step_ms']:.2f} ms, peak {peak}, "
        f"{row['bytes_per_token']:.0f} bytes a token, rows {row['percent']:.1f} %"
    )


def _milliseconds(time: float | None) -> str:
    return "-" if time is None else f"{time:.1f} ms"


def _markdown(facts: dict[str, Any], results: list[dict[str, Any]]) -> str:
    lines = [
        "# Whole-model decode",
        "",
        ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
        + ". Medians in milliseconds; rows are Equation 14's percent of dense, logical access and not time.",
        "",
        "| batch | context | setting | prefill | prepare | decode step | peak GiB | cache bytes a token | rows % |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in results:
        peak = "-" if row["decode_peak"] is None else f"{row['decode_peak'] / 2**30:.2f}"
        prefill = "-" if row["prefill_ms"] is None else f"{row['prefill_ms']:.1f}"
        times = f"{prefill} | {row['prepare_ms']:.1f} | {row['step_ms']:.1f}"
        lines.append(
            f"| {row['batch']} | {row['context']} | {row['name']} | {times} | {peak} | {row['bytes_per_token']:.0f} | "
            f"{row['percent']:.1f} |"
        )
    return "\n".join(lines) + "\n"
