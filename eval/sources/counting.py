"""Builtin aggregation tasks: the common words of a numbered list (cwe), the frequent words of coded text (fwe)."""

from __future__ import annotations

import random

from . import words
from .fitting import Draft

_DOTS = "..."


def _numbered(entries: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(entries, start=1))


def _cwe_scale(length: int) -> tuple[int, int, int]:
    """Number of common words, how often each stands in the list, and how often every other word does."""
    if length < 512:
        return 3, 4, 1
    if length < 1024:
        return 5, 4, 1
    return (10, 6, 1) if length < 4096 else (10, 30, 3)


def _cwe_question(answers: int) -> str:
    return f"Which {answers} words stand in the list most often?"


def _cwe_answer(answers: int) -> str:
    return f" The {answers} words that stand in the list most often are"


def common_words(task: str, length: int, seed: str) -> Draft:
    """A numbered list in which a few words are common. Units are the other words; an example stands before it."""
    answers, common, rare = _cwe_scale(length)
    rng = random.Random(seed)
    if length > 6144:
        # More words are needed than the plain lists hold, and all words of a list should look alike.
        pool = words.unique(rng, min(9000, length // 8 + 100), words.pair_word)
    else:
        pool = list(words.NOUNS + words.ADJECTIVES)
        rng.shuffle(pool)
    top, others = pool[:answers], pool[answers:]
    intro = "Below is a numbered list in which some words stand more often than all others. Find out which ones."
    example = ""
    if length >= 1024:
        few = [others.pop() for _ in range(8)]
        entries = few[:2] * 5 + few[2:] * 2
        rng.shuffle(entries)
        example = (
            f"Here is an example.\n{_numbered(entries)}\n{_cwe_question(2)}{_cwe_answer(2)} {few[0]} and {few[1]}.\n"
            "Now the task.\n"
        )

    def build(k: int) -> str:
        entries = top * common + others[:k] * rare
        random.Random(f"{seed}/order").shuffle(entries)
        return f"{intro}\n{example}{_numbered(entries)}\n{_cwe_question(answers)}"

    def promised(k: int) -> dict[str, int]:
        return {word: common for word in top}

    return Draft(build, promised, tuple(top), _cwe_answer(answers), most=len(others))


def _zeta_counts(n: int, vocabulary: int) -> list[int]:
    """How often each rank stands in a text of about n words whose frequencies fall with the square of the rank.

    The first five counts are made strictly decreasing, so that the three answers are never tied.
    """
    total = sum(1 / rank**2 for rank in range(1, vocabulary + 1))
    counts = [max(1, round(n / (rank**2 * total))) for rank in range(1, vocabulary + 1)]
    for rank in range(3, -1, -1):
        counts[rank] = max(counts[rank], counts[rank + 1] + 1)
    return counts


def frequent_words(task: str, length: int, seed: str) -> Draft:
    """Coded text whose most frequent token is dots; the answers are the three words after it. Units are words."""
    rng = random.Random(seed)
    vocabulary = max(8, (length - 50) // 50)
    coded = words.unique(rng, vocabulary - 1, words.coded_word)
    top = coded[:3]
    intro = (
        "Below is a text of code words and dots. The dots mean nothing. Count how often each code word stands in it."
    )
    question = "Which three code words stand in the text most often?"

    def build(k: int) -> str:
        counts = _zeta_counts(k, vocabulary)
        entries = [word for word, count in zip([_DOTS, *coded], counts, strict=True) for _ in range(count)]
        random.Random(f"{seed}/order").shuffle(entries)
        return f"{intro}\n{' '.join(entries)}\n{question}"

    def promised(k: int) -> dict[str, int]:
        return dict(zip(top, _zeta_counts(k, vocabulary)[1:4], strict=True))

    return Draft(build, promised, tuple(top), " The three code words that stand in the text most often are", least=8)
