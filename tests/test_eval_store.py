"""Files of a run: atomic writes, appended results, crashes in the middle of a line, several processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from latent_santa.eval.errors import EvalError
from latent_santa.eval.run.store import Prompt, Store, differences, write_atomic
from latent_santa.eval.sources.samples import make_sample

PROMPTS = [
    Prompt(make_sample("qa", i, f"Question {i}?", [f"answer {i}"], max_new_tokens=4, source="test"), 10 + i, f"hash{i}")
    for i in range(4)
]


@pytest.fixture
def store(tmp_path) -> Store:
    made = Store(tmp_path)
    made.freeze({"settings": {"n": 4}, "conditions": []}, PROMPTS)
    return made


def result(store: Store, i: int, **more) -> dict:
    sample = PROMPTS[i].sample
    return {"id": sample.id, "run": store.manifest()["key"], "text_sha256": sample.text_sha256, "score": i / 4} | more


def test_write_atomic_replaces_or_leaves_alone(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "file.txt"
    write_atomic(path, "old")
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_prompts_are_frozen_before_the_manifest(tmp_path, monkeypatch):
    store = Store(tmp_path)
    assert not store.frozen
    with pytest.raises(EvalError, match="holds no run"):
        store.manifest()
    order = []
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (order.append(Path(new).name), real(old, new)))
    store.freeze({"settings": {}, "conditions": []}, PROMPTS)
    assert order == ["prompts.jsonl", "manifest.json"]
    assert Store(tmp_path).prompts() == PROMPTS


def test_changed_prompts_are_noticed(store):
    text = store.prompts_path.read_text()
    store.prompts_path.write_text(text.replace("Question 2", "Question 3"))
    with pytest.raises(EvalError, match="hash differs"):
        Store(store.directory).prompts()
    store.prompts_path.unlink()
    with pytest.raises(EvalError, match="has no prompts.jsonl"):
        Store(store.directory).prompts()


@pytest.mark.parametrize(
    ("text", "said"), [("[]", "has format None"), ('{"format": 1}', "it lacks key, prompts_sha256")]
)
def test_another_file_of_the_manifests_name_is_refused(tmp_path, text, said):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(EvalError, match=said):
        Store(tmp_path).manifest()


def test_key_follows_settings_and_prompts(tmp_path, store):
    other = Store(tmp_path / "b")
    other.freeze({"settings": {"n": 5}, "conditions": []}, PROMPTS)
    third = Store(tmp_path / "c")
    third.freeze({"settings": {"n": 4}, "conditions": [{"method": "dense"}]}, PROMPTS)
    assert other.manifest()["key"] != store.manifest()["key"] == third.manifest()["key"]


@pytest.mark.parametrize("broken", [b'{"id": "qa/0000', b'{"id": "qa/000003", "run": 1}', b"\x00\x00\x00"])
def test_a_line_cut_by_a_crash_is_dropped_and_cut_off(store, broken):
    store.append("dense", result(store, 0))
    path = store.results_directory / "dense.jsonl"
    with path.open("ab") as file:
        file.write(broken)
    assert set(store.results("dense")) == {"qa/000000"}
    store.append("dense", result(store, 1))
    assert set(store.results("dense")) == {"qa/000000", "qa/000001"}
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["qa/000000", "qa/000001"]


def test_a_line_counts_only_with_its_end(store):
    # What is counted and what is cut off before the next result must agree.
    store.append("dense", result(store, 0))
    path = store.results_directory / "dense.jsonl"
    with path.open("ab") as file:
        file.write(json.dumps(result(store, 1)).encode())
    assert set(store.results("dense")) == {"qa/000000"}
    store.append("dense", result(store, 2))
    assert set(store.results("dense")) == {"qa/000000", "qa/000002"}


def test_a_file_with_only_a_broken_line_is_emptied(store):
    path = store.results_directory / "dense.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"id"')
    store.append("dense", result(store, 2))
    assert len(path.read_text().splitlines()) == 1


def test_results_of_other_runs_and_other_texts_do_not_count(store):
    store.append("dense", result(store, 0, run="another"))
    store.append("dense", result(store, 1, text_sha256="another"))
    store.append("dense", result(store, 2, id="qa/000009"))
    store.append("dense", result(store, 3))
    assert set(store.results("dense")) == {"qa/000003"}


def test_a_later_success_replaces_a_failure_and_never_the_other_way(store):
    store.append("dense", result(store, 0, error="out of memory"))
    assert "error" in store.results("dense")["qa/000000"]
    store.append("dense", result(store, 0))
    store.append("dense", result(store, 0, error="out of memory"))
    assert "error" not in store.results("dense")["qa/000000"]


def test_processes_write_their_own_files_and_one_merges(store):
    workers = [Store(store.directory, rank, 3) for rank in range(3)]
    for i in (3, 1, 0, 2):
        workers[i % 3].append("dense", result(store, i))
    store.append("dense_other", result(store, 0))
    assert sorted(path.name for path in store.results_directory.glob("dense.*")) == [
        f"dense.rank{r}.jsonl" for r in range(3)
    ]
    workers[0].merge("dense")
    assert [path.name for path in store.results_directory.glob("dense.*")] == ["dense.jsonl"]
    lines = (store.results_directory / "dense.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [prompt.sample.id for prompt in PROMPTS]
    assert set(store.results("dense_other")) == {"qa/000000"}
    workers[0].merge("nothing")
    assert not (store.results_directory / "nothing.jsonl").exists()


def test_differences_name_what_changed():
    old = {"n": 4, "seed": 0, "weights": {"commit": "a", "x": 1}}
    new = {"n": 5, "weights": {"commit": "b", "x": 1}, "dtype": "float32"}
    assert differences(old, new) == [
        "dtype: None then, 'float32' now",
        "n: 4 then, 5 now",
        "seed: 0 then, None now",
        "weights.commit: 'a' then, 'b' now",
    ]
    assert differences(old, old) == []
