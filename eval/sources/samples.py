"""One prompt of the evaluation before it is rendered for a model: what every source of prompts yields."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Metric = Literal["all", "any", "substring", "exact", "rouge_l", "option", "ndcg_10", "letter"]
METRICS: tuple[str, ...] = get_args(Metric)


@dataclass(frozen=True)
class Sample:
    """One prompt and what counts as a right answer to it.

    id             "task/000017": the task and the sample's number in its source, never a field of the source
    input          text of the user's turn, context and question together
    answer_prefix  words that the answer is started with (may be empty; may begin with a space)
    references     accepted answers, as the `metric` reads them (`scoring.py`, `answers.py`)
    max_new_tokens cap on generated tokens
    source         where the sample comes from, for example "builtin" or "jsonl"
    text_sha256    hash of everything here that a model or a scorer sees
    chat           whether the input goes through the chat template, in a run that uses one
    stop           an answer ends at a token that is one of these texts
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
    chat: bool = True
    stop: tuple[str, ...] = ()

    @property
    def wanted(self) -> str:
        """The references as a reader should see them: of a ranking the relevant documents, best first."""
        if self.metric != "ndcg_10":
            return ", ".join(self.references)
        judged = [(name, int(gain)) for name, gain in (text.rsplit(" ", 1) for text in self.references)]
        return " > ".join(name for name, gain in sorted(judged, key=lambda pair: -pair[1]) if gain > 0)

    @property
    def findable(self) -> tuple[str, ...]:
        """The references, where a right answer holds them as they are."""
        return self.references if self.metric in ("all", "any", "substring") else ()


def make_sample(
    task: str,
    number: int,
    input: str,
    references: Iterable[str],
    *,
    answer_prefix: str = "",
    metric: Metric = "all",
    max_new_tokens: int,
    source: str,
    chat: bool = True,
    stop: Iterable[str] = (),
) -> Sample:
    """Build a `Sample` with its id and hash.

    Raises ValueError for an empty input, no reference, an empty reference (it would be found in any output),
    an unknown metric or a cap below one token.
    """
    sample_id = f"{task}/{number:06d}"
    texts = tuple(str(reference) for reference in references)
    if not input.strip():
        raise ValueError(f"{sample_id}: the input is empty")
    if not texts or not all(text.strip() for text in texts):
        raise ValueError(f"{sample_id}: references must be non-empty texts, got {texts!r}")
    if metric not in METRICS:
        raise ValueError(f"{sample_id}: metric must be one of {', '.join(METRICS)}, got {metric!r}")
    if max_new_tokens < 1:
        raise ValueError(f"{sample_id}: max_new_tokens must be at least 1, got {max_new_tokens}")
    seen = [task, input, answer_prefix, list(texts), metric, max_new_tokens]
    ends = tuple(stop)
    if not chat or ends:  # samples without these had their hashes before there were any
        seen += [chat, list(ends)]
    digest = hashlib.sha256(json.dumps(seen, ensure_ascii=True).encode()).hexdigest()
    return Sample(sample_id, task, input, answer_prefix, texts, metric, max_new_tokens, source, digest, chat, ends)


def sample_to_dict(sample: Sample) -> dict[str, Any]:
    """The sample as JSON types."""
    return asdict(sample) | {"references": list(sample.references), "stop": list(sample.stop)}


def sample_from_dict(data: dict[str, Any]) -> Sample:
    """The inverse of `sample_to_dict`; ignores other keys. Raises ValueError if the text does not match its hash."""
    sample = make_sample(
        data["task"],
        int(data["id"].rpartition("/")[2]),
        data["input"],
        data["references"],
        answer_prefix=data["answer_prefix"],
        metric=data["metric"],
        max_new_tokens=data["max_new_tokens"],
        source=data["source"],
        chat=data.get("chat", True),
        stop=data.get("stop", ()),
    )
    if (sample.id, sample.text_sha256) != (data["id"], data["text_sha256"]):
        raise ValueError(f"sample {data['id']}: its text does not match its stored hash")
    return sample


def join_texts(left: str, right: str) -> str:
    """`left + right` with exactly one break between the words of the two.

    The leading white space of `right` is dropped where `left` ends in white space and kept elsewhere (some templates
    end in "Assistant:" and need it).
    """
    return left + (right.lstrip() if left[-1:].isspace() else right)
