"""Readers of official data, on small files made here in the three known shapes; the hub is never asked."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from latent_santa.eval.errors import EvalError
from latent_santa.eval.run.render import Renderer
from latent_santa.eval.sources import Request, choose, family, hub, load_samples
from tests.eval_support import block_network, tokenizer

RENDERER = Renderer(tokenizer())


def new_shape(i: int, task: str) -> dict:
    return {
        "index": 4711,  # the benchmark's needle files repeat or misuse this field
        "input": f"Some text number {i} for {task}.\nWhat is it?",
        "outputs": [f"answer {i}", f"reply {i}"],
        "length": 100,
        "length_w_model_temp": 100,
        "answer_prefix": " It is",
        "token_position_answer": 3,
    }


def old_shape(i: int, task: str) -> dict:
    return {"index": i, "input": f"Some text number {i}.\nWhat is it? It is", "outputs": [f"answer {i}"], "length": 100}


def split_shape(i: int, task: str) -> dict:
    return {
        "context": f"Some text number {i}.\n",
        "question": "What is it? ",
        "answer_prefix": "It is",
        "answer": [f"answer {i}"],
        "task": task,
        "max_new_tokens": 128 if task.startswith("niah") else 32,
    }


def write(directory: Path, task: str, shape, n: int) -> None:
    path = directory / task / "validation.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(shape(i, task)) + "\n" for i in range(n)) + "\n")


def load(data: str, tasks=("niah_single_1", "qa_1"), n=3, length=4096, select="sample", **more):
    return load_samples(Request(data, tasks, n, length, select=select, **more), RENDERER, tiny=False)


@pytest.mark.parametrize("below", ["", "4096", "4096/data", "some-model/synthetic/4096/data"])
def test_new_files_in_every_layout(tmp_path, below):
    for task in ("niah_single_1", "qa_1"):
        write(tmp_path / below, task, new_shape, 5)
    write(tmp_path / "8192", "qa_1", old_shape, 1)  # another length beside it is left alone
    loaded = load(f"jsonl:{tmp_path}", select="first")
    assert [sample.id for sample in loaded.samples[:3]] == [
        "niah_single_1/000000",
        "niah_single_1/000001",
        "niah_single_1/000002",
    ]
    first, last = loaded.samples[0], loaded.samples[-1]
    assert (first.answer_prefix, first.metric, first.max_new_tokens) == (" It is", "all", 128)
    assert (last.task, last.metric, last.max_new_tokens, last.references) == (
        "qa_1",
        "any",
        32,
        ("answer 2", "reply 2"),
    )
    assert loaded.warnings == []
    assert loaded.origin["data"] == "jsonl" and len(loaded.origin["files_sha256"]["qa_1"]) == 64
    assert {sample.source for sample in loaded.samples} == {"jsonl"}


def test_old_files_keep_their_prefix_in_the_input_and_say_so(tmp_path):
    write(tmp_path, "qa_1", old_shape, 3)
    loaded = load(f"jsonl:{tmp_path}", tasks=("qa_1",))
    assert all(sample.answer_prefix == "" and sample.input.endswith("It is") for sample in loaded.samples)
    assert len(loaded.warnings) == 1 and "tail of the input" in loaded.warnings[0]


def test_split_columns_are_joined_to_the_same_prompt(tmp_path):
    write(tmp_path, "niah_single_1", split_shape, 1)
    sample = load(f"jsonl:{tmp_path}", tasks=("niah_single_1",), n=1).samples[0]
    assert sample.input == "Some text number 0.\nWhat is it?"
    assert sample.answer_prefix == " It is"
    assert RENDERER.text(sample.input, sample.answer_prefix).endswith("What is it?<|assistant|> It is")


def test_the_hub_is_read_at_a_resolved_revision(monkeypatch):
    block_network(monkeypatch)
    asked = []

    def fake_load(length: int, revision: str) -> list[dict]:
        asked.append((length, revision))
        return [split_shape(i, task) for task in ("qa_1", "niah_single_1") for i in range(4)]

    monkeypatch.setattr(hub, "load", fake_load)
    monkeypatch.setattr(hub, "resolve_revision", lambda revision, offline: f"{revision}-sha")
    loaded = load("hub", hub_revision="main", length=8192)
    assert asked == [(8192, "main-sha")]
    assert loaded.origin == {"data": "hub", "repository": "simonjegou/ruler", "revision": "main-sha"}
    assert [sample.task for sample in loaded.samples] == ["niah_single_1"] * 3 + ["qa_1"] * 3
    with pytest.raises(EvalError, match="no record of vt.*niah_single_1, qa_1"):
        load("hub", tasks=("vt",))


def test_the_hub_is_asked_for_one_length_at_one_revision(monkeypatch):
    asked = []

    def load_dataset(*words, **options):
        asked.append((words, options))
        return [split_shape(0, "qa_1")]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert hub.load(8192, "abc") == [split_shape(0, "qa_1")]
    assert asked == [(("simonjegou/ruler",), {"data_dir": "8192", "split": "test", "revision": "abc"})]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EvalError, match="pip install"):
        hub.load(8192, "abc")


def test_hub_lengths_and_offline_revision(monkeypatch):
    block_network(monkeypatch)
    with pytest.raises(EvalError, match="4096, 8192, 16384, not 32768.*jsonl:DIR"):
        hub.load(32768, "main")
    assert hub.resolve_revision("main", offline=True) == "main"


def test_selection_is_seeded_ordered_and_named():
    drawn = choose(500, 50, "qa_1", 42, "sample")
    assert drawn == sorted(set(drawn)) and len(drawn) == 50
    assert drawn == choose(500, 50, "qa_1", 42, "sample")
    assert drawn != choose(500, 50, "qa_2", 42, "sample") != choose(500, 50, "qa_2", 43, "sample")
    assert choose(500, 3, "qa_1", 42, "first") == [0, 1, 2]
    with pytest.raises(EvalError, match="--n 6: qa_1 has 5 records"):
        choose(5, 6, "qa_1", 42, "first")


def test_what_is_wrong_with_files_is_said(tmp_path):
    with pytest.raises(EvalError, match="no such directory"):
        load(f"jsonl:{tmp_path / 'none'}")
    with pytest.raises(EvalError, match="no validation.jsonl for qa_1 at length 4096"):
        load(f"jsonl:{tmp_path}", tasks=("qa_1",))
    for model in ("a", "b"):
        write(tmp_path / model / "synthetic/4096/data", "qa_1", new_shape, 3)
    with pytest.raises(EvalError, match="several files for qa_1"):
        load(f"jsonl:{tmp_path}", tasks=("qa_1",))
    path = tmp_path / "a/synthetic/4096/data/qa_1/validation.jsonl"
    path.write_text('{"input": "x"}\n')
    with pytest.raises(EvalError, match="lacks the field 'outputs'.*kvpress"):
        load(f"jsonl:{tmp_path / 'a'}", tasks=("qa_1",), n=1)
    path.write_text('{"input": "x", "outputs": ["y"]}\n{"input": \n')
    with pytest.raises(EvalError, match="line 2: not JSON"):
        load(f"jsonl:{tmp_path / 'a'}", tasks=("qa_1",), n=1)


@pytest.mark.parametrize(
    ("shape", "changed", "said"),
    [
        (new_shape, {"outputs": []}, "references must be non-empty texts"),
        (new_shape, {"outputs": [""]}, "references must be non-empty texts"),
        (new_shape, {"outputs": None}, "answers must be a text or a list of texts, got None"),
        (new_shape, {"outputs": 1000}, "answers must be a text or a list of texts, got 1000"),
        (new_shape, {"input": ""}, "the input is empty"),
        (split_shape, {"max_new_tokens": "many"}, "max_new_tokens must be a number of tokens, got 'many'"),
        (split_shape, {"max_new_tokens": -3}, "max_new_tokens must be at least 1, got -3"),
    ],
)
def test_a_record_that_makes_no_row_is_named(tmp_path, shape, changed, said):
    write(tmp_path, "qa_1", lambda i, task: shape(i, task) | changed, 1)
    with pytest.raises(EvalError, match=f"jsonl: record 0.*{re.escape(said)}"):
        load(f"jsonl:{tmp_path}", tasks=("qa_1",), n=1)


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "qa_1").mkdir()
    path = tmp_path / "qa_1" / "validation.jsonl"
    path.write_bytes('{"input": "é"}'.encode("latin-1"))
    with pytest.raises(EvalError, match=f"{path} is not UTF-8"):
        load(f"jsonl:{tmp_path}", tasks=("qa_1",), n=1)
    path.unlink()
    path.mkdir()
    with pytest.raises(EvalError, match="no validation.jsonl for qa_1"):
        load(f"jsonl:{tmp_path}", tasks=("qa_1",), n=1)


def test_a_template_in_the_data_is_noticed(tmp_path):
    def baked(i, task):
        return new_shape(i, task) | {"input": "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n"}

    write(tmp_path, "qa_1", baked, 3)
    warnings = load(f"jsonl:{tmp_path}", tasks=("qa_1",)).warnings
    assert len(warnings) == 1 and "--no-chat-template" in warnings[0]


def test_families():
    assert (family("builtin", False), family("builtin", True), family("hub", False)) == ("builtin", "tiny", "official")
    with pytest.raises(EvalError, match="choose builtin, hub or jsonl:DIR"):
        family("web", False)
    with pytest.raises(EvalError, match="must be builtin, not hub"):
        family("hub", True)
