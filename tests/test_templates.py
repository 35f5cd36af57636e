"""Chat templates that change by the day, open a thought, or read variables of their own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from latent_santa.eval.cli import main
from latent_santa.eval.commands.options import template_option
from latent_santa.eval.errors import EvalError
from latent_santa.eval.run.render import Renderer
from latent_santa.eval.run.store import Store, fold
from latent_santa.eval.sources.samples import make_sample

from .eval_support import save_random_model, tokenizer

TURNS = "{% for m in messages %}<u>{{ m['content'] }}</u>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
DATED = "<s>Today is {{ strftime_now('%A') }}." + TURNS
OPENED = TURNS.replace("<a>", "<a><think>\n")
SWITCHED = TURNS.replace("<a>", "<a><think>\n{% if not enable_thinking | default(true) %}\n</think>\n{% endif %}")


def with_template(template: str) -> Any:
    changed = copy.deepcopy(tokenizer())
    changed.chat_template = template
    return changed


def run_on(monkeypatch: pytest.MonkeyPatch, day: str, *arguments: str) -> int:
    """The command on a day of the week, as the template's clock says it."""
    from transformers.utils import chat_template_utils

    compile_template = chat_template_utils._compile_jinja_template

    def compiled(*args: Any, **kwargs: Any) -> Any:
        template = getattr(compile_template, "__wrapped__", compile_template)(*args, **kwargs)
        template.environment.globals["strftime_now"] = lambda form: day
        template.globals["strftime_now"] = lambda form: day
        return template

    with monkeypatch.context() as patched:
        patched.setattr(chat_template_utils, "_compile_jinja_template", compiled)
        return main(["ruler", *arguments])


def test_a_run_goes_on_after_midnight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_random_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text(DATED)
    out = tmp_path / "out"
    arguments = ["--model", str(model), "--tasks", "vt", "--length", "600", "--n", "2", "--budgets", "32"]
    arguments += ["--methods", "dense", "--floor", "0", "--out", str(out), "--parents", "contiguous", "--no-plot"]
    arguments += ["--device", "cpu"]
    assert run_on(monkeypatch, "Monday", *arguments) == 0
    before = Store(out).prompts()
    assert all(str(prompt.text).startswith("<s>Today is Monday.") for prompt in before)
    for file in (out / "results").iterdir():
        file.write_bytes(file.read_bytes().splitlines(keepends=True)[0])
    done = Store(out).results("dense")
    assert len(done) == 1
    assert run_on(monkeypatch, "Tuesday", *arguments, "--resume") == 0
    assert "Today is" not in capsys.readouterr().err
    assert Store(out).prompts() == before and len(Store(out).results("dense")) == 2
    other = tmp_path / "other"
    assert run_on(monkeypatch, "Tuesday", *[str(other) if part == str(out) else part for part in arguments]) == 0
    assert Store(other).prompts()[0].ids_sha256 != before[0].ids_sha256


