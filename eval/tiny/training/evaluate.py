"""Dense scores of the embedded model through transformers, on fresh prompts.

    python -m latent_santa.eval.tiny.training.evaluate --lengths 1024,2048 -n 50

An answer that is the argmax at every token given the tokens before it is what greedy decoding would write; only the
other prompts are decoded. With --control the answers are taken out of the prompts first, so that any score comes
from elsewhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from latent_santa.eval.run.scoring import score

from ..encoder import ASSISTANT, BOS, EOS, USER, PieceEncoder
from ..load import load_tiny
from ..sentences import number as random_number
from ..source import prompt
from ..tasks import HARD_TASKS, TASKS

FRESH_SEED = 20261130


class Prompt(NamedTuple):
    """Token ids of a prompt and of its right answer with the end mark, the references, the answer room."""

    ids: list[int]
    answer: list[int]
    references: list[str]
    room: int


def without_answers(pieces: Sequence[str], references: Sequence[str]) -> list[str]:
    """The context with every answer taken out: numbers become other numbers, words go."""
    rng, out = Random(0), []
    for piece in pieces:
        text = piece.strip()
        if text not in references:
            out.append(piece)
        elif text.isdigit():
            out.append(" " + random_number(rng, len(text)))
    return out


def prompts(
    task: str, n: int, length: int, encoder: PieceEncoder, seed: int, control: bool = False, **options: Any
) -> list[Prompt]:
    """`n` prompts of one task as token ids; with `control` their contexts do not hold the answers."""
    out = []
    for number in range(n):
        pieces, asked, room = prompt(task, number, length, encoder, seed, **options)
        context = without_answers(pieces, asked.references) if control else pieces
        ids = [BOS, USER, *encoder.ids(context), *encoder.ids(asked.question), ASSISTANT, *encoder.ids(asked.prefix)]
        out.append(Prompt(ids, [*encoder.ids(asked.answer), EOS], asked.references, room))
    return out


@torch.inference_mode()
def answers_exactly(model: Any, item: Prompt) -> bool:
    """Whether greedy decoding writes exactly the right answer."""
    ids = torch.tensor([item.ids + item.answer[:-1]], device=model.device)
    guess = model(input_ids=ids, logits_to_keep=len(item.answer), use_cache=False).logits[0].argmax(-1)
    return bool(guess.tolist() == item.answer)


@torch.inference_mode()
def greedy(model: Any, item: Prompt) -> list[int]:
    """The generated token ids, at most the prompt's answer room."""
    ids = torch.tensor([item.ids], device=model.device)
    made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=item.room)
    tokens: list[int] = made[0, len(item.ids) :].tolist()
    return tokens


def scores(model: Any, tokenizer: Any, items: Sequence[Prompt]) -> list[float]:
    """Share of the references found (0 to 1), for each prompt."""
    out = []
    for item in items:
        if answers_exactly(model, item):
            out.append(1.0)
        else:
            out.append(score(tokenizer.decode(greedy(model, item), skip_special_tokens=True), item.references, "all"))
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and, with --json, write it."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--tasks", default=",".join(TASKS + HARD_TASKS), help="comma-separated (default: all)")
    parser.add_argument("--lengths", default="1024,2048,4096", help="limits in tokens, comma-separated")
    parser.add_argument("-n", type=int, default=50, help="prompts per task and length (default 50)")
    parser.add_argument("--seed", type=int, default=FRESH_SEED, help="seed of the prompts")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--control", action="store_true", help="take the answers out of the prompts")
    parser.add_argument("--options", default="{}", help='task options as JSON, e.g. {"gap": 1, "haystack": "topics"}')
    parser.add_argument("--json", type=Path, help="write the scores here")
    args = parser.parse_args(argv)
    model, tokenizer = load_tiny(args.dtype, args.device)
    encoder = PieceEncoder(tokenizer.backend_tokenizer)
    options = json.loads(args.options) | ({"control": True} if args.control else {})
    table = []
    for length in map(int, args.lengths.split(",")):
        for task in args.tasks.split(","):
            found = scores(model, tokenizer, prompts(task, args.n, length, encoder, args.seed, **options))
            mean, right = 100 * sum(found) / args.n, 100 * sum(value == 1 for value in found) / args.n
            table.append({"task": task, "length": length, "n": args.n, "score": mean, "all": right})
            print(f"{task:16} {length:5} n={args.n} score {mean:6.2f} all {right:6.2f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(table, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
