"""What one prompt of HELMET is made of, and the order in which its loaders draw."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Item:
    """One prompt before it is cut to a length.

    number      its place in its source
    context     the long part, which is cut at its end where the prompt is too long
    parts       what else the user's template has places for
    references  accepted answers, as the task's metric reads them
    """

    number: int
    context: str
    parts: dict[str, Any] = field(repr=False)
    references: tuple[str, ...]

    def user(self, template: str, context: str) -> str:
        """The user's turn, with this context."""
        return template.format(context=context, **self.parts)


def shuffled(count: int, seed: int) -> list[int]:
    """The order that `Dataset.shuffle(seed=...)` of the package datasets puts `count` records in."""
    return np.random.default_rng(seed).permutation(count).tolist()


def text_seed(text: str, plus: int = 0) -> int:
    """The seed that HELMET takes from a text."""
    return (int(hashlib.sha256(text.encode()).hexdigest(), 16) + plus) % 2**31


def examples(records: Sequence[dict[str, Any]], key: str, seed: int, shots: int) -> list[dict[str, Any]]:
    """The first `shots` records in shuffled order whose keys differ."""
    found: dict[Any, dict[str, Any]] = {}
    for place in shuffled(len(records), seed):
        found.setdefault(records[place][key], records[place])
        if len(found) >= shots:
            break
    return list(found.values())[:shots]
