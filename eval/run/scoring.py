"""Scores of generated text: RULER's two metrics, the fraction of references found and whether any is found."""

from __future__ import annotations

import re
from collections.abc import Sequence

from latent_santa.eval.run import answers
from latent_santa.eval.sources.samples import Metric

_CONTROL = re.compile("[\x00-\x1f]")


def clean(text: str) -> str:
    """Generated text as RULER scores it: control characters become line breaks, outer white space goes."""
    return _CONTROL.sub("\n", text.strip()).strip()


def opening(rendered: str, prefix: str) -> str:
    """The answer prefix, if the rendered prompt ends in it and the answer goes on from there; else nothing."""
    words = prefix.strip()
    return words if words and rendered.endswith(words) else ""


def score(output: str, references: Sequence[str], metric: Metric, opened: str = "") -> float:
    """A score in [0, 1] of newly generated text.

    "all" is the fraction of references found; "any" is 1 if one of them is found, upper and lower case alike. As in
    RULER there are no word boundaries ("10" is found in "1001"), so neither prompt nor prefix may be part of `output`.
    The other metrics are those of `answers`; HELMET's read the prefix that opened the answer (`opened`) with it.
    """
    if metric in answers.METRICS:
        return answers.METRICS[metric](opened + output, references)
    text = clean(output).lower()
    found = [reference.lower() in text for reference in references]
    return float(any(found)) if metric == "any" else sum(found) / len(found)
