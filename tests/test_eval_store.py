"""Files of a run: atomic writes, appended results, crashes in the middle of a line, several processes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from latent_santa.eval.errors import EvalError
from latent_santa.eval.run import locks
from latent_santa.eval.run import store as store_module
from latent_santa.eval.run.locks import run_lock
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
    made = {"id": sample.id, "run": store.manifest()["key"], "text_sha256": sample.text_sha256, "score": i / 4}
    made |= {"output": "text", "n_new": 3, "hit_cap": False, "sparse_calls": 3, "access": {"numerator": 5}}
    return made | more


def test_write_atomic_replaces_or_leaves_alone(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "file.txt"
    write_atomic(path, "old")
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_pipes_and_links_are_written_to_and_stay(tmp_path):
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(pipe, "through")
    assert os.read(reader, 100) == b"through" and pipe.is_fifo()
    os.close(reader)
    file.write_text("old")
    link.symlink_to(file)
    write_atomic(link, "new")
    assert link.is_symlink() and file.read_text() == "new"


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


def test_a_merge_keeps_results_of_other_runs_and_conditions(store):
    for other in ({"run": "another"}, {"condition": "santa_s16"}):
        store.append("dense", result(store, 1, **other))
    store.append("dense", result(store, 0))
    store.merge("dense")
    lines = [json.loads(line) for line in (store.results_directory / "dense.jsonl").read_text().splitlines()]
    assert lines == [
        result(store, 0),
        result(store, 1, run="another"),
        result(store, 1, condition="santa_s16"),
    ]


def test_a_result_added_during_a_merge_waits_and_is_kept(store, monkeypatch):
    """The other process arrives after the merge has read the file, and before it has put the new one in place."""
    for i in (0, 1):
        Store(store.directory, i, 2).append("dense", result(store, i))
    adding = threading.Thread(target=Store(store.directory, 1, 2).append, args=("dense", result(store, 2)))
    write = store_module.write_atomic

    def late(path, content):
        adding.start()
        adding.join(0.2)
        assert adding.is_alive()
        write(path, content)

    monkeypatch.setattr(store_module, "write_atomic", late)
    store.merge("dense")
    adding.join()
    assert set(store.results("dense")) == {"qa/000000", "qa/000001", "qa/000002"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"score": float("nan")}, "score is nan"),
        ({"score": "0.5"}, "score is '0.5'"),
        ({"score": 75}, "score is 75"),
        ({"hit_cap": "no"}, "hit_cap is 'no'"),
        ({"access": [1]}, "access is [1]"),
        ({"access": {"numerator": "many"}}, "access is {'numerator': 'many'}"),
        ({"sparse_calls": None}, "sparse_calls is None"),
        ({"error": 5}, "error is no text"),
        ({"condition": "santa_s16"}, "they are of 'santa_s16', so the file was renamed"),
    ],
)
def test_a_damaged_result_does_not_count_and_is_named(store, more, said):
    store.append("dense", result(store, 0, **more))
    store.append("dense", result(store, 1))
    assert set(store.results("dense")) == {"qa/000001"}
    assert store.damaged() == [f"dense.jsonl: 1 results do not count: {said}"]


def test_a_damaged_manifest_is_refused_in_words(tmp_path, store):
    good = store.manifest()

    def refusal(content) -> str:
        store.manifest_path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        with pytest.raises(EvalError) as caught:
            Store(tmp_path).manifest()
        return str(caught.value)

    assert "is not JSON ('utf-8' codec can't decode" in refusal(b"\xff\xfe{}")
    assert "format 2; this version reads 1; a newer version of latent-santa wrote it" in refusal(good | {"format": 2})
    assert "has format 'x'; this version reads 1" in refusal(good | {"format": "x"})
    assert "its settings is [1], not a dict" in refusal(good | {"settings": [1]})
    assert "its conditions is 'all', not a list" in refusal(good | {"conditions": "all"})
    store.manifest_path.unlink()
    store.manifest_path.mkdir()
    with pytest.raises(EvalError, match="manifest.json cannot be read: Is a directory"):
        Store(tmp_path).manifest()
    assert Store(tmp_path).frozen


def test_a_full_disk_is_named_with_its_file(store, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store.append("dense", result(store, 0))
    monkeypatch.setattr(os, "fsync", full)
    for write in (lambda: store.append("dense", result(store, 1)), lambda: write_atomic(store.directory / "x", "y")):
        with pytest.raises(OSError, match="No space left on device: '.*(dense.jsonl|x)'"):
            write()
    assert "qa/000000" in store.results("dense") and not (store.directory / "x").exists()


HOLDER = """
import sys, time
from pathlib import Path
from latent_santa.eval.run.locks import run_lock
with run_lock(Path(sys.argv[1]), True):
    print("held", flush=True)
    time.sleep(600)
"""


def test_one_process_holds_a_run_until_it_ends(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(EvalError, match=f"is being written to by process {holder.pid} on .* since "):
            with run_lock(tmp_path, True):
                pass
    finally:
        holder.kill()  # as a crash does: the lock ends with its process, its file stays
        holder.wait()
        holder.stdout.close()
    assert [path.name for path in tmp_path.iterdir()] == [locks.NAME]
    with run_lock(tmp_path, True) as note:
        assert note is None
    assert list(tmp_path.iterdir()) == []


def test_a_system_without_locks_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "fcntl", None)
    with run_lock(tmp_path / "run", True) as note:
        assert note.startswith("this system has no file locks: let no other process write to")
    assert not (tmp_path / "run").exists()
