"""Scoring of the embedded model's tasks."""

from __future__ import annotations

from collections.abc import Sequence


def share_found(references: Sequence[str], generated: str) -> float:
    """Share (0 to 1) of `references` that occur in the generated text, whatever their case.

    `generated` is the new text alone: neither the prompt nor the answer prefix. Raises ValueError without references.
    """
    if not references:
        raise ValueError("no references to look for")
    text = generated.lower()
    return sum(reference.lower() in text for reference in references) / len(references)
