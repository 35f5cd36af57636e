"""`latent-santa longbench`: accuracy against rows read on LongBench v2 (Table 3), from the benchmark's own files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from latent_santa.eval.commands.options import (
    Help,
    add_method_options,
    add_model_options,
    add_prompt_options,
    at_least,
    path,
)
from latent_santa.eval.commands.run_options import add_choice_options, add_run_options, evaluate

QUESTIONS = 503
DESCRIPTION = """\
Accuracy against rows read (Table 3) on LongBench v2: multiple choice over long texts, dense attention and every
requested setting of sampled attention on the same frozen prompts, in a run's folder as `ruler` makes it. A prompt that
is too long loses its middle; shorter ones stay whole.

Download data.json from huggingface.co/datasets/THUDM/LongBench-v2 and prompts/0shot.txt from
github.com/THUDM/LongBench. Neither is part of this package.

The answer is the letter of the last "Final Answer: [X]", or without one of "The correct answer is (X)". The paper
asks for the first form in words of its Appendix C.3; put them in a file for --suffix, or take this project's own words
for the same.

Example: latent-santa longbench --model Qwen/Qwen2.5-7B-Instruct --data LongBench --methods dense,santa,santa++
"""


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "longbench",
        help="accuracy against rows read on LongBench v2, from the benchmark's own files",
        description=DESCRIPTION,
        formatter_class=Help,
    )
    add_model_options(parser)
    prompts = add_prompt_options(parser, 32768)
    add = prompts.add_argument
    add("--data", type=path, required=True, metavar="PATH", help="data.json, or the folder that holds it")
    add("--template", type=path, metavar="FILE", help="the prompt (default: prompts/0shot.txt beside the data)")
    add("--suffix", type=path, metavar="FILE", help="text behind the prompt (default: this project's own words)")
    add("--max-new-tokens", type=int, default=128, help="cap on the answer; 128 is the repository's")
    add_choice_options(prompts, f"number of questions, at most {QUESTIONS} (default: all)")
    add_method_options(parser, "128,256,512,1024", "kmeans")
    add_run_options(parser, "longbench")
    parser.set_defaults(run=run, n=QUESTIONS, budgets=[128, 256, 512, 1024], parents=["kmeans"], tasks="all", floor=0.0)


def run(args: argparse.Namespace) -> int:
    """Run or resume; the exit code of `evaluate`."""
    at_least(args, max_new_tokens=1)

    def name(file: Path | None) -> str | None:
        return str(file) if file else None

    args.data, args.haystack, args.hub_revision = f"longbench:{args.data}", "prose", "main"
    args.more = {"template": name(args.template), "suffix": name(args.suffix), "max_new_tokens": args.max_new_tokens}
    return evaluate(args)
