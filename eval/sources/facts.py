"""Builtin question answering over synthetic fact documents: one document (facts_1), two linked ones (facts_2).

They take the place of SQuAD and HotpotQA, which no package carries. They are easier to tell apart and ask for one
attribute, so their scores say nothing about those data sets.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from . import words
from .fitting import Draft


class _World:
    """Draws people, towns and firms that share no name, so that every answer stands in one document only."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.taken: set[str] = set()

    def _new(self, draw) -> str:
        for _ in range(10_000):
            name = draw(self.rng)
            if name not in self.taken:
                self.taken.add(name)
                return name
        raise RuntimeError("the lists of names are used up")

    def town(self) -> str:
        return self._new(words.place)

    def firm(self) -> str:
        return self._new(words.place) + self.rng.choice((" Works", " Mills"))

    def person(self, first: str | None = None, last: str | None = None) -> str:
        return self._new(
            lambda rng: f"{first or rng.choice(words.FIRST_NAMES)} {last or words.surname(rng)}",
        )


def _life(world: _World, person: str, town: str, long: bool) -> str:
    """A document about one person, born in `town`."""
    rng = world.rng
    text = f"{person} was born in {town} and became a {rng.choice(words.CRAFTS)}."
    if long:
        text += (
            f" At the age of {rng.randrange(18, 60)}, {person.split()[0]} moved to {world.town()} and learned to play "
            f"the {rng.choice(words.INSTRUMENTS)}, but kept the {rng.choice(words.ADJECTIVES)} "
            f"{rng.choice(words.NOUNS)} of earlier days."
        )
    return text


def _job(world: _World, person: str, firm: str, long: bool) -> str:
    rng = world.rng
    text = f"{person} works as a {rng.choice(words.CRAFTS)} for {firm}."
    return text + (f" Before that, {person.split()[0]} lived in {world.town()}." if long else "")


def _seat(world: _World, firm: str, town: str, long: bool) -> str:
    rng = world.rng
    text = f"{firm} makes {rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)}s and has its seat in {town}."
    return text + (f" Its first workshop stood in {world.town()}." if long else "")


def _one_document(world: _World, long: bool) -> tuple[list[str], Iterator[str], str, str, str]:
    person, town = world.person(), world.town()
    gold = [_life(world, person, town, long)]

    def others() -> Iterator[str]:
        # One near miss with the same first name; more come by chance as the number of people grows.
        yield _life(world, world.person(first=person.split()[0]), world.town(), long)
        while True:
            yield _life(world, world.person(), world.town(), long)

    return gold, others(), town, f"In which town was {person} born?", f" {person} was born in"


def _two_documents(world: _World, long: bool) -> tuple[list[str], Iterator[str], str, str, str]:
    person, firm, town = world.person(), world.firm(), world.town()
    gold = [_job(world, person, firm, long), _seat(world, firm, town, long)]

    def others() -> Iterator[str]:
        first, last = person.split()
        near = [{"first": first}, {"last": last}]
        while True:
            other = world.firm()
            yield _job(world, world.person(**(near.pop() if near else {})), other, long)
            yield _seat(world, other, world.town(), long)

    question = f"In which town is the seat of the firm that {person} works for?"
    return gold, others(), town, question, f" {person} works for a firm with its seat in"


def draft(task: str, length: int, seed: str) -> Draft:
    """Numbered documents in random order. Units are the documents without the answer (short ones below 1024 tokens).

    Either spelling of the town is accepted, as written or with a hyphen.
    """
    world = _World(random.Random(seed))
    make = _one_document if task == "facts_1" else _two_documents
    gold, others, town, question, prefix = make(world, length >= 1024)
    made: list[str] = []

    def build(k: int) -> str:
        while len(made) < k:
            made.append(next(others))
        documents = gold + made[:k]
        random.Random(f"{seed}/order").shuffle(documents)
        text = "\n".join(f"Document {i}: {document}" for i, document in enumerate(documents, start=1))
        return f"Answer the question at the end from the documents below, in a few words.\n{text}\n{question}"

    spellings = (town, town.replace(" ", "-"))

    def promised(k: int) -> dict[str, int]:
        return {spellings[0]: 1, spellings[1]: 0}

    return Draft(build, promised, spellings, prefix)
