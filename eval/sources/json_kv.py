"""Retrieval of one value from a long JSON object of random keys (the task that loses most in the paper's Table 10).

HELMET's form, UUID keys and values with two examples before the question, in this project's own wording.
"""

from __future__ import annotations

import json
import random

from . import words
from .fitting import Draft

DEPTHS = 6  # places of the asked pair, evenly spaced from the first to the last, as in HELMET's files
EXAMPLES = 2


def draft(length: int, seed: str) -> Draft:
    """One JSON object with the asked pair at a random one of six depths. Units are its other pairs.

    Below 1024 tokens there is no example, and the first block of a UUID has to do.
    """
    rng = random.Random(seed)
    size, examples = (36, EXAMPLES) if length >= 1024 else (8, 0)
    key, value = (words.uuid_text(rng)[:size] for _ in range(2))
    depth = rng.randrange(DEPTHS) / (DEPTHS - 1)
    others: list[tuple[str, str]] = []
    more = random.Random(f"{seed}/others")

    def build(k: int) -> str:
        while len(others) < k:
            others.append((words.uuid_text(more)[:size], words.uuid_text(more)[:size]))
        place = round(depth * k)
        pairs = dict([*others[:place], (key, value), *others[place:k]])
        shown = random.Random(f"{seed}/examples").sample(others[:k], examples)
        lines = "".join(f"The value of {name} is {text}.\n" for name, text in shown)
        return (
            "The JSON object below maps keys to values. Look up the value of one key.\n"
            f"{json.dumps(pairs)}\n{lines}What is the value of {key}?"
        )

    def promised(k: int) -> dict[str, int]:
        return {value: 1}

    return Draft(build, promised, (value,), f" The value of {key} is", least=examples)
