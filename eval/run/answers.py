"""Metrics of HELMET's tasks and of LongBench v2: each takes an answer and its references, and gives a score in [0, 1].

HELMET reads an answer twice, as it is and as its parsed line (`parsed`), and takes the better score. The answer starts
with the prefix that opened it in the prompt.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from latent_santa.eval.errors import EvalError

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_RANKING = re.compile(r"\d+(?:\s*>\s*\d+)*")
_LETTERS = (re.compile(r"(?i:final answer:)\s*[\[(]?([A-D])\b"), re.compile(r"The correct answer is \(?([A-D])\b"))


def normal(text: str) -> str:
    """Lower case, without punctuation and English articles, words one space apart."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def parsed(answer: str, prefix: str = "answer") -> str:
    """What follows the first "answer:" on its line (it may stand there twice); without one, the first line."""
    found = re.search(rf"{prefix}:[^\S\n]*(?:{prefix}:)?(.*)", answer, re.IGNORECASE)
    return (found[1] if found else answer.split("\n", 1)[0]).strip()


def _better(one: Callable[[str, str], float]) -> Callable[[str, Sequence[str]], float]:
    """The best score over both readings of the answer and all references."""

    def metric(answer: str, references: Sequence[str]) -> float:
        return max(float(one(text, wanted)) for text in (answer, parsed(answer)) for wanted in references)

    return metric


def exact(answer: str, references: Sequence[str]) -> float:
    """Whether the line after "label:" is a reference, both normal."""
    return float(any(normal(parsed(answer, "label")) == normal(wanted) for wanted in references))


def option(answer: str, references: Sequence[str]) -> float:
    """Multiple choice: the answer is a reference, both normal, or holds the last one, letter and text, as it is."""
    whole = references[-1].lower() in answer.lower()
    return float(whole or _better(lambda text, wanted: normal(text) == normal(wanted))(answer, references))


@cache
def _rouge() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise EvalError("ROUGE needs the package rouge-score: pip install 'latent-santa[helmet]'") from error
    return RougeScorer(["rougeL"], use_stemmer=True)


def check_rouge() -> None:
    """Raises EvalError where ROUGE cannot be computed."""
    _rouge()


def ranked(answer: str) -> list[str]:
    """Document ids in the longest chain such as "3 > 1 > 2", each at its first place."""
    text = re.sub(r"[\[\]:]", "", answer).lower().replace("id", "")
    chains = [found[0] for found in _RANKING.finditer(text)]
    return list(dict.fromkeys(part.strip() for part in max(chains, key=len, default="").split(">") if part.strip()))


def ndcg_10(answer: str, references: Sequence[str]) -> float:
    """NDCG@10 of a ranking, linear gains over log2(1 + place), as trec_eval has it.

    references  "ID RELEVANCE" for each judged document
    """
    gains = {name: int(gain) for name, gain in (wanted.rsplit(" ", 1) for wanted in references)}

    def total(values: Sequence[int]) -> float:
        return sum(max(0, value) / math.log2(place + 1) for place, value in enumerate(values[:10], start=1))

    best = total(sorted(gains.values(), reverse=True))
    return total([gains.get(name, 0) for name in ranked(answer)]) / best if best else 0.0


def chosen_letter(answer: str) -> str | None:
    """The last letter in the form "Final Answer: [X]"; without one, in LongBench's own "The correct answer is (X)"."""
    text = answer.replace("*", "")
    for pattern in _LETTERS:
        if found := pattern.findall(text):
            return found[-1]
    return None


METRICS: Mapping[str, Callable[[str, Sequence[str]], float]] = {
    "substring": _better(lambda text, wanted: normal(wanted) in normal(text)),
    "exact": exact,
    "rouge_l": _better(lambda text, wanted: _rouge().score(target=wanted, prediction=text)["rougeL"].fmeasure),
    "option": option,
    "ndcg_10": ndcg_10,
    "letter": lambda answer, references: float(chosen_letter(answer) in references),
}
