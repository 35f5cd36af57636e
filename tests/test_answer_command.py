"""`latent-santa answer`: one prefill, an answer per question as if it had been asked alone."""

from __future__ import annotations

import json

import pytest

from latent_santa.config import SantaConfig
from latent_santa.eval.cli import main
from latent_santa.eval.commands.answer import parts
from latent_santa.eval.errors import EvalError
from latent_santa.eval.run.render import Renderer
from latent_santa.eval.tiny import load_tiny, samples

SETTINGS = SantaConfig(budget=32, parents="contiguous", estimator="pooled")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A text of the embedded model's kind, two questions that it answers, and settings."""
    folder = tmp_path_factory.mktemp("answer")
    text, _, question = samples("single", 1, 600, load_tiny()[1])[0].input.rpartition("\n")
    (folder / "text.txt").write_text(text)
    SETTINGS.save(folder / "settings.json")
    return folder, text, [question, "Which parcel of dobal has arrived?"]


def answered(folder, questions, *more):
    command = ["answer", "--context-file", str(folder / "text.txt"), "--config", str(folder / "settings.json")]
    command += ["--max-new-tokens", "8", "--json", str(folder / "out.json"), *more]
    assert main([*command, *(["--question", *questions] if questions else [])]) == 0
    return json.loads((folder / "out.json").read_text())


def test_each_answer_is_that_of_its_question_alone(files, capsys):
    folder, _, questions = files
    together = answered(folder, questions)
    said = capsys.readouterr().out
    assert [one["question"] for one in together["answers"]] == questions
    assert together["settings"] == SETTINGS.to_dict()
    for one, question in zip(together["answers"], questions, strict=True):
        assert answered(folder, [question])["answers"] == [one]
        percent = 100 * one["rows"]["numerator"] / one["rows"]["denominator"]
        assert one["answer"] in said and f"{percent:.1f} % of dense's rows" in said
        assert 0 < percent < 100 and one["tokens"] <= 8


def test_questions_may_stand_in_a_file(files):
    folder, _, questions = files
    (folder / "questions.txt").write_text(f"{questions[1]}\n\n")
    found = answered(folder, [questions[0]], "--question-file", str(folder / "questions.txt"))
    assert [one["question"] for one in found["answers"]] == questions


@pytest.mark.parametrize("chat", [True, False])
def test_text_and_questions_are_the_rendered_prompt_in_two_parts(files, chat):
    _, text, questions = files
    tokenizer = load_tiny()[1]
    renderer = Renderer(tokenizer, "none", chat)
    context, turns = parts(renderer, text, questions)
    for question, turn in zip(questions, turns, strict=True):
        assert tokenizer.decode([*context, *turn]) == tokenizer.decode(renderer.encode(f"{text}\n\n{question}", ""))


def test_a_template_that_changes_the_question_is_refused(files):
    _, text, questions = files

    class Shouting(Renderer):
        def text(self, user, prefix, chat=True):
            return user.upper()

    with pytest.raises(EvalError, match="--no-chat-template"):
        parts(Shouting(load_tiny()[1], "none"), text, questions)


def test_no_question_is_refused(files, capsys):
    folder = files[0]
    assert main(["answer", "--context-file", str(folder / "text.txt")]) == 2
    assert "--question-file" in capsys.readouterr().err
