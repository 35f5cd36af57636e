"""Word lists of the embedded model and keys from outside them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from random import Random

_LEXICON: dict[str, list[str]] = json.loads((Path(__file__).parent / "lexicon.json").read_text(encoding="utf-8"))

# Made-up words, one token each in the model's tokenizer.
KEYS = _LEXICON["keys"]
CIPHERS = _LEXICON["ciphers"]
NAMES = _LEXICON["names"]
TOWNS = _LEXICON["towns"]
# English words, one token each.
INSTRUMENTS = _LEXICON["instruments"]
FOODS = _LEXICON["foods"]
SUBJECTS = _LEXICON["subjects"]
# English words that training never uses as keys.
OUTSIDE = _LEXICON["outside"]

KEY_KINDS = ("listed", "made", "english")
_LISTED = frozenset(KEYS + CIPHERS)
_CONSONANTS = "bdfghjklmnprstvz"
_VOWELS = "aeiou"
_ENDINGS = ("", "", "", "l", "m", "n", "r", "s", "t", "k")


def held_out(word: str) -> bool:
    """Whether a made-up word is kept for evaluation: one word in eight, by CRC-32, the same everywhere."""
    return zlib.crc32(word.encode()) % 8 == 0


def made_word(rng: Random, evaluation: bool) -> str:
    """A word of two to four syllables that is in no list; training and evaluation words never overlap."""
    while True:
        syllables = [rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.choice((2, 3, 3, 4)))]
        word = "".join(syllables) + rng.choice(_ENDINGS)
        if word not in _LISTED and held_out(word) == evaluation:
            return word


def draw_keys(rng: Random, n: int, kind: str, english: Sequence[str] = OUTSIDE, evaluation: bool = True) -> list[str]:
    """`n` different keys of one kind.

    kind: "listed" (the model's own one-token keys), "made" (made-up words of several tokens) or "english" (from
    `english`). Evaluation keys also never contain one another, so that a substring score cannot confuse them.
    Raises ValueError for an unknown kind or when the list is too short.
    """
    if kind not in KEY_KINDS:
        raise ValueError(f"keys must be one of {', '.join(KEY_KINDS)}, got {kind!r}")
    if kind != "made":
        pool = KEYS if kind == "listed" else english
        if n > len(pool):
            raise ValueError(f"{n} different keys asked for, but there are only {len(pool)} {kind} keys")
        return rng.sample(pool, n)
    chosen: list[str] = []
    taken: set[str] = set()
    while len(chosen) < n:
        word = made_word(rng, evaluation)
        clash = word in taken or (evaluation and any(word in other or other in word for other in chosen))
        if not clash:
            chosen.append(word)
            taken.add(word)
    return chosen
