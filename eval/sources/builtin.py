"""Builtin prompts in this project's own wording: 13 kinds of task, made offline for any tokenizer and length.

They are analogues. Their scores are never scores of the official benchmark.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator

from latent_santa.eval.errors import EvalError
from latent_santa.eval.sources.samples import Sample, make_sample

from . import counting, facts, json_kv, needles, tracing
from .fitting import Draft, TooShort, largest_fit
from .haystack import Haystack
from .tasks import BUILTIN, BUILTIN_MORE

Count = Callable[[str, str], int]
TASKS = BUILTIN | BUILTIN_MORE

_ATTEMPTS = 20


def sample_seed(seed: int, task: str, number: int, attempt: int = 0) -> str:
    """Seed text of one sample. It knows nothing of n, of other tasks or of the tokenizer."""
    return hashlib.sha256(f"latent-santa builtin 1/{seed}/{task}/{number}/{attempt}".encode()).hexdigest()


def cap(task: str, length: int) -> int:
    """Cap on new tokens: the benchmark's own, but at most an eighth of a length below 1024 tokens."""
    official = TASKS[task].max_new_tokens
    return official if length >= 1024 else min(official, max(24, length // 8))


def draft(task: str, length: int, haystack: Haystack, seed: str) -> Draft:
    """The unfitted sample of one task."""
    if task in needles.KINDS:
        return needles.draft(task, length, haystack, seed)
    if task == "vt":
        return tracing.draft(task, length, seed)
    if task == "json_kv":
        return json_kv.draft(length, seed)
    if task in ("facts_1", "facts_2"):
        return facts.draft(task, length, seed)
    return counting.common_words(task, length, seed) if task == "cwe" else counting.frequent_words(task, length, seed)


def occurrences(text: str, reference: str) -> int:
    """How often `reference` stands in `text` as whole words."""
    return len(re.findall(rf"(?<!\w){re.escape(reference)}(?!\w)", text))


def sample(task: str, number: int, length: int, count: Count, seed: int, haystack: Haystack) -> Sample:
    """Sample `number` of a task, filled up to `length` tokens with everything that is counted.

    `count(input, answer_prefix)` returns the tokens of the whole rendered prompt; the cap on new tokens is added here.
    Raises EvalError, naming the smallest possible length, if not even the empty haystack fits.
    """
    new_tokens = cap(task, length)
    for attempt in range(_ATTEMPTS):
        made = draft(task, length, haystack, sample_seed(seed, task, number, attempt))
        prefix = made.answer_prefix

        def tokens(k: int, made: Draft = made, prefix: str = prefix) -> int:
            return count(made.build(k), prefix)

        try:
            k = largest_fit(tokens, length - new_tokens, made.least, made.most)
        except TooShort as error:
            raise EvalError(
                f"--length {length} is too short for {task}: with this tokenizer its smallest prompt has "
                f"{error.needed} tokens and {new_tokens} are kept for the answer; use at least "
                f"{error.needed + new_tokens}, or leave the task out"
            ) from error
        text = made.build(k)
        # A haystack may hold an answer by accident: then the sample is drawn again from its next seed.
        if all(occurrences(text, word) == times for word, times in made.promised(k).items()):
            return make_sample(
                task,
                number,
                text,
                made.references,
                answer_prefix=prefix,
                metric=TASKS[task].metric,
                max_new_tokens=new_tokens,
                source="builtin",
            )
    raise EvalError(
        f"{task}/{number:06d}: the haystack {haystack.name!r} holds the answers of {_ATTEMPTS} draws in a row"
    )


def samples(
    task: str, n: int, length: int, count: Count, seed: int, haystack: Haystack, start: int = 0
) -> Iterator[Sample]:
    """n samples of a task, from number `start` on."""
    return (sample(task, number, length, count, seed, haystack) for number in range(start, start + n))
