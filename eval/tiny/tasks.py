"""Evaluation prompts of the embedded model's seven tasks, at the level of pieces (see `sentences`).

single, multikey, multivalue, multiquery: flights whose numbers are hidden in prose. vt: copy chains. fwe: the three
most frequent words of a stream. facts: notes about people. A name ending in `_hard` is the same task with `HARD`'s
options as defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Any

from .haystack import HAYSTACKS, filler, top_up, weave
from .sentences import (
    FACTS,
    INTRO,
    MAX_GAP,
    Question,
    ask_fact,
    ask_frequent,
    ask_multiquery,
    ask_multivalue,
    ask_single,
    ask_trace,
    copy,
    needle,
    note,
    number,
    people,
    store,
)
from .words import CIPHERS, KEY_KINDS, NAMES, draw_keys

NEEDLE_TASKS = ("single", "multikey", "multivalue", "multiquery")
TASKS = (*NEEDLE_TASKS, "vt", "fwe", "facts")
HARD: dict[str, dict[str, Any]] = {
    "single": {"gap": 2, "keys": "made"},
    "multikey": {"gap": 2, "keys": "made", "distractors": 16},
    "multivalue": {"gap": 2, "keys": "made", "values": 8, "distractors": 4},
    "multiquery": {"gap": 2, "keys": "made", "queries": 8, "distractors": 8},
    "vt": {"gap": 2, "keys": "made", "hops": 4, "chains": 3},
    "fwe": {"alpha": 1.8},
    "facts": {"gap": 1},
}
HARD_TASKS = tuple(f"{task}_hard" for task in TASKS)

Cost = Callable[[Sequence[str]], int]


@dataclass(frozen=True)
class Options:
    """What a task can vary.

    digits       of each flight number (vt: 5 always)
    distractors  other keys with one value each (multikey: 4, other flight tasks: 0 unless given)
    values       values of the key (multivalue)
    queries      keys asked for (multiquery)
    hops, chains copies a chain, chains a prompt; the first chain is asked for (vt)
    alpha        exponent of the word frequencies, rank^-alpha; smaller is harder (fwe)
    gap          phrases between key and value, 0 to 4; facts: 0 repeats the name before each fact, else named once
    keys         "listed" (one-token words), "made" (unseen made-up words) or "english" (words never used as keys)
    haystack     "grammar", "topics" (help topics held out of training) or "noise"
    """

    digits: int = 7
    distractors: int | None = None
    values: int = 4
    queries: int = 4
    hops: int = 4
    chains: int = 1
    alpha: float = 2.0
    gap: int = 0
    keys: str = "listed"
    haystack: str = "grammar"

    def __post_init__(self) -> None:
        ranges = {"digits": (1, 12), "values": (1, 16), "queries": (1, 16), "hops": (1, 16), "chains": (1, 64)}
        ranges |= {"gap": (0, MAX_GAP), "distractors": (0, 500)}
        for name, (low, high) in ranges.items():
            given = getattr(self, name)
            if given is not None and not low <= given <= high:
                raise ValueError(f"{name} must be from {low} to {high}, got {given}")
        if not 1.0 < self.alpha <= 4.0:
            raise ValueError(f"alpha must be above 1 and at most 4, got {self.alpha}")
        if self.keys not in KEY_KINDS:
            raise ValueError(f"keys must be one of {', '.join(KEY_KINDS)}, got {self.keys!r}")
        if self.haystack not in HAYSTACKS:
            raise ValueError(f"haystack must be one of {', '.join(HAYSTACKS)}, got {self.haystack!r}")


def resolve(task: str, given: dict[str, Any]) -> tuple[str, Options]:
    """The plain task's name and its options. Raises ValueError for an unknown task or option."""
    base = task.removesuffix("_hard")
    if base not in TASKS:
        raise ValueError(f"unknown task {task!r}; the embedded model's tasks are {', '.join(TASKS + HARD_TASKS)}")
    known = {field.name for field in fields(Options)}
    if unknown := sorted(set(given) - known):
        raise ValueError(f"unknown option {unknown[0]!r} for {task}; options are {', '.join(sorted(known))}")
    return base, Options(**((HARD[base] if task != base else {}) | given))


def answer_room(task: str, options: Options) -> int:
    """Tokens to generate at most: the longest right answer, its end mark and two spare ones."""
    name = 1 if options.keys == "listed" else 7
    flight = options.digits + 1
    if task == "multivalue":
        return flight + (options.values - 1) * (flight + name) + 4
    if task == "multiquery":
        return flight + (options.queries - 1) * (flight + name) + 4
    if task == "vt":
        return (options.hops + 1) * name + 4
    return {"fwe": 10, "facts": 10}.get(task, flight + 4)


