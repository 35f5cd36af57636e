"""Samples, scores and rendering."""

from __future__ import annotations

import copy
import dataclasses

import pytest
from tokenizers.processors import TemplateProcessing

from latent_santa.eval.errors import EvalError
from latent_santa.eval.run.render import Renderer, ids_sha256
from latent_santa.eval.run.scoring import clean, score
from latent_santa.eval.sources.samples import Sample, join_texts, make_sample, sample_from_dict, sample_to_dict
from tests.eval_support import tokenizer


def sample(**changes) -> Sample:
    fields = {"answer_prefix": " The code is", "max_new_tokens": 16, "source": "test"} | changes
    return make_sample("task", 17, "What is the code?", ["123"], **fields)


def test_what_is_wanted_reads_well():
    ranking = make_sample("task", 0, "Sort.", ["7 0", "3 1", "5 3"], metric="ndcg_10", max_new_tokens=4, source="test")
    assert (ranking.wanted, ranking.findable) == ("5 > 3", ())
    assert (sample().wanted, sample().findable) == ("123", ("123",))
    assert sample(metric="letter").findable == ()


def test_a_prompt_without_chat_is_plain_in_a_run_with_a_template():
    renderer = Renderer(tokenizer())
    plain, chat = (renderer.prompt(sample(chat=chat), None) for chat in (False, True))
    assert plain.text == "What is the code? The code is" and chat.text != plain.text
    assert renderer.frozen(plain) == plain.text
    assert plain.ids_sha256 == Renderer(tokenizer(), chat=False).prompt(sample(), None).ids_sha256


def test_row_has_an_id_and_a_hash_of_all_that_is_seen():
    base = sample()
    assert base.id == "task/000017"
    assert len(base.text_sha256) == 64
    assert sample(source="elsewhere").text_sha256 == base.text_sha256
    assert sample(answer_prefix=" It is").text_sha256 != base.text_sha256
    assert sample(max_new_tokens=17).text_sha256 != base.text_sha256
    assert sample(metric="any").text_sha256 != base.text_sha256
    assert len({sample(**more).text_sha256 for more in ({}, {"chat": False}, {"stop": ["\n"]})}) == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.input = "other"  # type: ignore[misc]


def test_row_survives_json_and_detects_a_changed_text():
    data = sample_to_dict(sample())
    assert sample_from_dict(data | {"n_tokens": 5}) == sample()
    before = {name: value for name, value in data.items() if name not in ("chat", "stop")}  # of an earlier version
    assert sample_from_dict(before) == sample()
    plain = sample(chat=False, stop=["\n", "\n\n"])
    assert sample_from_dict(sample_to_dict(plain)) == plain
    with pytest.raises(ValueError, match="task/000017.*hash"):
        sample_from_dict(data | {"input": "What is the kode?"})


@pytest.mark.parametrize(
    ("references", "changes"), [([], {}), (["a", " "], {}), (["a"], {"metric": "some"}), (["a"], {"max_new_tokens": 0})]
)
def test_row_refuses_what_cannot_be_scored(references, changes):
    with pytest.raises(ValueError, match="task/000000"):
        make_sample("task", 0, "text", references, **({"max_new_tokens": 4, "source": "test"} | changes))


@pytest.mark.parametrize(
    ("output", "references", "metric", "wanted"),
    [
        ("The codes are 12 and 34.", ("12", "34"), "all", 1.0),
        ("The codes are 12 and 35.", ("12", "34"), "all", 0.5),
        ("nothing", ("12", "34"), "all", 0.0),
        ("port VELDEN, I think", ("Port Velden", "Oster"), "any", 1.0),
        ("Oster or Velden", ("Port Velden", "Velden"), "any", 1.0),
        ("Elsewhere", ("Port Velden", "Velden"), "any", 0.0),
        # As in the benchmark: substrings count, and a control character breaks a reference.
        ("1001", ("10",), "all", 1.0),
        ("ab\x00cd", ("abcd",), "all", 0.0),
        ("ab\x00cd", ("ab\ncd",), "all", 1.0),
        ("", ("x",), "any", 0.0),
    ],
)
def test_scores(output, references, metric, wanted):
    assert score(output, references, metric) == wanted


def test_clean_strips_before_and_after_control_characters():
    assert clean("  \x01 a\tb\x1f ") == "a\nb"


def test_scores_lie_on_the_lattice_of_the_references():
    references = tuple("abcd")
    assert {score(text, references, "all") for text in ("", "a", "ab", "abc", "abcd")} == {0, 0.25, 0.5, 0.75, 1}


@pytest.mark.parametrize(
    ("left", "right", "wanted"),
    [
        ("Assistant:", " The", "Assistant: The"),
        ("assistant\n", " The", "assistant\nThe"),
        ("a", "", "a"),
        ("a", "b", "ab"),
    ],
)
def test_join_texts_keeps_one_break(left, right, wanted):
    assert join_texts(left, right) == wanted


def test_prefix_goes_where_it_is_asked_for():
    user, prefix = "What is the code?", " The code is"
    assert Renderer(tokenizer(), "assistant").text(user, prefix) == f"<s><|user|>{user}<|assistant|>{prefix}"
    assert Renderer(tokenizer(), "user").text(user, prefix) == f"<s><|user|>{user}{prefix}<|assistant|>"
    assert Renderer(tokenizer(), "none").text(user, prefix) == f"<s><|user|>{user}<|assistant|>"
    assert Renderer(tokenizer(), "assistant", chat=False).text(user, prefix) == user + prefix


def test_template_brings_one_bos_and_the_answer_room_is_checked():
    renderer = Renderer(tokenizer())
    ids = renderer.encode(sample().input, sample().answer_prefix)
    prompt = renderer.prompt(sample(), limit=None)
    assert (prompt.n_tokens, prompt.ids_sha256) == (len(ids), ids_sha256(ids))
    assert ids.count(tokenizer().bos_token_id) == 1
    assert tokenizer().decode(ids) == prompt.text == renderer.text(sample().input, sample().answer_prefix)
    assert renderer.prompt(sample(), limit=len(ids) + 16) == prompt
    with pytest.raises(EvalError, match=rf"{len(ids)} prompt tokens and 16 new ones exceed.*{len(ids) + 15}"):
        renderer.prompt(sample(), limit=len(ids) + 15)


def test_special_tokens_are_added_once_with_a_template_and_without():
    own = copy.deepcopy(tokenizer())  # like many models' tokenizers, this one adds <s> by itself
    own.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert own("text")["input_ids"][0] == 1
    assert Renderer(own).encode("What is the code?", " The code is").count(1) == 1
    bare = Renderer(own, chat=False).encode("What is the code?", " The code is")
    assert bare.count(1) == 1 and own.decode(bare, skip_special_tokens=True) == "What is the code? The code is"


def test_baked_in_template_is_refused():
    baked = make_sample("task", 0, "<s>What?", ["1"], max_new_tokens=4, source="test")
    bare = Renderer(tokenizer(), chat=False)
    assert bare.prompt(baked, None).n_tokens == bare.count("<s>What?", "")
    doubled = make_sample("task", 0, "<s><s>What?", ["1"], max_new_tokens=4, source="test")
    with pytest.raises(EvalError, match="two BOS.*--no-chat-template"):
        bare.prompt(doubled, None)


def test_fingerprint_tells_renderings_apart():
    prints = [Renderer(tokenizer(), *options).fingerprint() for options in [("assistant", True), ("user", True)]]
    prints.append(Renderer(tokenizer(), "assistant", False).fingerprint())
    assert len({tuple(p.items()) for p in prints}) == 3
    assert prints[2]["chat_template_sha256"] is None
