"""Filler text made at run time: a small sentence grammar, the interpreter's help topics, its docstrings."""

from __future__ import annotations

import ast
import re
import sysconfig
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random

HAYSTACKS = ("grammar", "topics", "noise")

NOISE = (
    " The river is slow today.",
    " Two boats drift past the mill.",
    " A heron waits near the reeds.",
    " Later the sun sets and the water turns dark.",
)
# Fillers of four to seven tokens that close the gap between the text and its length.
SHORT = (" All is calm.", " Nothing else happens here.", " The day goes on.", " Nobody says a word about it.")

_ADJECTIVES = """old young tall quiet busy clever tired cheerful careful famous gentle grey green heavy hungry little
lonely narrow proud patient plain round rusty sharp silent slow small strange strong sunny tidy warm wet wide wild
wooden""".split()
_PEOPLE = """farmer teacher doctor painter baker driver builder carpenter clerk cook guard hunter judge lawyer miller
nurse poet reader singer soldier tailor visitor waiter weaver writer child neighbour student uncle aunt""".split()
_THINGS = """table chair box bag book letter map rope lamp clock wheel boat cart door gate wall roof bell cup plate
knife spoon stone plank sack jar net drum chest bench rug basin broom shelf""".split()
_PLACES = """town road field yard barn shop school station corner square hall cellar garage library mill dock park
stable attic""".split()
_DEEDS = """carries finds cleans repairs paints sells borrows drops hides measures moves opens packs pushes sees
shakes throws ties turns washes watches weighs""".split()
_TIMES = """in the morning;before noon;after lunch;late at night;every week;for a while;as usual;without a word;
once more;in bad weather;on the first day of the month;while it rains""".replace("\n", "").split(";")
_LINKS = ["and then", "because", "although", "so that", "while", "until"]


def sentence(rng: Random) -> str:
    """One sentence of this project's grammar, starting with a space."""

    def person() -> str:
        return f"the {rng.choice(_ADJECTIVES)} {rng.choice(_PEOPLE)}"

    def clause() -> str:
        thing = f"{rng.choice(('the', 'one', 'another', 'this'))} {rng.choice(_ADJECTIVES)} {rng.choice(_THINGS)}"
        place = ""
        if rng.random() < 0.6:
            place = f" {rng.choice(('near', 'behind', 'in', 'outside'))} the {rng.choice(_PLACES)}"
        return f"{person()} {rng.choice(_DEEDS)} {thing}{place}"

    text = clause()
    if rng.random() < 0.35:
        text += f" {rng.choice(_LINKS)} {clause()}"
    if rng.random() < 0.5:
        text += f" {rng.choice(_TIMES)}"
    return f" {text[0].upper()}{text[1:]}."


def grammar(rng: Random, n: int) -> list[str]:
    """`n` sentences of the grammar."""
    return [sentence(rng) for _ in range(n)]


def noise(n: int = 400) -> list[str]:
    """The four noise sentences, in turn."""
    return [NOISE[i % len(NOISE)] for i in range(n)]


def split_sentences(text: str) -> list[str]:
    """Plain-ASCII sentences of 12 to 320 characters, mostly letters, each starting with one space."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        flat = re.sub(r"\s+", " ", paragraph).strip()
        if len(flat) < 40:
            continue
        for part in re.split(r"(?<=[.!?:;])\s+(?=[A-Z\"'(`*0-9a-z])", flat):
            piece = part.strip()
            letters = sum(ch.isalpha() or ch == " " for ch in piece)
            if 12 <= len(piece) <= 320 and piece.isascii() and letters >= 0.78 * len(piece):
                found.append(" " + piece + ("" if piece[-1] in ".!?:;" else "."))
    return found


@lru_cache(maxsize=2)
def topics(held_out: bool) -> list[str]:
    """Sentences of the interpreter's help topics.

    One topic in four (by CRC-32 of its name) is held out of training; that part leaves out sentences which the other
    topics contain as well. Raises RuntimeError where the interpreter was installed without
    `pydoc_data`.
    """
    try:
        from pydoc_data.topics import topics as texts
    except ImportError as error:
        raise RuntimeError("this interpreter has no help topics (pydoc_data); use the 'grammar' haystack") from error
    parts: dict[bool, list[str]] = {True: [], False: []}
    for name in sorted(texts):
        parts[zlib.crc32(name.encode()) % 4 == 0] += split_sentences(texts[name])
    if not held_out:
        return parts[False]
    trained = set(parts[False])  # topics share passages
    return [piece for piece in parts[True] if piece not in trained]


def docstrings() -> list[str]:
    """Sentences of the standard library's docstrings (training only)."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found: list[str] = []
    for path in sorted([*library.glob("*.py"), *library.glob("*/*.py")]):
        if {"site-packages", "dist-packages", "test", "pydoc_data", "lib2to3"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node)
                if text and len(text) > 60:
                    found += split_sentences(text)
    return found


def filler(kind: str, rng: Random, tokens: int) -> list[str]:
    """Sentences enough for `tokens` tokens of evaluation haystack (weaving starts anywhere and wraps around)."""
    if kind == "grammar":
        return grammar(rng, tokens // 8 + 8)
    if kind == "topics":
        return topics(held_out=True)
    if kind == "noise":
        return noise()
    raise ValueError(f"haystack must be one of {', '.join(HAYSTACKS)}, got {kind!r}")


def weave(
    rng: Random, units: Sequence[Sequence[str]], prose: Sequence[str], budget: int, cost: Callable[[Sequence[str]], int]
) -> list[str]:
    """Spread `units` (order kept) over consecutive sentences of `prose`, within `budget` tokens.

    Returns the pieces in reading order. Raises ValueError if the units alone exceed the budget.
    """
    left = budget - sum(cost(unit) for unit in units)
    if left < 0:
        raise ValueError(f"the needles alone need {budget - left} tokens, but only {budget} are left for the context")
    hay: list[str] = []
    place, misses = rng.randrange(len(prose)), 0
    while misses < 6:
        piece = prose[place]
        spent = cost((piece,))
        if spent <= left:
            hay.append(piece)
            left -= spent
        else:
            misses += 1
        place = (place + 1) % len(prose)
    hay += top_up(rng, left, cost)
    slots = sorted(rng.randrange(len(hay) + 1) for _ in units)
    out: list[str] = []
    begin = 0
    for slot, unit in zip(slots, units, strict=True):
        out += hay[begin:slot]
        out += unit
        begin = slot
    return out + hay[begin:]


def top_up(rng: Random, left: int, cost: Callable[[Sequence[str]], int]) -> list[str]:
    """Short fillers while one fits in `left` tokens."""
    out: list[str] = []
    while fitting := [piece for piece in SHORT if cost((piece,)) <= left]:
        out.append(rng.choice(fitting))
        left -= cost((out[-1],))
    return out
