"""HELMET's prompts over documents and pairs: retrieval-augmented answers, reranking, values of a JSON object."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .files import Lines, Record
from .items import Item, examples, text_seed

POPULAR = 3.0  # PopQA keeps questions whose subject has fewer than 10**3 views a month


def rare(record: Record) -> bool:
    """Whether a PopQA question is kept."""
    return math.log10(record["s_pop"]) < POPULAR


def key(record: Record) -> str:
    """What tells one question from another; a file has each several times, its answer in other places."""
    return record[_key_field(record)]


def _key_field(record: Record) -> str:
    return next(name for name in ("qid", "id", "question") if name in record)


def answers(questions: Lines, demos: Sequence[Record], shots: int, numbers: Sequence[int], texts: dict[str, str],
            apart: bool) -> Iterator[Item]:  # fmt: skip
    """NQ, TriviaQA, PopQA, HotpotQA. apart: questions and examples are of one set, so an example is of another key."""

    def passages(record: Record) -> str:
        return "\n\n".join(texts["passage_template"].format(**passage) for passage in record["ctxs"])

    for number, record in zip(numbers, questions.take(numbers), strict=True):
        name = _key_field(record)
        own = [demo for demo in demos if demo[name] != record[name]] if apart else demos
        shown = "".join(
            texts["demo_template"].format(**{**demo, "documents": passages(demo), "answer": demo["answers"][0]})
            + "\n\n"
            for demo in (examples(own, name, text_seed(str(record[name])), shots) if shots else ())
        )
        parts = {"demos": shown, "question": record["question"]}
        yield Item(number, passages(record), parts, _flat(record["answers"]))


def rankings(questions: Lines, demos: Sequence[Record], shots: int, numbers: Sequence[int],
             texts: dict[str, str]) -> Iterator[Item]:  # fmt: skip
    """MS MARCO reranking; the references are the documents' ids with their relevance."""
    form = texts["prompt_template"].partition("{context}")[2]
    asked = [record["qid"] for record in questions.take(numbers)]
    filtered = len(demos) > 2 * len(asked)
    if filtered:
        demos = [demo for demo in demos if demo["qid"] not in set(asked)]
    for number, record in zip(numbers, questions.take(numbers), strict=True):
        passage = texts["passage_template if" if "title" in record["ctxs"][0] else "passage_template"]

        def passages(some: Record, passage: str = passage) -> str:
            return "\n\n".join(passage.format(**document) for document in some["ctxs"])

        def example(demo: Record, passages: Callable[[Record], str] = passages) -> str:
            best = sorted(demo["ctxs"], key=lambda document: document["label"], reverse=True)
            ranking = " > ".join(document["id"] for document in best)
            return f"{passages(demo)}{form.format(question=demo['query'])} {ranking}\n\n"

        own = demos if filtered else [demo for demo in demos if demo["qid"] != record["qid"]]
        chosen = examples(own, "qid", text_seed(record["qid"]), shots) if shots else []
        parts = {"demos": "".join(map(example, chosen)), "question": record["query"]}
        judged = tuple(f"{document['id']} {int(document['label'])}" for document in record["ctxs"])
        yield Item(number, passages(record), parts, judged)


def values(questions: Lines, shots: int, numbers: Sequence[int], texts: dict[str, str]) -> Iterator[Item]:
    """JSON KV: the record holds object, examples and answer."""
    for number, record in zip(numbers, questions.take(numbers), strict=True):
        shown = [texts["demo_template"].format(key=key, value=f" {value}") for key, value in record["demos"][:shots]]
        parts = {"demos": "".join(f"{text}\n\n" for text in shown), "question": record["question"]}
        yield Item(number, record["context"], parts, _flat(record["answer"]))


def _flat(value: Any) -> tuple[str, ...]:
    """Accepted answers of a text, a list of texts, or a list of such lists."""
    if isinstance(value, str):
        return (value,)
    return tuple(text for item in value for text in _flat(item))
