"""Dense scores of the embedded model with the training twin, on fresh prompts.

    python -m latent_santa.eval.tiny.evaluate --lengths 1024,2048 -n 50 --device cuda

An answer that is the argmax at every token given the tokens before it is what greedy decoding would write; only the
other prompts are decoded, in batches and without a cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .encoder import ASSISTANT, BOS, EOS, PAD, USER, PieceEncoder
from .load import MODEL_DIRECTORY
from .network import Network
from .scoring import share_found
from .source import prompt
from .tasks import HARD_TASKS, TASKS

FRESH_SEED = 20261130
_TOKENS_AT_ONCE = 140_000


class Prompt(NamedTuple):
    """Token ids of a prompt and of its right answer with the end mark, the references, the answer room."""

    ids: list[int]
    answer: list[int]
    references: list[str]
    room: int


def prompts(task: str, n: int, length: int, encoder: PieceEncoder, seed: int, **options: Any) -> list[Prompt]:
    """`n` prompts of one task as token ids."""
    out = []
    for number in range(n):
        pieces, asked, room = prompt(task, number, length, encoder, seed, **options)
        ids = [BOS, USER, *encoder.ids(pieces), *encoder.ids(asked.question), ASSISTANT, *encoder.ids(asked.prefix)]
        out.append(Prompt(ids, [*encoder.ids(asked.answer), EOS], asked.references, room))
    return out


def _groups(items: Sequence[Prompt]) -> Iterable[Sequence[Prompt]]:
    longest = max(len(item.ids) + item.room for item in items)
    size = max(1, _TOKENS_AT_ONCE // longest)
    for start in range(0, len(items), size):
        yield items[start : start + size]


@torch.no_grad()
def exact(network: Network, items: Sequence[Prompt]) -> list[bool]:
    """Whether greedy decoding writes exactly the right answer, for each prompt."""
    device = network.cos.device
    out: list[bool] = []
    for group in _groups(items):
        full = [torch.tensor(item.ids + item.answer) for item in group]
        ids = pad_sequence(full, batch_first=True, padding_value=PAD).to(device)
        hidden = network(ids).view(*ids.shape, -1)
        for row, item in enumerate(group):
            start, stop = len(item.ids), len(item.ids) + len(item.answer)
            guess = network.logits(hidden[row, start - 1 : stop - 1]).argmax(-1)
            out.append(bool((guess == ids[row, start:stop]).all()))
    return out


@torch.no_grad()
def decode(network: Network, items: Sequence[Prompt]) -> list[list[int]]:
    """Greedy answers (token ids before the end mark) of at most each prompt's room."""
    device = network.cos.device
    out: list[list[int]] = []
    for group in _groups(items):
        room = max(item.room for item in group)
        lengths = torch.tensor([len(item.ids) for item in group], device=device)
        ids: Tensor = pad_sequence([torch.tensor(item.ids + [PAD] * room) for item in group], batch_first=True).to(device)
        rows = torch.arange(len(group), device=device)
        ended = torch.zeros(len(group), dtype=torch.bool, device=device)
        for step in range(room):
            hidden = network(ids).view(*ids.shape, -1)[rows, lengths + step - 1]
            token = network.logits(hidden).argmax(-1)
            ids[rows, lengths + step] = torch.where(ended, PAD, token)
            ended |= token == EOS
            if bool(ended.all()):
                break
        for row, item in enumerate(group):
            new = ids[row, len(item.ids) : len(item.ids) + item.room].tolist()
            out.append(new[: new.index(EOS)] if EOS in new else [token for token in new if token != PAD])
    return out


def score(network: Network, tokenizer: Any, items: Sequence[Prompt]) -> dict[str, float]:
    """Mean score and share of wholly right answers, in per cent, and the number of prompts."""
    right = exact(network, items)
    scores = [1.0] * len(items)
    missed = [place for place, good in enumerate(right) if not good]
    if missed:
        for place, tokens in zip(missed, decode(network, [items[place] for place in missed]), strict=True):
            scores[place] = share_found(items[place].references, tokenizer.decode(tokens))
    n = len(items)
    return {"n": n, "score": 100 * sum(scores) / n, "all": 100 * sum(s == 1 for s in scores) / n}


def load_network(directory: Path, device: str = "cpu") -> tuple[Network, Any]:
    """The twin with a directory's weights, and its `tokenizers.Tokenizer`; bfloat16 activations on a GPU."""
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    network = Network()
    network.load_state_dict({name: weight.float() for name, weight in load_file(directory / "model.safetensors").items()})
    network.activations = torch.float32 if device == "cpu" else torch.bfloat16
    return network.to(device).eval(), Tokenizer.from_file(str(directory / "tokenizer.json"))


def table(
    network: Network,
    tokenizer: Any,
    tasks: Sequence[str],
    lengths: Sequence[int],
    n: int,
    seed: int = FRESH_SEED,
    seconds: float = float("inf"),
    **options: Any,
) -> list[dict[str, Any]]:
    """Scores of tasks by lengths, printed as they come; stops early once `seconds` have passed."""
    encoder = PieceEncoder(tokenizer)
    out: list[dict[str, Any]] = []
    begun = time.monotonic()
    for length in lengths:
        for task in tasks:
            if time.monotonic() - begun > seconds:
                print(f"stopped after {seconds:.0f} s, before {task} at {length}", flush=True)
                return out
            result = score(network, tokenizer, prompts(task, n, length, encoder, seed, **options))
            out.append({"task": task, "length": length} | result)
            print(f"{task:16} {length:5} n={n} score {result['score']:6.2f} all {result['all']:6.2f}", flush=True)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and, with --json, write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_DIRECTORY, help="directory with weights and tokenizer")
    parser.add_argument("--tasks", default=",".join(TASKS + HARD_TASKS), help="comma-separated (default: all)")
    parser.add_argument("--lengths", default="1024,2048,4096", help="limits in tokens, comma-separated")
    parser.add_argument("-n", type=int, default=50, help="prompts a task and length")
    parser.add_argument("--seed", type=int, default=FRESH_SEED, help="seed of the prompts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further cell after this time")
    parser.add_argument("--options", default="{}", help='task options as JSON, e.g. {"gap": 1, "haystack": "topics"}')
    parser.add_argument("--json", type=Path, help="write the scores here")
    args = parser.parse_args(argv)
    network, tokenizer = load_network(args.model, args.device)
    lengths = [int(text) for text in args.lengths.split(",")]
    options = json.loads(args.options)
    scores = table(network, tokenizer, args.tasks.split(","), lengths, args.n, args.seed, args.seconds, **options)
    if args.json:
        args.json.write_text(json.dumps(scores, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
