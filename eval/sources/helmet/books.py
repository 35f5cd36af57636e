"""HELMET's prompts over books: questions and multiple choice of InfiniteBench, cut with Llama 2's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from latent_santa.eval.errors import EvalError

from .files import Lines, Record
from .items import Item, shuffled

RESERVED = 210  # tokens of a length that HELMET leaves to everything around the book


def open_tokenizer(name: str, offline: bool) -> Any:
    """The tokenizer that books are cut with. Raises EvalError if it cannot be had, or gives no offsets."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=offline, trust_remote_code=False)
    except Exception as error:  # missing files, no network, no licence: no common base
        raise EvalError(
            f"--book-tokenizer {name}: cannot be loaded ({error}); HELMET cuts InfiniteBench's books with that of "
            "Llama 2, so that every model sees the same text: give its folder, or leave the infbench tasks out"
        ) from error
    if not tokenizer.is_fast:
        raise EvalError(f"--book-tokenizer {name}: a slow tokenizer, which does not tell where its tokens stand")
    return tokenizer


def shortened(context: str, tokenizer: Any, tokens: int, postfix: str) -> str:
    """A book of at most `tokens` tokens, with the postfix in the place of what was cut."""
    offsets = tokenizer(context, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    if len(offsets) <= tokens:
        return context
    last = tokens - len(tokenizer(postfix)["input_ids"])
    return context[: offsets[last][1]] + postfix


def questions(
    book: Lines, choice: bool, shots: int, numbers: Sequence[int], texts: dict[str, str], tokenizer: Any, length: int,
    seed: int,
) -> Iterator[Item]:  # fmt: skip
    """Questions on a book (ROUGE), or with four options. Examples are of other books, whose text is left out.

    HELMET also drops books below 65,536 tokens, of which it says that there are none; that is not done here.
    """
    every = [_short(record, choice, texts) for record in book.take(range(len(book)))]
    for number, record in zip(numbers, book.take(numbers), strict=True):
        own = every[number]
        others = [other for other in every if other["id"] != own["id"]]
        shown = "\n\n".join(texts["temp"].format(**others[i]) for i in shuffled(len(others), seed)[:shots])
        demo = texts["demo"].format(demo=shown) if shots else ""
        context = shortened(record["context"], tokenizer, length - RESERVED, texts["postfix_text"])
        parts = {"demo": demo, "question": own["question"], "options": own["options"]}
        yield Item(number, context, parts, tuple(own["answer"]))


def _short(record: Record, choice: bool, texts: dict[str, str]) -> Record:
    """A record without its book; the answers of a choice are its letter, and the letter with the option."""
    answer, options = record["answer"], ""
    if choice:
        letter = "ABCD"[record["options"].index(answer[0])]
        options = texts["options"].format(*record["options"])
        answer = [letter, f"{letter}. {answer[0]}"]
    return {"id": record["id"], "question": record["input"], "answer": answer, "options": options}
