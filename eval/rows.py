"""One evaluation prompt before it is rendered for a model: what every source of prompts yields."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Metric = Literal["all", "any"]


@dataclass(frozen=True)
class Row:
    """One prompt and what counts as a right answer to it.

    id             "task/000017": the task and the sample's number in its source, never a field of the source
    input          text of the user's turn, context and question together
    answer_prefix  words that the answer is started with (may be empty; may begin with a space)
    references     accepted answers; `metric` "all" scores the fraction found, "any" scores 1 if one is found
    max_new_tokens cap on generated tokens
    source         where the row comes from, for example "builtin" or "jsonl"
    text_sha256    hash of everything above that a model or a scorer sees
    """

    id: str
    task: str
    input: str
    answer_prefix: str
    references: tuple[str, ...]
    metric: Metric
    max_new_tokens: int
    source: str
    text_sha256: str


def make_row(
    task: str,
    number: int,
    input: str,
    references: Iterable[str],
    *,
    answer_prefix: str = "",
    metric: Metric = "all",
    max_new_tokens: int,
    source: str,
) -> Row:
    """Build a `Row` with its id and hash.

    Raises ValueError for an empty input, no reference, an empty reference (it would be found in any output),
    an unknown metric or a cap below one token.
    """
    row_id = f"{task}/{number:06d}"
    texts = tuple(str(reference) for reference in references)
    if not input.strip():
        raise ValueError(f"{row_id}: the input is empty")
    if not texts or not all(text.strip() for text in texts):
        raise ValueError(f"{row_id}: references must be non-empty texts, got {texts!r}")
    if metric not in ("all", "any"):
        raise ValueError(f"{row_id}: metric must be 'all' or 'any', got {metric!r}")
    if max_new_tokens < 1:
        raise ValueError(f"{row_id}: max_new_tokens must be at least 1, got {max_new_tokens}")
    seen = [task, input, answer_prefix, list(texts), metric, max_new_tokens]
    digest = hashlib.sha256(json.dumps(seen, ensure_ascii=True).encode()).hexdigest()
    return Row(row_id, task, input, answer_prefix, texts, metric, max_new_tokens, source, digest)


def row_to_dict(row: Row) -> dict[str, Any]:
    """The row as JSON types."""
    return asdict(row) | {"references": list(row.references)}


def row_from_dict(data: dict[str, Any]) -> Row:
    """The inverse of `row_to_dict`; other keys are ignored. Raises ValueError if the text does not match its hash."""
    row = make_row(
        data["task"],
        int(data["id"].rpartition("/")[2]),
        data["input"],
        data["references"],
        answer_prefix=data["answer_prefix"],
        metric=data["metric"],
        max_new_tokens=data["max_new_tokens"],
        source=data["source"],
    )
    if (row.id, row.text_sha256) != (data["id"], data["text_sha256"]):
        raise ValueError(f"row {data['id']}: its text does not match its stored hash")
    return row
