"""What the command refuses, in words and before anything long begins, and what it says when it is stopped."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from latent_santa.eval.cli import main
from tests.eval_support import OPTIONS, finished_run, results, save_random_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save_random_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model) -> Path:
    return finished_run(tmp_path_factory.mktemp("runs") / "finished", model)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tasks", "niah_single_9"], "unknown task 'niah_single_9'"),
        (["--data", "web"], "choose builtin, hub or jsonl:DIR"),
        (["--data", "helmet:DIR"], "these prompts have a command of their own, latent-santa helmet"),
        (["--methods", "dense,magic"], "unknown method 'magic'"),
        (["--budgets", "10"], "divisible by P/R"),
        (["--budgets-of", "quest"], "'quest' is not METHOD=S,S,..., such as quest=256,512"),
        (["--budgets-of", "quest=64,"], "'quest=64,' is not METHOD=S,S,..., such as quest=256,512"),
        (["--budgets-of", "quest=64"], "--budgets-of quest: it is not among --methods dense,santa++: add it there"),
        (["--budgets-of", "dense=64"], "--budgets-of dense: it has no budget: leave the option out"),
        (["--budgets", "many"], "'many': give values separated by commas, such as 128,256"),
        (["--budgets", ","], "argument --budgets: ','"),
        (["--teams", "16"], "argument --teams: '16': give values separated by commas, such as 16/4,16/1"),
        (["--teams", "16/4", "--parent-size", "8"], "--teams replaces --parent-size"),
        (["--parent-size", "0"], "must be at least 1"),
        (["--floor", "nan"], "--floor must be a score from 0 to 100 percent, got nan"),
        (["--data-seed", "-1"], "--data-seed must be at least 0, got -1"),
        (["--context-limit", "0"], "--context-limit must be at least 1, got 0"),
        (["--device", "foo"], "--device foo: supported are auto and cpu"),
        (["--device", "mps"], "--device mps: PyTorch sees no such device here"),
        (["--tensor-parallel"], "one process was started, so there is nothing to spread"),
        (["--device-map", "foo"], "--device-map foo: supported are auto, balanced"),
        (["--methods", "centroid", "--budgets", "8"], "use a larger S or a smaller B"),
        (["--length", "9999"], "exceeds the model's limit of 4096"),
        (["--length", "0"], "at least 1"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--length", "64"], "too short for niah_single_1"),
        (["--haystack", "file:/nowhere"], "cannot read"),
    ],
)
def test_wrong_options_are_refused_before_work_starts(tmp_path, model, monkeypatch, capsys, options, said):
    from latent_santa.eval.run import models

    monkeypatch.setattr(models, "load", None)
    assert code_of(["ruler", "--model", model, *OPTIONS, "--out", str(tmp_path / "run"), *options]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def code_of(arguments: list[str]) -> int:
    """The exit code, also where argparse leaves by itself."""
    try:
        return main(arguments)
    except SystemExit as left:
        return int(left.code or 0)


def test_an_out_that_cannot_be_made_is_refused_before_prompts_are_built(tmp_path, model, monkeypatch, capsys):
    from latent_santa.eval.run import freeze

    monkeypatch.setattr(freeze, "make_prompts", None)
    (tmp_path / "file").touch()
    for out in ("file", "file/run", "n" * 300):
        assert main(["ruler", "--model", model, *OPTIONS, "--out", str(tmp_path / out)]) == 2
        assert "cannot be written to (" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("command", "name", "said"),
    [
        (["compare", "--json"], ".", "give a file in an existing directory"),
        (["compare", "--json"], "none/a.json", "give a file in an existing directory"),
        (["compare", "--json"], "a.json", "cannot be written (Read-only file system); give another file"),
        (["recommend", "--keep", "95", "--save"], "a.json", "cannot be written (Read-only file system); give another"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_work(
    tmp_path, model, monkeypatch, capsys, command, name, said
):
    from latent_santa.eval.run import models, store

    def read_only(dir):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(models, "load_config", None)
    monkeypatch.setattr(store.tempfile, "TemporaryFile", read_only)
    path = tmp_path / name
    assert main([command[0], "--model", model, *command[1:], str(path)]) == 2
    assert f"{command[-1]} {path}: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_model_that_cannot_be_patched_is_refused_before_prompts_are_built(tmp_path, monkeypatch, capsys, dry):
    from transformers import AutoTokenizer, MistralConfig

    from latent_santa.eval.run import freeze
    from tests.eval_support import save_random_model

    directory = save_random_model(tmp_path / "model")
    assert AutoTokenizer.from_pretrained(directory)
    MistralConfig(sliding_window=64, num_hidden_layers=1, max_position_embeddings=4096).save_pretrained(directory)
    monkeypatch.setattr(freeze, "make_prompts", None)
    assert main(["ruler", "--model", str(directory), *OPTIONS, "--out", str(tmp_path / "out"), *dry]) == 2
    assert "attends through a sliding window of 64 rows" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_without_results_begins_anew_with_other_settings(tmp_path, model, finished, capsys):
    import shutil

    out = tmp_path / "run"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "results")
    words = ["ruler", "--model", model, *OPTIONS, "--out", str(out), "--n", "1"]
    assert main(words) == 2 and "holds a run" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0
    assert "no results yet and begins again" in capsys.readouterr().err
    assert json.loads((out / "summary.json").read_text())["n"] == 1


def test_end_tokens_are_part_of_the_model(tmp_path, model, capsys):
    import shutil

    other, out = tmp_path / "other", tmp_path / "run"
    shutil.copytree(model, other)
    words = ["ruler", "--model", str(other), *OPTIONS, "--methods", "dense", "--n", "1", "--out", str(out)]
    assert main(words) == 0
    settings = json.loads((other / "generation_config.json").read_text())
    (other / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [1, 2]}))
    assert main([*words, "--resume"]) == 2
    assert "weights.files.generation_config.json" in capsys.readouterr().err


def test_a_model_path_with_brackets_is_no_markup(tmp_path, model, capsys):
    import shutil

    other = tmp_path / "m[/b]"
    shutil.copytree(model, other)
    out = ["--out", str(tmp_path / "run")]
    assert main(["ruler", "--model", str(other), *OPTIONS, "--methods", "dense", "--n", "1", *out]) == 0
    assert "m[/b]" in capsys.readouterr().out.replace("\n", "")


def test_a_run_with_other_weights_of_equal_size_is_another_run(tmp_path, model):
    import shutil

    from latent_santa.eval.run import models

    other = tmp_path / "other"
    shutil.copytree(model, other)
    weights = next(other.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-4:] = bytes(4)
    weights.write_bytes(content)
    same, changed = (
        models.identity(spec, models.load_config(spec)) for spec in map(models.ModelSpec, (model, str(other)))
    )
    assert same["files"].keys() == changed["files"].keys()
    assert same["files"][weights.name] != changed["files"][weights.name]
    assert same["files"]["config.json"] == changed["files"]["config.json"]


def test_a_failed_prompt_shows_in_the_exit_code(tmp_path, model, monkeypatch, capsys):
    from latent_santa.eval.run import generation

    real, calls = generation.Generator.answers, []

    def sometimes(*args):
        calls.append(1)
        if len(calls) == 4:
            raise ValueError("no such answer")
        return real(*args)

    monkeypatch.setattr(generation.Generator, "answers", sometimes)
    words = ["ruler", "--model", model, *OPTIONS, "--out", str(tmp_path / "run"), "--methods", "dense"]
    assert main(words) == 1
    assert "1 prompts failed" in capsys.readouterr().out
    assert main([*words, "--resume"]) == 0
    assert len(calls) == 7


@pytest.mark.parametrize("option", ["--out", "--budgets", "--model", "--tasks", "--estimators", "--device", "--data"])
def test_an_empty_option_is_refused_by_name(model, capsys, option):
    assert code_of(["ruler", "--model", model, *OPTIONS, option, ""]) == 2
    assert f"argument {option}: " in capsys.readouterr().err
    if option not in ("--out", "--tasks", "--data"):
        assert code_of(["compare", "--model", model, option, ""]) == 2
        assert f"argument {option}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--length", "100000000"], "--length 100000000: 100,000,000 positions are more than the 4,096"),
        (
            ["--max-new-tokens", "100000000"],
            "--max-new-tokens 100000000: 100,000,000 positions are more than the 4,096",
        ),
        (["--max-new-tokens", "4000"], "prompt tokens and --max-new-tokens 4000: "),
        (["--prompt-number", "-1"], "--prompt-number must be at least 0, got -1"),
    ],
)
def test_compare_refuses_sizes_before_anything_slow(model, monkeypatch, capsys, options, said):
    from latent_santa.eval.run import models

    monkeypatch.setattr(models, "load", None)
    start = time.monotonic()
    assert code_of(["compare", "--model", model, "--length", "600", *options]) == 2
    assert said in capsys.readouterr().err
    assert time.monotonic() - start < 5


def test_a_cache_that_cannot_fit_is_refused_by_its_size(tmp_path, model, monkeypatch, capsys):
    """Without a limit of positions the free memory decides; prompts that the disk cannot hold are refused too."""
    from latent_santa.eval.commands import evaluate
    from latent_santa.eval.run import models, sizes
    from latent_santa.patches import limits

    config = models.load_config(models.ModelSpec(model))
    assert sizes.cache_bytes(config, 10, "float32") == 10 * 2 * (16 + 8) * 4
    monkeypatch.setattr(models, "load", None)
    for module in (limits, evaluate):
        monkeypatch.setattr(module, "context_limit", lambda config: None)
    monkeypatch.setattr(sizes, "free_bytes", lambda device: 1 << 20)
    for words in (["compare"], ["ruler", "--out", str(tmp_path / "run")]):
        assert main([*words, "--model", model, "--length", "1000000"]) == 2
        assert "a cache of 1,000,000 rows takes 183.1 MiB and cpu has 1.0 MiB free" in capsys.readouterr().err
    assert main(["ruler", "--model", model, *OPTIONS, "--n", "10000000000", "--out", str(tmp_path / "run")]) == 2
    assert "20,000,000,000 prompts of 256 tokens take about" in capsys.readouterr().err
    # prompts that the disk can hold, and the memory cannot
    assert main(["ruler", "--model", model, *OPTIONS, "--n", "10000", "--out", str(tmp_path / "run")]) == 2
    assert "20,000 prompts of 256 tokens take about 9.8 MiB and cpu has 1.0 MiB free" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_late_prompt_needs_no_earlier_one(model, capsys):
    start = time.monotonic()
    words = ["compare", "--model", model, "--length", "600", "--max-new-tokens", "2", "--methods", "dense"]
    assert main([*words, "--prompt-number", "1000000"]) == 0
    assert "dense (SDPA)" in capsys.readouterr().out
    assert time.monotonic() - start < 20


def test_help_imports_no_torch_and_names_tasks_and_an_example():
    code = (
        "import sys; from latent_santa.eval.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(sorted(sys.modules.keys() & {'torch', 'transformers', 'numpy'}), file=sys.stderr)"
    )
    for command, words in {
        "ruler": [
            "niah_multikey_3",
            "facts_hard",
            "Example: latent-santa ruler",
            "about two minutes of one CPU core",
            "Algorithm 3",
        ],
        "recommend": ["Example: latent-santa recommend", "(default: contiguous)"],
        "compare": ["Example: latent-santa compare", "Equation 14", "(default: per_head,pooled)"],
        "report": ["Example: latent-santa report"],
        "helmet": ["Example: latent-santa helmet", "infbench_mc", "data/icl/trec/train", "--select questions"],
        "longbench": ["Example: latent-santa longbench", "data.json from huggingface.co", "Final Answer: [X]"],
    }.items():
        shown = subprocess.run(
            [sys.executable, "-c", code, command, "--help"], capture_output=True, text=True, timeout=60, check=True
        )
        assert shown.stderr.strip() == "[]"
        text = " ".join(shown.stdout.split())
        assert all(word in text for word in words), (command, words)


def test_options_have_the_defaults_and_choices_of_the_settings():
    """They are stated twice so that --help needs no PyTorch; here they must agree."""
    import argparse

    from latent_santa.config import SantaConfig, choices
    from latent_santa.eval.commands import options

    parser = argparse.ArgumentParser()
    options.add_model_options(parser, "builtin:tiny")
    options.add_method_options(parser, "", "")
    args = parser.parse_args([])
    assert options.base_config(args, options.model_spec(args)) == SantaConfig(method="dense")
    args.budgets, args.parents = [512], ["kmeans"]
    dense, *sparse = options.conditions(args, SantaConfig(method="dense"))
    assert len(sparse) == 2
    fields = {name: getattr(SantaConfig(), name) for name in ("budget", "parents", "parent_size", "representatives")}
    assert {name: getattr(sparse[0], name) for name in fields} == fields
    offered = {action.dest: tuple(action.choices) for action in parser._actions if action.choices}
    shared = {name: values for name, values in choices().items() if name in options.SHARED}
    assert {name: offered[name] for name in shared} == shared


def test_two_processes_do_not_share_a_run(tmp_path, model, finished, capsys):
    """The second is told who writes, and changes nothing, whatever it asks for."""
    import shutil

    out = tmp_path / "run"
    shutil.copytree(finished, out)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path; from latent_santa.eval.run.locks import run_lock\n"
            "with run_lock(Path(sys.argv[1]), True): print('held', flush=True); time.sleep(600)",
            out,
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        before = results(out)
        assert main(["ruler", "--model", model, *OPTIONS, "--n", "1", "--out", str(out), "--resume"]) == 2
        assert f"is being written to by process {holder.pid} on" in capsys.readouterr().err
        assert results(out) == before
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert main(["ruler", "--model", model, *OPTIONS, "--out", str(out), "--resume"]) == 0
    assert results(out) == before


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_stopped_run_says_what_is_kept(tmp_path, model, monkeypatch, capsys, stop):
    from latent_santa.eval.run import store

    append, left = store.Store.append, [3]

    def stopping(self, slug, result):
        left[0] -= 1
        if left[0] < 0:
            raise stop
        append(self, slug, result)

    monkeypatch.setattr(store.Store, "append", stopping)
    out = tmp_path / "run"
    words = ["ruler", "--model", model, *OPTIONS, "--out", str(out)]
    assert main(words) == (130 if isinstance(stop, KeyboardInterrupt) else 2)
    said = capsys.readouterr().err
    assert f"every result up to here is kept in {out}; the same command with --out {out} --resume continues it" in said
    assert ("interrupted" in said) == isinstance(stop, KeyboardInterrupt)
    monkeypatch.setattr(store.Store, "append", append)
    assert sum(len(lines) for lines in results(out).values()) == 3
    assert main([*words, "--resume"]) == 0


@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_full_disk_is_told_in_words(tmp_path, model, finished, monkeypatch, capsys, command):
    import shutil

    out = tmp_path / "run"
    shutil.copytree(finished, out)
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}

    def full(*args):
        raise OSError(28, "No space left on device")

    words = {
        "report": ["report", str(out)],
        "compare": ["compare", "--model", model, "--length", "600", "--methods", "dense", "--max-new-tokens", "2"],
    }
    monkeypatch.setattr(os, "fsync", full)
    assert main([*words[command], *(["--json", str(tmp_path / "x.json")] if command == "compare" else [])]) == 2
    name = "summary.json" if command == "report" else "x.json"
    assert f"{name}: No space left on device; files that were there before are as they were" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
