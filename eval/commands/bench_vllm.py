"""``latent-santa bench vllm``: decoding steps of vLLM with and without SANTA++, in one engine."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from latent_santa.eval.commands import options
from latent_santa.eval.errors import EvalError

SETTINGS = "dense,dense:128,per_head:128,pooled:128"


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "vllm",
        help="milliseconds per decoding step of vLLM, dense and sampled, and tokens per second of a mixed load",
        description=(
            "Time vLLM's decoding steps on DeepSeek-V2-Lite's shape with random weights. Everything runs in one "
            "engine with vLLM's compilation and CUDA graphs: settings take turns on the same cached rows, each with "
            "graphs of its own. A step is the median gap between two engine steps that both brought a token for every "
            "sequence.\n\n"
            "A setting is dense (vLLM's own dense kernel), dense:SPLITS (with more splits of a row than the 32 that "
            "vLLM takes in graphs), own_dense (this project's kernel over all rows), per_head:S or pooled:S, or in two "
            "stages per_head+two_stage:S:K1 or pooled+two_stage:S:K1."
        ),
        formatter_class=options.Help,
    )
    add = parser.add_argument
    add("points", nargs="*", type=_point, default=[(1, 32768), (8, 32768), (1, 131072), (8, 131072)],
        metavar="BATCHxCONTEXT", help="what is measured; without any 1x32768 8x32768 1x131072 8x131072")  # fmt: skip
    add("--settings", type=options.values(str, "dense,per_head:128"), default=SETTINGS, help="what to compare")
    add("--tokens", type=options.positive, default=65, help="tokens per sequence and turn")
    add("--repeats", type=options.positive, default=2, help="timed turns of every setting")
    add("--block", type=options.positive, help="rows of a cache block, 16 or 64; vLLM's own choice without it")
    add("--mixed", type=options.positive, metavar="N", help="also N requests at once, of 32K to 128K tokens")
    add("--mixed-lengths", type=_point, default=(32768, 131072), metavar="SHORTESTxLONGEST", help="of the mixed load")
    add("--mixed-tokens", type=options.positive, default=192, help="tokens per request of the mixed load")
    add("--distinct", type=options.positive, default=8, help="sequences that the mixed load's prompts begin")
    add("--small", action="store_true", help="two narrow layers: shows on a CPU that the command works")
    add("--out", type=options.path, metavar="FILE", help="write every measurement there, as JSON lines")
    add("--table", type=options.path, metavar="FILE", help="measure nothing: print the table of an earlier run's --out")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start the engine once, measure point by point, and print each row as it comes."""
    from latent_santa.eval.bench.vllm import LITE, TINY, Engine, Setting, facts, mixed_load, step_times

    if args.table:
        return _table(args.table)
    try:
        settings = [Setting.parse(word) for word in args.settings]
    except ValueError as error:
        raise EvalError(f"--settings: {error}") from error
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise EvalError("bench vllm needs vLLM: pip install 'latent-santa[vllm]'") from error
    longest = max([context for _, context in args.points] + [args.mixed_lengths[1] if args.mixed else 0])
    sequences = max([batch for batch, _ in args.points] + [args.mixed or 1])
    chosen: dict[str, Any] = {"block_size": args.block} if args.block else {}
    if args.small:
        chosen |= {"enforce_eager": True, "dtype": "float32", "enable_prefix_caching": True}
    else:
        sizes = sorted({1, 2, 4, 8, sequences, *(batch for batch, _ in args.points)})
        chosen |= {
            "dtype": "bfloat16", "gpu_memory_utilization": 0.9, "max_num_batched_tokens": 16384,
            "attention_config": {"backend": "CUSTOM"}, "enable_prefix_caching": True,
            "compilation_config": {"cudagraph_capture_sizes": sizes, "cudagraph_mode": "FULL_DECODE_ONLY"},
        }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        room = max(args.tokens, args.mixed_tokens) + 63
        engine = Engine(TINY if args.small else LITE, Path(folder), longest + room, sequences, chosen,
                        next((setting.parents for setting in settings if setting.parents), None))  # fmt: skip
        _print([facts(engine, args.small)], args.out)
        rows = step_times(engine, args.points, settings, args.tokens, args.repeats)
        _print(rows, args.out)
        if args.mixed:
            lengths, tokens = args.mixed_lengths, args.mixed_tokens
            _print(mixed_load(engine, args.mixed, *lengths, args.distinct, settings, tokens), args.out)
    return 0


def _print(rows: Any, out: Path | None) -> None:
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        if out:
            with out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")


def _table(path: Path) -> int:
    from latent_santa.eval.bench.vllm_report import read, table

    try:
        print(table(read(path)), end="")
    except ValueError as error:
        raise EvalError(f"--table: {error}") from error
    return 0


def _point(word: str) -> tuple[int, int]:
    first, _, second = word.lower().partition("x")
    try:
        found = int(first), int(second)
    except ValueError:
        found = 0, 0
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{word!r}: two positive numbers are expected, such as 8x32768")
    return found
