"""HELMET's prompts of many examples: a text is given the label that examples of its class have, a number at random."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

from .files import LENGTHS, Record
from .items import Item, shuffled, text_seed

# classes of each data set, and examples at each of HELMET's lengths
CLASSES = {"trec_coarse": 6, "trec_fine": 50, "nlu": 68, "banking77": 77, "clinc150": 151}
SHOTS = {
    "trec_coarse": (400, 800, 1600, 3300, 6600),
    "trec_fine": (400, 800, 1600, 3200, 6400),
    "nlu": (510, 1020, 2040, 4080, 8296),
    "banking77": (360, 720, 1450, 2900, 5900),
    "clinc150": (440, 880, 1750, 3525, 7050),
}


def shots_at(task: str, length: int) -> int:
    """How many examples HELMET shows at a length."""
    return SHOTS[task][LENGTHS.index(length)]


def balanced(labels: Sequence[int], count: int, seed: int) -> list[int]:
    """Numbers of `count` records: round after round one of each label, at random and in random order within a round."""
    rng = random.Random(seed)
    of_label: dict[int, list[int]] = {}
    for number, label in enumerate(labels):
        of_label.setdefault(label, []).append(number)
    rounds: list[list[int]] = [[] for _ in range(math.ceil(count / len(of_label)))]
    for members in of_label.values():
        places = rng.sample(range(len(members)), len(rounds) % len(members))
        while len(places) < len(rounds):  # a label with few records has them several times
            places += rng.sample(range(len(members)), min(len(rounds) - len(places), len(members)))
        for one, place in zip(rounds, places, strict=True):
            one.append(members[place])
    for one in rounds:
        rng.shuffle(one)
    return [number for one in rounds for number in one][:count]


def split(records: Sequence[Record], seed: int) -> tuple[list[Record], list[Record]]:
    """Training and test records of a data set without a test part: a tenth of them, drawn as HELMET draws it."""
    order, tested = shuffled(len(records), seed), math.ceil(0.1 * len(records))
    return [records[i] for i in order[tested:]], [records[i] for i in order[:tested]]


def chosen(tested: Sequence[Record], field: str, n: int, seed: int, select: str) -> list[int]:
    """Numbers of the test records: the first n, or n with their labels in balance; all where n is as many or more."""
    if n >= len(tested) or select == "first":
        return list(range(min(n, len(tested))))
    order = shuffled(len(tested), seed)
    return [order[i] for i in balanced([tested[i][field] for i in order], n, seed)]


def labelled(
    task: str, train: Sequence[Record], tested: Sequence[Record], numbers: Sequence[int], shots: int, seed: int,
    texts: dict[str, str],
) -> Iterator[Item]:  # fmt: skip
    """One prompt per test record. Examples and the labels' numbers are drawn for each from its own text."""
    text_field, field = texts["text_field"], texts["label_field"]
    labels = [record[field] for record in train]
    for number in numbers:
        record = tested[number]
        own = text_seed(record[text_field], seed)
        names = list(range(CLASSES[task]))
        random.Random(own).shuffle(names)
        shown = (train[place] for place in balanced(labels, shots, own))
        context = "\n\n".join(
            texts["item_template"].format(text=one[text_field], label=names[one[field]]) for one in shown
        )
        yield Item(number, context, {"question": record[text_field]}, (str(names[record[field]]),))
