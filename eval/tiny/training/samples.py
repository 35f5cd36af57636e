"""Training samples: one context and up to 16 questions about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from .. import haystack
from ..encoder import ASSISTANT, BOS, EOS, USER, PieceEncoder
from ..haystack import weave
from ..sentences import (
    FACTS,
    INTRO,
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
from ..tasks import interleave, word_stream
from ..words import CIPHERS, KEYS, NAMES, OUTSIDE, TOWNS, draw_keys
from .curriculum import Mix

KINDS = ("niah", "vt", "fwe", "facts", "pairs")
_SHARES = (46, 17, 18, 19)
_TURN = 3  # <|user|>, <|assistant|> and </s>


@dataclass(frozen=True)
class Prose:
    """Training haystacks with their weights, and the English words that may be keys."""

    sets: tuple[list[str], ...]
    weights: tuple[float, ...]
    english: list[str]


def training_prose() -> Prose:
    """Help topics (those not held out), docstrings, the grammar and the noise sentences."""
    topics, docs = haystack.topics(held_out=False), haystack.docstrings()
    kept_back = set(OUTSIDE)
    words = {word for piece in topics + docs for word in piece[1:].rstrip(".:;!?").split()}
    english = sorted(w for w in words if w.isalpha() and w.islower() and 4 <= len(w) <= 12 and w not in kept_back)
    sets = (topics, docs, haystack.grammar(Random(7), 20_000), haystack.noise())
    return Prose(sets, (0.40, 0.25, 0.25, 0.10), english)


@dataclass(frozen=True)
class Sample:
    """Token ids, the half-open spans of the answers, and the kind of sample."""

    ids: list[int]
    answers: list[tuple[int, int]]
    kind: str


class Sampler:
    """Makes training samples of at most a given number of tokens."""

    def __init__(self, encoder: PieceEncoder, prose: Prose) -> None:
        self._encoder, self._prose = encoder, prose
        self._cost = encoder.cost

    def sample(self, rng: Random, length: int, mix: Mix) -> Sample:
        """One sample of at most `length` tokens, with at least one answer."""
        while True:
            if length <= 544 and rng.random() < mix.pairs:
                return self._pairs(rng, length)
            kind = rng.choices(KINDS[:4], weights=_SHARES)[0]
            room = length - 2 - self._cost([INTRO[kind]])
            gap = rng.randint(1, mix.gap) if rng.random() < mix.apart else 0
            make = {"niah": self._flights, "vt": self._chains, "fwe": self._stream, "facts": self._notes}[kind]
            pieces, questions = make(rng, room, length, gap, mix)
            if questions:  # sometimes not even the first fits
                return self._joined(kind, pieces, questions)

    def _joined(self, kind: str, pieces: Sequence[str], questions: Sequence[Question]) -> Sample:
        ids = [BOS, USER, *self._encoder.ids([INTRO[kind]]), *self._encoder.ids(pieces)]
        spans = []
        for place, asked in enumerate(questions):
            ids += ([USER] if place else []) + self._encoder.ids(asked.question) + [ASSISTANT]
            start = len(ids)
            ids += [*self._encoder.ids(asked.prefix), *self._encoder.ids(asked.answer), EOS]
            spans.append((start, len(ids)))
        return Sample(ids, spans, kind)

    def _turn(self, asked: Question) -> int:
        return self._cost(asked.question) + self._cost(asked.prefix) + self._cost(asked.answer) + _TURN

    def _haystack(self, rng: Random) -> Sequence[str]:
        return rng.choices(self._prose.sets, weights=self._prose.weights)[0]

    def _keys(self, rng: Random, n: int, mix: Mix) -> list[str]:
        weights = (mix.made, mix.english, 1 - mix.made - mix.english)
        kind = rng.choices(("made", "english", "listed"), weights=weights)[0]
        most = {"made": n, "english": len(self._prose.english), "listed": len(KEYS)}[kind]
        return draw_keys(rng, min(n, most), kind, self._prose.english, evaluation=False)

    def _pairs(self, rng: Random, length: int) -> Sample:
        """Warm-up: made-up word pairs, listed once and then repeated in another order."""
        pool = rng.choice((KEYS, CIPHERS, NAMES, KEYS + NAMES + TOWNS))
        link = rng.choice((" to", " is", ":", " plays", " eats", " left", " teaches"))
        middle = [link] if rng.random() < 0.25 else []
        n = (length - 8) // (2 * (3 + len(middle)))
        n = min(n, len(pool) // 2 - 1, rng.choice((4, 8, 16, 32, 64, 128)))
        words = rng.sample(pool, 2 * n)
        units = [[" " + a, *middle, " " + b, "."] for a, b in zip(words[:n], words[n:], strict=True)]
        ids = [BOS, USER, *(token for unit in units for token in self._encoder.ids(unit)), ASSISTANT]
        spans = []
        rng.shuffle(units)
        for unit in units:
            tokens = self._encoder.ids(unit)
            if len(ids) + len(tokens) > length:
                break
            spans.append((len(ids) + 1, len(ids) + len(tokens)))
            ids += tokens
        return Sample(ids, spans, "pairs")

    def _flights(self, rng: Random, room: int, length: int, gap: int, mix: Mix) -> tuple[list[str], list[Question]]:
        digits, form = rng.choice((5, 6, 7, 7, 7)), rng.random()
        lines = form >= 0.72
        if form < 0.10:
            wanted = 1
        elif not lines:
            wanted = rng.randint(2, int(5 + 2 * length / 272))
        else:
            wanted = max(2, int(rng.uniform(0.5, 1.0) * room / 14))
        repeated = rng.choice((0.0, 0.3, 0.6)) if wanted > 1 else 0.5
        pairs = [
            (key, number(rng, digits))
            for key in self._keys(rng, min(wanted, 600), mix)
            for _ in range(rng.randint(2, 6) if rng.random() < repeated else 1)
        ]
        rng.shuffle(pairs)
        cap = int(room * (0.95 if lines else 0.6)) - 60
        units: list[list[str]] = []
        values: dict[str, list[str]] = {}
        used = 0
        for key, value in pairs:
            unit = needle(rng, key, value, rng.randint(min(gap, 1), gap))
            if units and used + self._cost(unit) > cap:
                break
            used += self._cost(unit)
            units.append(unit)
            values.setdefault(key, []).append(value)
        questions = self._ask_flights(rng, values, min(room - used, int(60 + 0.25 * length)))
        if lines:
            return [piece for unit in units for piece in unit], questions
        left = room - sum(self._turn(asked) for asked in questions)
        return weave(rng, units, self._haystack(rng), left, self._cost), questions

    def _ask_flights(self, rng: Random, values: dict[str, list[str]], room: int) -> list[Question]:
        keys = list(values)
        rng.shuffle(keys)
        one = [key for key in keys if len(values[key]) == 1]
        many = [key for key in keys if len(values[key]) > 1]
        questions: list[Question] = []
        while one or many:
            draw = rng.random()
            if many and (draw < 0.6 or not one):
                key = many.pop()
                asked = ask_multivalue(key, values[key])
            elif len(one) >= 2 and draw < 0.85:
                group = [one.pop() for _ in range(min(len(one), rng.randint(2, 5)))]
                asked = ask_multiquery(group, [values[key][0] for key in group])
            else:
                key = one.pop()
                asked = (ask_multivalue if rng.random() < 0.12 else ask_single)(key, values[key])
            room -= self._turn(asked)
            if room < 0:
                break
            questions.append(asked)
            if len(questions) >= 12 or rng.random() < 0.08:
                break
        return questions

    def _chains(self, rng: Random, room: int, length: int, gap: int, mix: Mix) -> tuple[list[str], list[Question]]:
        wanted = 1 if rng.random() < 0.3 else rng.randint(1, int(2 + 1.2 * length / 272))
        names = self._keys(rng, 6 * wanted, mix)
        chains: list[list[list[str]]] = []
        asked: list[Question] = []
        used = 0
        for _ in range(wanted):
            hops = rng.randint(2, 5)
            if len(names) <= hops:
                break
            boxes, value = [names.pop() for _ in range(hops + 1)], number(rng, 5)
            chain = [store(rng, value, boxes[0], gap)]
            chain += [copy(rng, a, b, gap) for a, b in zip(boxes, boxes[1:], strict=False)]
            spent = sum(self._cost(unit) for unit in chain)
            if chains and used + spent > 0.5 * room:
                break
            used += spent
            chains.append(chain)
            asked.append(ask_trace(value, boxes))
        left = min(int(60 + 0.22 * length), room - used)
        questions: list[Question] = []
        for question in rng.sample(asked, len(asked)):
            left -= self._turn(question)
            if left < 0 or len(questions) >= 8:
                break
            questions.append(question)
        budget = room - sum(self._turn(question) for question in questions)
        return weave(rng, interleave(rng, chains), self._haystack(rng), budget, self._cost), questions

    def _stream(self, rng: Random, room: int, length: int, gap: int, mix: Mix) -> tuple[list[str], list[Question]]:
        blank = ask_frequent(CIPHERS[:3])
        n = room - self._turn(blank)
        if length > 600 and rng.random() < 0.3:
            n = int(n * rng.uniform(0.5, 1.0))
        vocabulary = max(12, min(n // rng.choice((20, 30, 40, 50)), len(CIPHERS)))
        stream, top = word_stream(rng, n, vocabulary, rng.choice((1.7, 1.8, 2.0, 2.0, 2.2)))
        return stream, [ask_frequent(top)]

    def _notes(self, rng: Random, room: int, length: int, gap: int, mix: Mix) -> tuple[list[str], list[Question]]:
        few = length > 500 and rng.random() < 0.2
        asking = min(int(60 + 0.2 * length), int(room * 0.4))
        most = (room - asking) * (rng.uniform(0.2, 0.6) if few else 1.0)
        units: list[list[str]] = []
        crowd = people(rng, len(NAMES))
        used = 0
        for index, person in enumerate(crowd):
            unit = note(rng, index + 1, person, gap)
            if units and used + self._cost(unit) > most:
                break
            used += self._cost(unit)
            units.append(unit)
        questions: list[Question] = []
        for place in rng.sample(range(len(units)), len(units)):
            asked = ask_fact(rng.choice(list(FACTS)), crowd[place])
            asking -= self._turn(asked)
            if asking < 0 or len(questions) >= 16:
                break
            questions.append(asked)
        if not few:
            return [piece for unit in units for piece in unit], questions
        budget = room - sum(self._turn(asked) for asked in questions)
        return weave(rng, units, self._haystack(rng), budget, self._cost), questions
