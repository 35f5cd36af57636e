"""The sentences and questions of the embedded model's tasks, as pieces.

A piece is a short string that starts with a space, a newline or punctuation, so that encoding pieces one by one
gives the same token ids as encoding the joined text. `gap` counts the phrases that stand between a key and its value
(0: the value follows its key directly).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from .words import FOODS, INSTRUMENTS, NAMES, SUBJECTS, TOWNS

INTRO = {
    "niah": "Read this text; it reports some flights.",
    "vt": "Read this text; Set puts a number into a box and Copy copies the first box into the second.",
    "fwe": "This is a stream of cipher words; dots carry no meaning.",
    "facts": "These notes describe some people.",
}
FACTS = {"plays": INSTRUMENTS, "eats": FOODS, "teaches": SUBJECTS, "left": TOWNS}
MAX_GAP = 4
_COPY_PHRASES = (" with care", " as agreed", " once more", " in one go", " after a check")


class Question(NamedTuple):
    """One turn over a context: pieces of the question, of the answer's prefix and of the rest of the answer."""

    question: list[str]
    prefix: list[str]
    answer: list[str]
    references: list[str]


def number(rng: Random, digits: int) -> str:
    """A decimal number of exactly `digits` digits."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def _flight_phrases(rng: Random, gap: int) -> list[str]:
    town, other = rng.sample(TOWNS, 2)
    phrases = [
        [" from", " " + town],
        [" to", " " + other],
        [" carrying", " " + rng.choice(FOODS)],
        [" in heavy rain"],
        [" after a short stop"],
        [" with a new crew"],
        [" on time"],
    ]
    return [piece for phrase in rng.sample(phrases, gap) for piece in phrase]


def needle(rng: Random, key: str, value: str, gap: int) -> list[str]:
    """`Flight KEY [phrases] VALUE has landed.`"""
    return [" Flight", " " + key, *_flight_phrases(rng, gap), " " + value, " has landed", "."]


def _into(rng: Random, gap: int) -> list[str]:
    return [*rng.sample(_COPY_PHRASES, gap - 1), " into"] if gap else []


def store(rng: Random, value: str, name: str, gap: int) -> list[str]:
    """`Set VALUE [phrases into] NAME.`"""
    return [" Set", " " + value, *_into(rng, gap), " " + name, "."]


def copy(rng: Random, source: str, target: str, gap: int) -> list[str]:
    """`Copy SOURCE [phrases into] TARGET.`"""
    return [" Copy", " " + source, *_into(rng, gap), " " + target, "."]


def people(rng: Random, n: int) -> list[dict[str, str]]:
    """`n` people with different names and four facts each."""
    return [
        {"name": name} | {kind: rng.choice(values) for kind, values in FACTS.items()} for name in rng.sample(NAMES, n)
    ]


def note(rng: Random, index: int, person: dict[str, str], gap: int) -> list[str]:
    """One numbered note, its facts in random order; with gap 0 the name is repeated before each fact."""
    out = [" Note", f" {index}", ":"]
    for place, kind in enumerate(rng.sample(list(FACTS), len(FACTS))):
        if place:
            out.append(",")
        if place == 0 or not gap:
            out.append(" " + person["name"])
        out += [" " + kind, " " + person[kind]]
    return [*out, "."]


def ask_single(key: str, values: Sequence[str]) -> Question:
    """The one value of a key."""
    return Question(
        ["\nWhich flight of", " " + key, " has landed?"], ["Flight", " " + key], [" " + values[0], "."], [values[0]]
    )


def ask_multivalue(key: str, values: Sequence[str]) -> Question:
    """All values of a key, in the text's order."""
    answer = [" " + values[0]]
    for value in values[1:]:
        answer += [",", " " + key, " " + value]
    question = ["\nList every flight of", " " + key, " that has landed."]
    return Question(question, ["Flight", " " + key], [*answer, "."], list(values))


def ask_multiquery(keys: Sequence[str], values: Sequence[str]) -> Question:
    """One value for each of several keys, in the question's order."""
    question, answer = ["\nWhich flights of"], [" " + values[0]]
    for place, key in enumerate(keys):
        question += ([" and"] if place == len(keys) - 1 else [","] if place else []) + [" " + key]
    for key, value in zip(keys[1:], values[1:], strict=True):
        answer += [",", " " + key, " " + value]
    return Question([*question, " have landed?"], ["Flight", " " + keys[0]], [*answer, "."], list(values))


def ask_trace(value: str, names: Sequence[str]) -> Question:
    """Every box that holds a number, in the order of copying."""
    return Question(
        ["\nWhich boxes hold", " " + value, "?"],
        ["Trace:", " " + value],
        [*(" " + name for name in names), "."],
        list(names),
    )


def ask_frequent(words: Sequence[str]) -> Question:
    """The three most frequent words, most frequent first."""
    first, second, third = words
    return Question(
        ["\nName the three cipher words seen most often, most common first."],
        ["Most common:"],
        [" " + first, ",", " " + second, ",", " " + third, "."],
        list(words),
    )


def ask_fact(kind: str, person: dict[str, str]) -> Question:
    """One fact about one person; no answer prefix."""
    name = " " + person["name"]
    question = {
        "plays": ["\nWhat instrument does", name, " play?"],
        "eats": ["\nWhat food does", name, " eat?"],
        "teaches": ["\nWhat subject does", name, " teach?"],
        "left": ["\nWhich town did", name, " leave?"],
    }[kind]
    return Question(question, [], ["Answer:", name, " " + kind, " " + person[kind], "."], [person[kind]])
