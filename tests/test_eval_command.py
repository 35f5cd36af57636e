"""The command from end to end on a random model: offline, resumed after a kill, spread over processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from latent_santa.eval.cli import main
from tests.eval_support import OPTIONS, block_network, finished_run, results, save_random_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save_random_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model) -> Path:
    return finished_run(tmp_path_factory.mktemp("runs") / "finished", model)


def test_a_run_leaves_its_files_without_the_network(tmp_path, model, monkeypatch, capsys):
    block_network(monkeypatch)
    out = tmp_path / "run"
    assert main(["ruler", "--model", model, *OPTIONS, "--offline", "--out", str(out)]) == 0
    names = {path.name for path in out.iterdir()}
    assert names == {
        "manifest.json",
        "prompts.jsonl",
        "results",
        "summary.json",
        "summary.csv",
        "answers.csv",
        "table.md",
        "access_accuracy.png",
    }
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["settings"]["data_seed"] == 42 and manifest["environment"]["torch"]
    assert len(manifest["prompt_ids"]) == 6
    found = results(out)
    assert {name: len(lines) for name, lines in found.items()} == {
        "dense.jsonl": 6,
        "santapp_contiguous_16-4_pooled_s16.jsonl": 6,
        "santapp_contiguous_16-4_pooled_s32.jsonl": 6,
    }
    for line in found["santapp_contiguous_16-4_pooled_s32.jsonl"]:
        access = line["access"]
        assert line["sparse_calls"] == line["n_new"] > 0
        assert access["numerator"] == access["routing"] + access["union"] + access["suffix"]  # Equation 14
        assert access["denominator"] == access["dense"] > 0
    summary = json.loads((out / "summary.json").read_text())
    accesses = [row["cells"]["mean"]["access"] for row in summary["conditions"]]
    assert accesses[0] == 100 and accesses[1] < accesses[2]
    shown = capsys.readouterr().out
    assert "not RULER scores" in shown and "dense" in shown and "mean of 2 tasks" in shown


def test_report_rebuilds_without_a_model(finished, monkeypatch, capsys):
    from latent_santa.eval.run import models

    before = {name: (finished / name).read_bytes() for name in ("summary.json", "table.md", "access_accuracy.png")}
    monkeypatch.setattr(models, "load", None)
    monkeypatch.setattr(models, "load_tokenizer", None)
    for name in before:
        (finished / name).unlink()
    assert main(["report", str(finished)]) == 0
    assert {name: (finished / name).read_bytes() for name in before} == before
    assert main(["paper", str(finished), "--table", "15-18"]) == 0
    assert "does not hold" in capsys.readouterr().out


# Starts the command twice in children of one process (imports take longest) and kills it: before the manifest is in
# place, and in the middle of the eighth result, whose line is cut. Prints how the children ended.
KILLED = """
import os, signal, sys
import latent_santa.patches
from latent_santa.eval.commands import evaluate
from latent_santa.eval.run import store
from latent_santa.eval.cli import main
append, replace = store.Store.append, os.replace
left = 8
def append_and_die(self, slug, result):
    global left
    left -= 1
    append(self, slug, result)
    if not left:
        path = self._own_path(slug)
        path.write_bytes(path.read_bytes()[:-20])
        os.kill(os.getpid(), signal.SIGKILL)
def die_before_the_manifest(old, new):
    if str(new).endswith("manifest.json"):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(old, new)
