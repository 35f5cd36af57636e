"""Samples of the embedded model's tasks for the evaluation."""

from __future__ import annotations

import hashlib
from random import Random
from typing import Any

from latent_santa.eval.sources.samples import Sample, make_sample

from .encoder import PieceEncoder
from .sentences import Question
from .tasks import answer_room, build, resolve

SOURCE = "builtin:tiny"
TEMPLATE_TOKENS = 3  # <s>, <|user|> and <|assistant|>


def sample_rng(seed: int, task: str, number: int) -> Random:
    """The generator of sample `number`: a function of its arguments alone, on every machine."""
    return Random(int.from_bytes(hashlib.sha256(f"{seed}/{task}/{number}".encode()).digest(), "big"))


def prompt(
    task: str, number: int, length: int, encoder: PieceEncoder, seed: int = 42, **options: Any
) -> tuple[list[str], Question, int]:
    """Context pieces, question and answer room (tokens) of sample `number`; arguments and errors as for `samples`."""
    base, chosen = resolve(task, options)
    room = answer_room(base, chosen)
    rng = sample_rng(seed, task, number)
    try:
        pieces, question = build(base, length - room - TEMPLATE_TOKENS, rng, encoder.cost, chosen)
    except ValueError as error:
        raise ValueError(f"{task} with a length of {length} tokens: {error}") from error
    return pieces, question, room


def samples(
    task: str, n: int, length: int, tokenizer: Any, seed: int = 42, start: int = 0, **options: Any
) -> list[Sample]:
    """`n` prompts of one task for the embedded model, from number `start` on.

    length     limit in tokens on chat template, user turn, answer prefix and answer room together; met within 2 %
    tokenizer  the embedded model's tokenizer (`load_tiny`)
    options    fields of `tasks.Options`

    Sample i depends on (seed, task, i), the length and the options, never on `n`. With the "topics" haystack it also
    depends on the interpreter's help topics. Raises ValueError for an unknown task or option, a tokenizer that is not
    the model's, or a length that the task's needles do not fit.
    """
    encoder = PieceEncoder(_backend(tokenizer))
    made = []
    for number in range(start, start + n):
        pieces, question, room = prompt(task, number, length, encoder, seed, **options)
        made.append(
            make_sample(
                task,
                number,
                "".join(pieces + question.question),
                question.references,
                answer_prefix="".join(question.prefix),
                max_new_tokens=room,
                source=SOURCE,
            )
        )
    return made


def _backend(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.token_to_id("<|assistant|>") is None:
        raise ValueError(
            f"these prompts are made for the embedded model's tokenizer, got {type(tokenizer).__name__}; "
            "load it with latent_santa.eval.tiny.load_tiny()"
        )
    return backend