def test_another_tokenizer_is_still_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_random_model(tmp_path / "model")
    arguments = ["ruler", "--model", str(model), "--tasks", "vt", "--length", "600", "--n", "1", "--methods", "dense"]
    arguments += ["--floor", "0", "--out", str(tmp_path / "out"), "--no-plot", "--device", "cpu"]
    assert main(arguments) == 0
    file = model / "tokenizer.json"
    file.write_text(file.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true'))
    assert "true" in file.read_text()
    assert main([*arguments, "--resume"]) == 2
    assert "tokenizer_sha256" in capsys.readouterr().err


def test_a_rendered_text_holds_its_input_once() -> None:
    text, body = "<s>Monday<u>long input</u><a>", "long input"
    assert fold(text, body) == ("<s>Monday<u>", None, "</u><a>")
    assert fold("<u>trimmed</u>", " trimmed ") == ("<u>trimmed</u>",)
    for template in (DATED, TURNS.replace("m['content']", "m['content'] | trim | upper")):
        sample = make_sample("t", 0, " Where?\n", ["x"], answer_prefix=" It is", max_new_tokens=4, source="test")
        renderer = Renderer(with_template(template))
        assert renderer.prompt(sample, None).text == renderer.text(sample.input, sample.answer_prefix)


def test_a_template_that_opens_a_thought_is_warned_of() -> None:
    (warning,) = Renderer(with_template(OPENED)).warnings()
    assert "opens a thought (<think>), and the beginning of the answer stands inside of it" in warning
    assert "a --template-option may close it" in warning
    (warning,) = Renderer(with_template(SWITCHED)).warnings()
    assert "--template-option enable_thinking=false closes it" in warning
    assert "the answer begins inside" in Renderer(with_template(SWITCHED), "none").warnings()[0]
    for tag in ("thought", "reasoning", "thinking"):
        assert f"<{tag}>" in Renderer(with_template(OPENED.replace("think", tag))).warnings()[0]
    assert "[THINK]" in Renderer(with_template(OPENED.replace("<think>", "[THINK]"))).warnings()[0]


def test_closed_thoughts_and_those_of_the_text_are_none() -> None:
    assert Renderer(with_template(SWITCHED), options={"enable_thinking": False}).warnings() == []
    assert Renderer(with_template(OPENED), chat=False).warnings() == []
    assert Renderer(with_template(TURNS)).warnings() == []
    assert Renderer(tokenizer()).warnings() == []
    assert Renderer(with_template("<system>Use <think> to think.</system>" + TURNS)).warnings() == []


def test_an_option_reaches_the_template_and_the_fingerprint() -> None:
    renderer = Renderer(with_template(SWITCHED), options=dict([template_option("enable_thinking=false")]))
    renderer.check()
    assert renderer.text("Where?", "It is") == "<u>Where?</u><a><think>\n</think>\nIt is"
    assert renderer.fingerprint()["template_options"] == '{"enable_thinking": false}'
    assert Renderer(with_template(SWITCHED)).fingerprint()["template_options"] == "{}"


def test_options_that_do_nothing_are_refused() -> None:
    for name, message in (
        ("enable_thought", "does not read it"),
        ("tokenize", "the evaluation itself sets it"),
        ("messages", "the evaluation itself sets it"),
    ):
        with pytest.raises(EvalError, match=f"--template-option {name}: .*{message}"):
            Renderer(with_template(SWITCHED), options={name: 1}).check()
    with pytest.raises(EvalError, match="enable_thinking: no chat template is used"):
        Renderer(with_template(SWITCHED), chat=False, options={"enable_thinking": False}).check()


def test_values_are_json_where_they_read_as_it() -> None:
    texts = ["a=false", "a=3", 'a="3"', "a=low", "a=", "a=x=y"]
    assert [template_option(text)[1] for text in texts] == [False, 3, "3", "low", "", "x=y"]


@pytest.mark.parametrize("command", ["ruler", "compare"])
@pytest.mark.parametrize("text", ["enable_thinking", "=false", "two words=1"])
def test_what_is_no_option_is_refused_in_words(command: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--model", "builtin:tiny", "--template-option", text])
    assert "is not NAME=VALUE, such as enable_thinking=false" in capsys.readouterr().err


def test_the_commands_warn_and_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_random_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text(SWITCHED)
    shared = ["--model", str(model), "--methods", "dense", "--length", "600", "--device", "cpu"]
    run = ["ruler", *shared, "--tasks", "vt", "--n", "1", "--floor", "0", "--no-plot"]
    assert main([*run, "--out", str(tmp_path / "open")]) == 0
    assert "warning: the chat template opens a thought (<think>)" in " ".join(capsys.readouterr().err.split())
    assert "opens a thought" in Store(tmp_path / "open").manifest()["warnings"][-1]
    closed = ["--template-option", "enable_thinking=false"]
    assert main([*run, *closed, "--out", str(tmp_path / "closed")]) == 0
    assert Store(tmp_path / "closed").manifest()["settings"]["template_options"] == '{"enable_thinking": false}'
    assert "opens a thought" not in capsys.readouterr().err
    assert main(["compare", *shared, "--max-new-tokens", "2"]) == 0
    assert "warning: the chat template opens a thought" in capsys.readouterr().err
