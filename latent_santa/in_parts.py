"""Long work as a generator that stops between its parts, so that they may run beside something else.

How far a caller lets it run at a time does not change the result.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

# stops behind each part with the share that is done at least, from 0 to 1; returns the result
Work = Generator[float, None, T]


def result_of(work: Work[T]) -> T:
    """The result of all parts, one after another."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def share_of(work: Work[T], start: float, stop: float) -> Work[T]:
    """``work`` as what larger work does between the shares ``start`` and ``stop``."""
    while True:
        try:
            done = next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        yield start + (stop - start) * done
