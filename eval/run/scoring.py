"""Scores of generated text: the fraction of references found, or whether any is found (RULER's two metrics)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from latent_santa.eval.sources.samples import Metric

_CONTROL = re.compile("[\x00-\x1f]")


def clean(text: str) -> str:
    """Generated text as it is scored: control characters become line breaks, outer white space goes."""
    return _CONTROL.sub("\n", text.strip()).strip()


def score(output: str, references: Sequence[str], metric: Metric) -> float:
    """A score in [0, 1]: case-insensitive substring tests on newly generated text only.

    "all" is the fraction of references found; "any" is 1 if one of them is found. As in the benchmark there are no
    word boundaries ("10" is found in "1001"), so the prompt and the answer prefix must never be part of `output`.
    """
    text = clean(output).lower()
    found = [reference.lower() in text for reference in references]
    return float(any(found)) if metric == "any" else sum(found) / len(found)
