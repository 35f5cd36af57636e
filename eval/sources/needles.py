"""Builtin needle tasks: parcel codes hidden in filler text (eight kinds)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import words
from .fitting import Draft
from .haystack import Haystack, noise


@dataclass(frozen=True)
class Kind:
    """One needle task: keys hidden, values of the asked key, keys asked for, and what key, value and filler are."""

    filler: str  # "noise", "text" or "needles"
    keys: int = 1
    values: int = 1
    queries: int = 1
    key: str = "pair"  # or "uuid"
    value: str = "number"  # or "uuid"


KINDS = {
    "niah_single_1": Kind("noise"),
    "niah_single_2": Kind("text"),
    "niah_single_3": Kind("text", value="uuid"),
    "niah_multikey_1": Kind("text", keys=4),
    "niah_multikey_2": Kind("needles"),
    "niah_multikey_3": Kind("needles", key="uuid", value="uuid"),
    "niah_multivalue": Kind("text", values=4),
    "niah_multiquery": Kind("text", keys=4, queries=4),
}

_DEPTHS = 40


def _scaled(kind: Kind, length: int) -> Kind:
    """Below 512 tokens: two needles instead of four."""
    if length >= 512:
        return kind
    return Kind(kind.filler, min(kind.keys, 2), min(kind.values, 2), min(kind.queries, 2), kind.key, kind.value)


def _drawer(what: str, length: int) -> Callable[[random.Random], str]:
    if what == "pair":
        return words.pair_word
    if what == "uuid":
        # A whole UUID is 30 tokens and more: below 512 tokens its first block has to do.
        return words.uuid_text if length >= 512 else lambda rng: words.uuid_text(rng)[:8]
    return lambda rng: words.number(rng, 7)


def _series(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _needle(key: str, value: str, several: bool) -> str:
    return f"{'One' if several else 'The'} parcel code of {key} is {value}."


def draft(task: str, length: int, haystack: Haystack, seed: str) -> Draft:
    """One needle sample. Units are sentences, or distractor needles."""
    kind = _scaled(KINDS[task], length)
    rng = random.Random(seed)
    draw_key, draw_value = _drawer(kind.key, length), _drawer(kind.value, length)
    keys = words.unique(rng, kind.keys, draw_key)
    values = words.unique(rng, kind.keys * kind.values, draw_value)
    pairs = [(key, values[i * kind.values + j]) for i, key in enumerate(keys) for j in range(kind.values)]
    asked = keys[: kind.queries]
    references = tuple(value for key, value in pairs if key in asked)
    several = kind.values > 1
    needles = [_needle(key, value, several) for key, value in pairs]
    rng.shuffle(needles)
    depths = sorted(rng.sample(range(_DEPTHS + 1), len(needles)))

    plural = len(references) > 1
    intro = (
        f"Below is a long text. It states {'some parcel codes' if len(pairs) > 1 else 'one parcel code'} among other "
        f"things. Read it with care: you will be asked about {'them' if plural else 'a parcel code'} afterwards."
    )
    if kind.filler == "needles":
        intro = "Below is a list of parcel codes. Read it with care: you will be asked about one of them afterwards."
    if several:
        question = f"Which parcel codes of {asked[0]} does the text state? List all of them."
        prefix = f" The parcel codes of {asked[0]} are"
    elif plural:
        question = f"What are the parcel codes of {_series(asked)}? Give them in this order."
        prefix = f" The parcel codes of {_series(asked)} are"
    else:
        question = f"What is the parcel code of {asked[0]}?"
        prefix = f" The parcel code of {asked[0]} is"

    units = _units(kind, haystack, f"{seed}/filler", set(keys), set(values), draw_key, draw_value)
    made: list[str] = []
    joint = " " if kind.filler == "text" else "\n"

    def build(k: int) -> str:
        while len(made) < k:
            made.append(next(units))
        parts: list[str] = []
        start = 0
        for depth, needle in zip(depths, needles, strict=True):
            stop = round(k * depth / _DEPTHS)
            parts += made[start:stop]
            parts.append(needle)
            start = stop
        parts += made[start:k]
        return f"{intro}\n{joint.join(parts)}\n{question}"

    def promised(k: int) -> dict[str, int]:
        return {reference: 1 for reference in references}

    # The pool of key words holds more than ten thousand pairs; UUIDs have no end.
    most = 8000 if kind.filler == "needles" and kind.key == "pair" else 1 << 20
    return Draft(build, promised, references, prefix, most=most)


def _units(
    kind: Kind,
    haystack: Haystack,
    seed: str,
    keys: set[str],
    values: set[str],
    draw_key: Callable[[random.Random], str],
    draw_value: Callable[[random.Random], str],
) -> Iterator[str]:
    rng = random.Random(seed)
    if kind.filler == "noise":
        yield from noise()
    elif kind.filler == "text":
        yield from haystack.stream(rng)
    while True:
        key, value = draw_key(rng), draw_value(rng)
        if key not in keys and value not in values:
            keys.add(key)
            values.add(value)
            yield _needle(key, value, False)
