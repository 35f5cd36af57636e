"""Fitting a prompt to a length: the largest number of filler units whose token count stays within a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class TooShort(Exception):
    """The smallest prompt does not fit; `needed` is its number of tokens."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"the smallest prompt has {needed} tokens")
        self.needed = needed


@dataclass(frozen=True)
class Draft:
    """One builtin sample before it is fitted.

    build      text of the user's turn with k filler units; equal for equal k
    promised   how often each reference stands in build(k), as whole words
    least      smallest k that makes a valid sample
    most       largest k that the word lists allow
    """

    build: Callable[[int], str]
    promised: Callable[[int], dict[str, int]]
    references: tuple[str, ...]
    answer_prefix: str
    least: int = 0
    most: int = 1 << 20


def largest_fit(tokens: Callable[[int], int], budget: int, least: int, most: int) -> int:
    """Largest k found in [least, most] with tokens(k) <= budget, by interpolation kept inside a bracket.

    `tokens` should grow with k; where it wobbles, the result still fits but may not be the largest. At most 60 calls.
    Raises TooShort if tokens(least) > budget.
    """
    low, low_tokens = least, tokens(least)
    if low_tokens > budget:
        raise TooShort(low_tokens)
    high, high_tokens = most + 1, 0
    step = 16
    for turn in range(60):
        if high - low <= 1:
            break
        if high > most and high_tokens == 0:
            # No upper bound is known yet: walk up, by the slope once there is one.
            guess = low + step
        elif turn % 3 == 2:
            guess = (low + high) // 2
        else:
            guess = low + int((high - low) * (budget - low_tokens) / max(1, high_tokens - low_tokens))
        guess = min(max(guess, low + 1), high - 1)
        count = tokens(guess)
        if count <= budget:
            slope = max(0.5, (count - low_tokens) / (guess - low))
            step = max(1, int((budget - count) / slope) + 1)
            low, low_tokens = guess, count
        else:
            high, high_tokens = guess, count
    return low
