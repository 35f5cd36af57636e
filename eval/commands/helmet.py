"""`latent-santa helmet`: accuracy against rows read on the paper's 13 tasks of HELMET, or on JSON KV made offline."""

from __future__ import annotations

import argparse
from typing import Any

from latent_santa.eval.commands.options import (
    Help,
    add_method_options,
    add_model_options,
    add_prompt_options,
    at_least,
    word,
)
from latent_santa.eval.commands.run_options import add_choice_options, add_run_options, evaluate
from latent_santa.eval.errors import EvalError
from latent_santa.eval.sources.tasks import BUILTIN_MORE, HELMET

LLAMA = "meta-llama/Llama-2-7b-hf"
DESCRIPTION = f"""\
Accuracy against rows read (Tables 2, 8, 9 and 10) on 13 tasks of HELMET, dense attention and every requested setting of
sampled attention on the same frozen prompts, in a run's folder as `ruler` makes it. Scores are HELMET's own metrics;
the mean weights tasks equally, and so does the mean of rows read, as in the paper (Appendix C.2).

--data is the folder of a copy of github.com/princeton-nlp/HELMET: prompts are read from its data.py (which is parsed,
never run), questions from its folder data/, where its script downloads them. Put beside them what HELMET takes from
the hub, as .parquet or .jsonl with the hub's columns and label numbers: data/icl/trec/train and test,
data/icl/nlu_evaluation_data/train, data/icl/banking77/train and test, data/icl/clinc_oos/train and validation; and
data/infbench/longbook_qa_eng.jsonl and longbook_choice_eng.jsonl of InfiniteBench. A run names all that it lacks.

--select questions draws as HELMET does over documents: --n questions, each with every place of its answer.

--data builtin makes JSON KV retrieval offline, in this project's own wording.

Tasks: {", ".join(HELMET)}. Groups: all, rag (the first four), icl (TREC to CLINC150).

Example: latent-santa helmet --model Qwen/Qwen2.5-7B-Instruct --data HELMET --tasks rag --length 32768
"""


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "helmet",
        help="accuracy against rows read on HELMET, from a copy of the benchmark, or on JSON KV made offline",
        description=DESCRIPTION,
        formatter_class=Help,
    )
    add_model_options(parser)
    prompts = add_prompt_options(parser, 8192)
    add = prompts.add_argument
    add("--data", type=word, default="builtin", metavar="DIR", help="folder of a copy of HELMET, or builtin")
    add("--tasks", type=word, help="names or groups, separated by commas (default: rag; builtin: json_kv)")
    add("--shots", type=int, default=2, help="examples before the question, where HELMET shows some")
    add("--book-tokenizer", type=word, default=LLAMA, help="tokenizer that books are cut with (infbench tasks)")
    add_choice_options(prompts, "prompts per task, or as many as there are (default: 500)", ("questions",))
    add_method_options(parser, "128,256,512", "kmeans")
    add_run_options(parser, "helmet")
    # HELMET's configurations take the chat template for books only
    parser.set_defaults(run=run, n=500, budgets=[128, 256, 512], parents=["kmeans"], floor=0.0, chat_template=None)


def run(args: argparse.Namespace) -> int:
    """Run or resume; the exit code of `evaluate`. Raises EvalError."""
    at_least(args, shots=0)
    args.haystack, args.hub_revision = "prose", "main"
    chat = {None: "helmet", True: "all", False: "none"}[args.chat_template]
    args.chat_template = args.chat_template is not False
    if args.data == "builtin":
        args.tasks, args.more = args.tasks or "json_kv", {}
        if args.tasks not in BUILTIN_MORE:
            raise EvalError(
                f"--tasks {args.tasks}: offline there is {', '.join(BUILTIN_MORE)} only; give the folder of a copy of "
                "HELMET as --data"
            )
    else:
        args.tasks, args.data = args.tasks or "rag", f"helmet:{args.data}"
        args.more = {"shots": args.shots, "book_tokenizer": args.book_tokenizer, "chat": chat}
    return evaluate(args)
