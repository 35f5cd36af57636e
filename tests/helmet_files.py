"""A small folder in the form of a copy of HELMET: made-up questions, and prompt texts of our own in a data.py."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# The forms that HELMET's loaders have, with words of our own.
LOADERS = """
import something_that_is_not_installed  # the file is parsed and never run

def load_qa(dataset, path, demo_path, max_test_samples=None, popularity_threshold=None, shots=0):
    if "nq_bad" in dataset:
        user_template = "never read"
    else:
        user_template = "Answer from these pages.\\n\\n{demos}{context}\\n\\nAsked: {question}"
    system_template = "Answer:"
    prompt_template = user_template + "\\n" + system_template
    if path.endswith(".json"):
        data = load_dataset(path)
    demo_template = "{documents}\\n\\nAsked: {question}\\nAnswer: {answer}"
    passage_template = "Page {title}: {text}"
    return {"data": data, "prompt_template": prompt_template}

def load_json_kv(path, shots, max_test_samples=None, seed=42):
    user_template = "{context}\\n\\nLook this up.\\n\\n{demos}Name: {question}"
    system_template = "Corresponding value:"
    prompt_template = user_template + "\\n" + system_template
    demo_template = "Name: {key}\\nCorresponding value:{value}"

def truncate_llama2(dataset, data, postfix_text=" ... and so on"):
    pass

def load_msmarco_rerank(path, demo_path=None, max_test_samples=None, shots=0, seed=42):
    user_template = "Sort these pages.\\n\\n{demos}{context}\\n\\nWanted: {question}"
    system_template = "Ranking:"
    prompt_template = user_template + "\\n" + system_template
    def update(sample, demos):
        passage_text = ""
        passage_template = "[{id}] {title}: {text}" if "title" in sample["ctxs"][0] else "[{id}] {text}"
    data = map(update)

def load_icl(dataset, max_test_sample=None, seed=42):
    if "trec_fine" in dataset.lower():
        text_field = "text"
        label_field = "fine_label"
    elif "trec_coarse" in dataset.lower():
        text_field = "text"
        label_field = "coarse_label"
    elif "clinic150" in dataset.lower():
        text_field = "text"
        label_field = "intent"
    else:
        text_field = "text"
        label_field = "label"
    item_template = "{text}\\nis {label}"
    user_template = "Say \\"label: {{label}}\\".\\n\\n{context}\\n\\n{question}"
    system_template = "label:"
    prompt_template = user_template + "\\n" + system_template

def load_infbench(dataset, shots=0, max_test_samples=None, seed=42):
    if "qa_eng" in dataset:
        user_template = "Read the book.\\n\\n{demo}{context}\\n\\nAsked: {question}"
        system_template = "Answer:"
    elif "choice_eng" in dataset:
        user_template = "Read the book.\\n\\n{demo}{context}\\n\\nAsked: {question}\\n{options}"
        system_template = "Answer:"
    prompt_template = user_template + "\\n\\n" + system_template
    def process_example(example):
        if "choice" in dataset:
            options = "A. {}\\nB. {}\\nC. {}\\nD. {}".format(*example["options"])
    def add_demos(example):
        if "qa_eng" in dataset:
            temp = "[a book]\\nAsked: {question}\\nAnswer: {answer[0]}"
        elif "choice_eng" in dataset:
            temp = "[a book]\\nAsked: {question}\\n{options}\\nAnswer: {answer[0]}"
        return {"demo": f"Such as:\\n\\n{demo}\\n\\nNow this one:\\n\\n"}
"""


def _lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def pages(rng: random.Random, count: int, words: int = 12) -> list[dict[str, Any]]:
    def text() -> str:
        return " ".join(f"w{rng.randrange(999)}" for _ in range(words))

    return [
        {"id": str(10 + i), "title": f"T{rng.randrange(99)}", "text": text(), "label": rng.randrange(4)}
        for i in range(count)
    ]


def questions(rng: random.Random, name: str, count: int, docs: int, depths: int = 2) -> list[dict[str, Any]]:
    """Every question at several depths, as in HELMET's files."""
    made = []
    for i in range(count):
        record = {"id": f"{name}{i}", "question": f"What of {name} {i}?", "answers": [f"thing {i}", f"item {i}"],
                  "s_pop": 10 ** (i % 5), "ctxs": pages(rng, docs)}  # fmt: skip
        made += [record] * depths
    return made


def rankings(rng: random.Random, name: str, count: int, docs: int) -> list[dict[str, Any]]:
    return [
        {"qid": f"{name}{i // 2}", "query": f"find {name} {i // 2}", "ctxs": pages(rng, docs)} for i in range(count)
    ]


def write(directory: Path) -> Path:
    """All files of the 13 tasks at 8192 tokens."""
    rng = random.Random(5)
    data = directory / "data"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "data.py").write_text(LOADERS)
    for task, depths in (("nq", 6), ("triviaqa", 6), ("hotpotqa", 3)):
        _lines(data / f"kilt/{task}-dev-multikilt_1000_k50_dep{depths}.jsonl", questions(rng, task, 6, 8))
        _lines(data / f"kilt/{task}-train-multikilt_1000_k3_dep{depths}.jsonl", questions(rng, f"{task}-demo", 9, 3))
    _lines(data / "kilt/popqa_test_1000_k50_dep6.jsonl", questions(rng, "popqa", 10, 8))
    _lines(data / "kilt/popqa_test_1000_k3_dep6.jsonl", questions(rng, "popqa", 10, 3))
    _lines(data / "msmarco/test_reranking_data_k50_dep3.jsonl", rankings(rng, "q", 6, 8))
    _lines(data / "msmarco/test_reranking_data_k10_dep3.jsonl", rankings(rng, "q", 24, 4))
    pairs = {f"k{i}": f"v-{i}" for i in range(40)}
    _lines(data / "json_kv/test_k105_dep6.jsonl", (
        {"context": json.dumps(pairs), "question": f"k{i}", "answer": f"v-{i}", "num_kvs": 40,
         "demos": [["k30", "v-30"], ["k31", "v-31"], ["k32", "v-32"]]}
        for i in range(12)
    ))  # fmt: skip

    def texts(count: int, **labels: int) -> list[dict[str, Any]]:
        return [{"text": f"text {rng.randrange(10**6)} {i}"} | {k: rng.randrange(n) for k, n in labels.items()}
                for i in range(count)]  # fmt: skip

    for name, splits, labels in (
        ("trec", ("train", "test"), {"coarse_label": 6, "fine_label": 50}),
        ("banking77", ("train", "test"), {"label": 77}),
        ("clinc_oos", ("train", "validation"), {"intent": 151}),
        ("nlu_evaluation_data", ("train",), {"label": 68}),
    ):
        for split in splits:
            _lines(data / f"icl/{name}/{split}.jsonl", texts(300 if split == "train" else 40, **labels))
    book = " ".join(f"b{i}" for i in range(9000))
    for name in ("qa", "choice"):
        _lines(data / f"infbench/longbook_{name}_eng.jsonl", (
            {"id": i, "context": f"Book {i}. {book}", "input": f"Who is in book {i}?", "answer": [f"name {i}"],
             "options": [f"name {(i + j) % 9}" for j in range(4)]}
            for i in range(5)
        ))  # fmt: skip
    return directory
