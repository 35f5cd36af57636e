"""Filler text of the builtin prompts: endless streams of sentences, the same for the same `random.Random`."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from latent_santa.eval.errors import EvalError

from . import words

NOISE = (
    "The kettle hums on the stove.",
    "Rain taps at the window.",
    "A clock ticks in the hall.",
    "Nothing else happens, and the afternoon goes by.",
)

_PATTERNS = (
    "The {a} {n} stood behind the {a2} {n2} for most of the {season}.",
    "Nobody in the village had seen a {n} as {a} as this one.",
    "When the {weather} came, we carried the {n} and the {n2} into the {place}.",
    "{who} kept a {a} {n} in the {place} and rarely spoke about it.",
    "On some mornings the road to the {place} was {a}, on others it was {a2}.",
    "It is said that every {n} turns {a} once the {season} is over.",
    "{who} sold the {n} to a {craft} and bought a {a} {n2} instead.",
    "Later the {craft} repaired the {n}, although it had looked {a} enough.",
    "There was a {n} near the {place}, and beside it a {a} {n2}.",
    "The {craft} wrote a long letter about the {weather} and the {a} {n}.",
    "Most people prefer a {a} {n} to a {a2} one, but {who} did not.",
    "Before the {weather} ended, {who} had already painted the {n} twice.",
    "A {n} without a {n2} is of little use in the {season}.",
    "All summer the {place} smelled of rain, and the {n} grew {a}.",
)
_SEASONS = ("spring", "summer", "autumn", "winter", "harvest", "holiday")
_WEATHERS = ("storm", "fog", "rain", "frost", "heat", "thaw")
_PLACES = ("market", "mill", "quay", "library", "station", "orchard", "workshop", "chapel", "kitchen", "tower")


def _prose_sentence(rng: random.Random) -> str:
    adjective, other = rng.sample(words.ADJECTIVES, 2)
    noun, second = rng.sample(words.NOUNS, 2)
    text = rng.choice(_PATTERNS).format(
        a=adjective,
        a2=other,
        n=noun,
        n2=second,
        season=rng.choice(_SEASONS),
        weather=rng.choice(_WEATHERS),
        place=rng.choice(_PLACES),
        who=rng.choice(words.FIRST_NAMES),
        craft=rng.choice(words.CRAFTS),
    )
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def split_sentences(text: str) -> list[str]:
    """Sentences of running text: white space collapsed, one to sixty words, mostly letters."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        flat = " ".join(paragraph.split())
        for sentence in re.split(r"(?<=[.!?])\s+", flat):
            letters = sum(char.isalpha() or char == " " for char in sentence)
            if 3 <= len(sentence.split()) <= 60 and letters >= 0.8 * len(sentence):
                found.append(sentence)
    return found


@dataclass(frozen=True)
class Haystack:
    """A source of filler sentences. `sentences` is None for the endless grammar, else a list that is cycled."""

    name: str
    sha256: str
    sentences: tuple[str, ...] | None

    def stream(self, rng: random.Random) -> Iterator[str]:
        """Endless sentences; a finite text starts at a random sentence and begins again when it is used up."""
        if self.sentences is None:
            while True:
                yield _prose_sentence(rng)
        position = rng.randrange(len(self.sentences))
        while True:
            yield self.sentences[position % len(self.sentences)]
            position += 1


def open_haystack(spec: str) -> Haystack:
    """`prose` (the grammar above), `pydoc` (help topics of the running interpreter) or `file:PATH` (UTF-8 text).

    Raises EvalError for an unknown name, an unreadable file or a text with fewer than 20 usable sentences.
    """
    if spec == "prose":
        pool = (_PATTERNS, _SEASONS, _WEATHERS, _PLACES, words.ADJECTIVES, words.NOUNS, words.CRAFTS, words.FIRST_NAMES)
        return Haystack("prose", hashlib.sha256(repr(pool).encode()).hexdigest(), None)
    if spec == "pydoc":
        try:
            from pydoc_data.topics import topics
        except ImportError as error:
            raise EvalError("this Python has no help topics (pydoc_data); use --haystack prose or file:PATH") from error
        text = "\n\n".join(topics[name] for name in sorted(topics))
    elif spec.startswith("file:"):
        try:
            text = Path(spec[5:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise EvalError(f"--haystack {spec}: cannot read it as UTF-8 text ({error})") from error
    else:
        raise EvalError(f"unknown haystack {spec!r}; choose prose, pydoc or file:PATH")
    sentences = tuple(split_sentences(text))
    if len(sentences) < 20:
        raise EvalError(f"--haystack {spec} has {len(sentences)} usable sentences; at least 20 are needed")
    return Haystack(spec, hashlib.sha256(text.encode()).hexdigest(), sentences)


def noise() -> Iterator[str]:
    """The sentences of one fixed paragraph again and again, as the first needle task and variable tracing use them."""
    while True:
        yield from NOISE
