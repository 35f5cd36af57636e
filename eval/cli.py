"""The command line: one module per command, imported only when its name is given."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from latent_santa import __version__
from latent_santa.eval.errors import EvalError

COMMANDS = {
    "ruler": "accuracy against rows read over retrieval tasks, for dense attention and every setting",
    "helmet": "the same on HELMET, from a copy of the benchmark, or on JSON KV made offline",
    "longbench": "the same on LongBench v2, from the benchmark's own files",
    "report": "rebuild the tables and pictures of a finished or interrupted run",
    "paper": "the command that makes each table and figure of the paper, and which conditions hold in a run",
    "compare": "one prompt: answers, rows read, agreement and attention error of several settings beside dense",
    "answer": "several questions about one text: one prefill and one grouping, an answer each",
    "recommend": "the settings that read fewest rows and keep a share of dense decoding, on your own prompts",
    "check": "self-check of a model: what is patched, K = M equals dense, unpatching restores",
    "convert-to-mla": "write a Qwen2 checkpoint as DeepSeek-V2 (MLA) of the same function, to test MLA on real weights",
    "diagnose": "attention on real queries: error against rows read of every setting, and the paper's diagnostics",
    "bench": "time and memory: decode (whole model), operator (one layer), profile (its kernels), vllm, capture",
}


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser with the options of ``command``, or of none when it is not known."""
    parser = argparse.ArgumentParser(
        prog="latent-santa",
        description="SANTA++ sampled attention for MLA and GQA models of transformers.",
    )
    parser.add_argument("--version", action="version", version=f"latent-santa {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, about in COMMANDS.items():
        if name == command:
            importlib.import_module(f"latent_santa.eval.commands.{name.replace('-', '_')}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=about)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0 when everything went well, 1 for a failed run or check, 2 for wrong options.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((argument for argument in arguments if argument in COMMANDS), None)
    parser = build_parser(command)
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 2
    try:
        return int(args.run(args))
    except EvalError as error:
        told, code = str(error), 2
    except KeyboardInterrupt as stop:
        told, code = f"interrupted; {stop}" if str(stop) else "interrupted; nothing was written", 130
    except OSError as error:  # a full disk, a folder that may not be written to
        if error.filename is None:
            raise
        told, code = f"{error.filename}: {error.strerror}; files that were there before are as they were", 2
    print(f"latent-santa {args.command}: {told}", file=sys.stderr)
    return code
