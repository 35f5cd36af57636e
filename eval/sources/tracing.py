"""Builtin variable tracing: a number is put into a box and copied from box to box through a noisy text."""

from __future__ import annotations

import random
from itertools import islice

from . import words
from .fitting import Draft
from .haystack import NOISE, noise


def _chain(value: str, names: list[str]) -> list[str]:
    copies = [f"Box {new} gets a copy of box {old}." for old, new in zip(names, names[1:], strict=False)]
    return [f"Box {names[0]} gets the number {value}.", *copies]


def _weave(rng: random.Random, notes: list[str], filler: list[str]) -> str:
    """Notes in their order at random places between filler sentences."""
    slots = sorted(rng.randrange(len(filler) + 1) for _ in notes)
    parts: list[str] = []
    start = 0
    for slot, note in zip(slots, notes, strict=True):
        parts += filler[start:slot]
        parts.append(note)
        start = slot
    return "\n".join(parts + filler[start:])


def _question(value: str) -> str:
    return f"Which boxes hold the number {value}? Name all of them."


def _answer(value: str) -> str:
    return f" The boxes that hold {value} are"


def draft(task: str, length: int, seed: str) -> Draft:
    """One chain of four copies (two below 512 tokens, where the worked example is left out as well)."""
    rng = random.Random(seed)
    hops = 4 if length >= 512 else 2
    names = words.unique(rng, hops + 1, lambda r: words.capitals(r, 5))
    value = words.number(rng, 5)
    notes = _chain(value, names)
    intro = (
        "The text below has notes about boxes. A note either puts a number into a box or copies one box to another. "
        "Keep track of what each box holds."
    )
    example = ""
    if length >= 512:
        # The example's names have three letters, so that it never holds an answer; its value is drawn again.
        short = words.unique(rng, 3, lambda r: words.capitals(r, 3))
        other = words.unique(rng, 1, lambda r: words.number(r, 5))[0]
        while other == value:
            other = words.number(rng, 5)
        text = _weave(rng, _chain(other, short), list(NOISE))
        example = (
            f"Here is an example.\n{text}\n{_question(other)}{_answer(other)} {', '.join(short)}.\nNow the task.\n"
        )

    def build(k: int) -> str:
        woven = _weave(random.Random(f"{seed}/slots"), notes, list(islice(noise(), k)))
        return f"{intro}\n{example}{woven}\n{_question(value)}"

    def promised(k: int) -> dict[str, int]:
        return {name: 2 for name in names[:-1]} | {names[-1]: 1}

    return Draft(build, promised, tuple(names), _answer(value))
