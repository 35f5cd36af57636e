"""LongBench v2 from a small file made here in the official format: reading, cutting, running, the paper's column."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from latent_santa.eval.cli import main
from latent_santa.eval.errors import EvalError
from latent_santa.eval.run.render import Renderer
from latent_santa.eval.sources import Request, load_samples, longbench
from tests.eval_support import block_network, save_random_model, tokenizer

TEMPLATE = "A text: $DOC$ The end.\nQuestion: $Q$\nA) $C_A$ B) $C_B$ C) $C_C$ D) $C_D$"
MORE = {"template": None, "suffix": None, "max_new_tokens": 8}


def record(i: int, words: int) -> dict:
    return {
        "_id": f"id{i}",
        "domain": "Stories",
        "sub_domain": "Fiction",
        "difficulty": "easy",
        "length": "short",
        "question": f" What happens in story {i}? ",
        "choice_A": "A storm",
        "choice_B": "A feast",
        "choice_C": "$Q$",  # not a place for the question
        "choice_D": "Nothing",
        "answer": "ABCD"[i % 4],
        "context": f"Story {i} begins. " + " ".join(f"word{j}" for j in range(words)) + " It ends. ",
    }


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "data.json").write_text(json.dumps([record(i, 20 if i else 2000) for i in range(5)]))
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "0shot.txt").write_text(TEMPLATE)
    return tmp_path


def load(folder: Path, length: int = 512, n: int = 503, **more):
    renderer = Renderer(tokenizer())
    request = Request(f"longbench:{folder}", ("longbench_v2",), n, length, select="first", more=MORE | more)
    return load_samples(request, renderer, tiny=False), renderer


def test_prompts_are_filled_and_long_ones_lose_their_middle(folder):
    loaded, renderer = load(folder)
    long, short, *_ = loaded.samples
    assert len(loaded.samples) == 5 and [sample.references for sample in loaded.samples[:2]] == [("A",), ("B",)]
    assert short.input.startswith("A text: Story 1 begins.") and "What happens in story 1?\nA) A storm" in short.input
    assert "C) $Q$" in short.input and short.input.endswith(longbench.SUFFIX)
    used = renderer.count(long.input, "") + 8
    assert 500 <= used <= 512
    assert long.input.startswith("A text: Story 0 begins. word0") and long.input.endswith(longbench.SUFFIX)
    ids = renderer.tokenizer(long.input, add_special_tokens=False)["input_ids"]
    whole = longbench.fill(TEMPLATE, record(0, 2000)) + f"\n\n{longbench.SUFFIX}"
    every = renderer.tokenizer(whole, add_special_tokens=False)["input_ids"]
    same = next(i for i, (a, b) in enumerate(zip(ids, every, strict=False)) if a != b)
    assert abs(same - len(ids) / 2) < 12  # as much from either end
    assert loaded.origin["shortened"] == 1 and "four answers per prompt" in loaded.warnings[0]
    assert {sample.metric for sample in loaded.samples} == {"letter"}


def test_template_and_suffix_of_ones_own(folder, tmp_path):
    (tmp_path / "own.txt").write_text("$DOC$|$Q$|$C_A$$C_B$$C_C$$C_D$")
    (tmp_path / "suffix.txt").write_text("Say: 'Final Answer: [X]'.\n")
    loaded, _ = load(folder, n=2, template=str(tmp_path / "own.txt"), suffix=str(tmp_path / "suffix.txt"))
    assert loaded.samples[1].input.endswith("A storm" + "A feast$Q$Nothing\n\nSay: 'Final Answer: [X]'.")
    assert loaded.origin["suffix"] == "Say: 'Final Answer: [X]'."


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: (d / "data.json").unlink(), "no data.json there; download it from huggingface.co/datasets/THUDM"),
        (lambda d: (d / "prompts" / "0shot.txt").unlink(), "not part of this package.*0shot.txt of github.com/THUDM"),
        (lambda d: (d / "prompts" / "0shot.txt").write_text("$DOC$ $Q$"), "0shot.txt lacks \\$C_A\\$, .*\\$C_D\\$"),
        (lambda d: (d / "data.json").write_text("{"), "data.json is not JSON"),
        (lambda d: (d / "data.json").write_text("{}"), "expected a list of questions"),
        (
            lambda d: (d / "data.json").write_text(json.dumps([{"context": "x"}])),
            "record 0 has no text question, choice_A",
        ),
        (lambda d: (d / "data.json").write_text(json.dumps([record(0, 1) | {"answer": "E"}])), "answer 'E', not A"),
    ],
)
def test_what_is_missing_is_named(folder, change, said):
    change(folder)
    with pytest.raises(EvalError, match=said):
        load(folder)


def test_a_length_that_no_question_can_be_cut_to(folder):
    with pytest.raises(EvalError, match="--length leaves 2 tokens"):
        load(folder, length=10)


def test_the_command_makes_a_run_that_resumes(folder, tmp_path, monkeypatch, capsys):
    block_network(monkeypatch)
    model = save_random_model(tmp_path / "Qwen2.5-7B-Instruct")
    out = tmp_path / "run"
    command = ["longbench", "--model", str(model), "--data", str(folder), "--length", "256", "--max-new-tokens", "4"]
    command += ["--budgets", "32", "--parents", "contiguous", "--no-plot", "--out", str(out)]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "LongBench v2 prompts from local files, 1 of them without their middle" in shown.out
    assert "four answers per prompt" in shown.out
    summary = json.loads((out / "summary.json").read_text())
    assert summary["n"] == 5 and summary["conditions"][1]["cells"]["longbench_v2"]["access"] < 100
    assert main([*command, "--resume"]) == 0
    assert main(["paper", str(out), "--table", "3"]) == 0
    told = capsys.readouterr().out
    assert "answers per prompt" in told and "does not hold" in told