for owner, name, deadly in ((os, "replace", die_before_the_manifest), (store.Store, "append", append_and_die)):
    child = os.fork()
    if not child:
        setattr(owner, name, deadly)
        os._exit(main(sys.argv[1:]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_killed_run_resumes_to_the_same_summary(tmp_path, model, finished):
    out = tmp_path / "run"
    command = ["ruler", "--model", model, *OPTIONS, "--out", str(out), "--resume"]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *command],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert killed.stdout.split() == ["-9", "-9"], killed.stderr
    assert not (out / "summary.json").exists()
    left = [path.read_bytes() for path in sorted((out / "results").iterdir())]
    assert [content.count(b"\n") for content in left] == [3, 2, 2] and not left[1].endswith(b"\n")
    assert main(command) == 0
    for name in ("summary.json", "table.md", "summary.csv"):
        assert (out / name).read_bytes() == (finished / name).read_bytes()
    assert results(out) == results(finished)
    assert {path.name for path in out.rglob("*")} == {path.name for path in finished.rglob("*")}


def test_changed_settings_are_refused_by_name(tmp_path, model, finished, capsys):
    def refused(*options, resume=True) -> str:
        words = ["ruler", "--model", model, *OPTIONS, "--out", str(finished), *options]
        assert main(words + (["--resume"] if resume else [])) == 2
        return capsys.readouterr().err

    before = (finished / "manifest.json").read_bytes()
    assert "--resume continues it" in refused(resume=False)
    assert "n: 3 then, 4 now" in refused("--n", "4")
    text = refused("--seed", "1", "--answer-prefix", "none")
    assert "batch_size: 1 then, 2 now" in refused("--batch-size", "2")
    assert "seed: 0 then, 1 now" in text and "answer_prefix: 'assistant' then, 'none' now" in text
    assert "S=32: part of the run then, not asked for now" in refused("--budgets", "16")
    assert (finished / "manifest.json").read_bytes() == before


def test_settings_of_the_method_may_be_added(tmp_path, model, finished):
    import shutil

    out = tmp_path / "run"
    shutil.copytree(finished, out)
    # a run of before there were batches had one prompt at a time
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["settings"].pop("batch_size") == 1
    (out / "manifest.json").write_text(json.dumps(manifest))
    words = ["ruler", "--model", model, *OPTIONS, "--out", str(out), "--resume", "--budgets", "16,32,64"]
    assert main(words) == 0
    rows = json.loads((out / "summary.json").read_text())["conditions"]
    assert [row["S"] for row in rows] == [None, 16, 32, 64]
    assert rows[:3] == json.loads((finished / "summary.json").read_text())["conditions"]


def test_processes_write_each_result_once(tmp_path, model, finished):
    out = tmp_path / "run"
    options = ["--prompts" if word == "--n" else word for word in OPTIONS]
    command = ["-m", "latent_santa.eval", "ruler", "--model", model, *options, "--device", "cpu", "--out", str(out)]
    launched = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", *command],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert launched.returncode == 0, launched.stderr
    assert results(out) == results(finished)
    assert (out / "summary.json").read_bytes() == (finished / "summary.json").read_bytes()


def test_dry_run_loads_no_model_and_writes_nothing(tmp_path, model, monkeypatch, capsys):
    from latent_santa.eval.run import models

    monkeypatch.setattr(models, "load", None)
    monkeypatch.chdir(tmp_path)
    assert main(["ruler", "--model", model, *OPTIONS, "--dry-run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "niah_single_1" in shown and "3 settings x 6 prompts" in shown and "4096 positions" in shown
    assert "time: not known before the model is loaded" in shown
    assert list(tmp_path.iterdir()) == []


def test_dry_run_times_one_prompt_of_the_embedded_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = "ruler --model builtin:tiny --dry-run --tasks all --n 2 --length 400 --budgets 8,32 --estimators pooled"
    assert main(words.split()) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the tiny model's own grammar" in shown and "3 settings x 14 prompts" in shown
    new = int(re.search(r"at most ([\d,]+) to generate", shown)[1].replace(",", ""))
    found = re.search(r"about ([\d.]+) minutes, from ([\d.]+) s of prefill and ([\d.]+) ms per new token", shown)
    minutes, prefill, token = map(float, found.groups())
    assert token > 0 and minutes == pytest.approx((14 * prefill + new * token / 1000) / 60, abs=0.06)
    rows = re.search(r"at most ([\d,]+) per layer, (\d+) MiB", shown).groups()
    assert 300 < int(rows[0]) <= 400 and int(rows[1]) == round(int(rows[0]) * 6 * 160 * 4 / 2**20)
    assert list(tmp_path.iterdir()) == []