def _flights(task: str, rng: Random, options: Options) -> tuple[list[list[str]], Question]:
    extra = options.distractors if options.distractors is not None else (4 if task == "multikey" else 0)
    asked = options.queries if task == "multiquery" else 1
    each = options.values if task == "multivalue" else 1
    keys = draw_keys(rng, asked + extra, options.keys)
    pairs = [
        (key, number(rng, options.digits)) for place, key in enumerate(keys) for _ in range(each if place == 0 else 1)
    ]
    rng.shuffle(pairs)
    found: dict[str, list[str]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    if task == "multivalue":
        question = ask_multivalue(keys[0], found[keys[0]])
    elif task == "multiquery":
        question = ask_multiquery(keys[:asked], [found[key][0] for key in keys[:asked]])
    else:
        question = ask_single(keys[0], found[keys[0]])
    return [needle(rng, key, value, options.gap) for key, value in pairs], question


def _chains(rng: Random, options: Options) -> tuple[list[list[str]], Question]:
    names = draw_keys(rng, (options.hops + 1) * options.chains, options.keys)
    chains: list[list[list[str]]] = []
    asked: Question | None = None
    for start in range(0, len(names), options.hops + 1):
        boxes, value = names[start : start + options.hops + 1], number(rng, 5)
        steps = [copy(rng, a, b, options.gap) for a, b in zip(boxes, boxes[1:], strict=False)]
        chains.append([store(rng, value, boxes[0], options.gap), *steps])
        asked = asked or ask_trace(value, boxes)
    assert asked is not None
    return interleave(rng, chains), asked


def interleave(rng: Random, chains: Sequence[Sequence[list[str]]]) -> list[list[str]]:
    """Merge the chains at random, keeping the order inside each."""
    waiting = [list(reversed(chain)) for chain in chains]
    out = []
    while waiting:
        chain = rng.choice(waiting)
        out.append(chain.pop())
        if not chain:
            waiting.remove(chain)
    return out


def word_stream(rng: Random, n: int, vocabulary: int, alpha: float) -> tuple[list[str], list[str]]:
    """`n` words drawn with weight rank^-alpha, rank 1 being dots, and the three most frequent words.

    The four highest counts differ, so that the answer is unique. Raises ValueError if `n` is too short for that.
    """
    if n < 60:
        raise ValueError(f"a word stream needs at least 60 words, got room for {n}")
    weights = [rank**-alpha for rank in range(1, vocabulary + 1)]
    while True:
        words = [" ...", *(" " + word for word in rng.sample(CIPHERS, vocabulary - 1))]
        stream = rng.choices(words, weights=weights, k=n)
        counts: dict[str, int] = {}
        for word in stream:
            counts[word] = counts.get(word, 0) + 1
        counts.pop(" ...", None)
        ranked = sorted(counts.items(), key=lambda item: -item[1])[:4]
        if len(ranked) == 4 and all(a[1] > b[1] for a, b in zip(ranked, ranked[1:], strict=False)):
            return stream, [word[1:] for word, _ in ranked[:3]]


def _notes(rng: Random, options: Options, budget: int, cost: Cost) -> tuple[list[str], Question]:
    crowd = people(rng, len(NAMES))
    kind = rng.choice(list(FACTS))
    left = budget - cost([INTRO["facts"]]) - max(cost(ask_fact(kind, person).question) for person in crowd[:8]) - 2
    pieces: list[str] = []
    written = 0
    for person in crowd:
        unit = note(rng, written + 1, person, options.gap)
        if cost(unit) > left:
            break
        pieces += unit
        left -= cost(unit)
        written += 1
    if not written:
        raise ValueError(f"not even one note fits into {budget} tokens")
    asked = ask_fact(kind, crowd[rng.randrange(written)])
    sentences = filler(options.haystack, rng, left) if left > 60 else []
    pieces += weave(rng, [], sentences, left, cost) if sentences else top_up(rng, left, cost)
    return [INTRO["facts"], *pieces], asked


def build(task: str, budget: int, rng: Random, cost: Cost, options: Options) -> tuple[list[str], Question]:
    """Context pieces and the question of one prompt.

    budget  tokens for context, question and answer prefix together
    cost    tokens of a list of pieces

    Raises ValueError when the needles do not fit.
    """
    if task == "facts":
        return _notes(rng, options, budget, cost)
    if task == "fwe":
        blank = ask_frequent(CIPHERS[:3])
        room = budget - cost([INTRO["fwe"]]) - cost(blank.question) - cost(blank.prefix)
        stream, top = word_stream(rng, room, max(12, min(room // 40, len(CIPHERS))), options.alpha)
        return [INTRO["fwe"], *stream], ask_frequent(top)
    units, question = _chains(rng, options) if task == "vt" else _flights(task, rng, options)
    intro = INTRO["vt" if task == "vt" else "niah"]
    left = budget - cost([intro]) - cost(question.question) - cost(question.prefix)
    return [intro, *weave(rng, units, filler(options.haystack, rng, left), left, cost)], question
