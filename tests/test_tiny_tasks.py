"""The embedded model's prompts: deterministic, as long as asked, answerable, with keys that training never saw."""

from __future__ import annotations

import hashlib
import re
from random import Random

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from latent_santa.eval.run.scoring import score
from latent_santa.eval.tiny import HARD_TASKS, TASKS, haystack, samples, words
from latent_santa.eval.tiny.encoder import PieceEncoder
from latent_santa.eval.tiny.load import MODEL_DIRECTORY
from latent_santa.eval.tiny.training.curriculum import mix
from latent_santa.eval.tiny.training.samples import Prose, Sampler

ALL = TASKS + HARD_TASKS


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIRECTORY, local_files_only=True)


def rendered(sample, tokenizer) -> list[int]:
    turn = [{"role": "user", "content": sample.input}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) + sample.answer_prefix
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("task", ALL)
def test_length_is_met_within_two_per_cent(task, tokenizer):
    for length in (512, 1024, 2048):
        if task in ("vt_hard", "multiquery_hard") and length == 512:
            continue  # does not fit
        for sample in samples(task, 4, length, tokenizer):
            total = len(rendered(sample, tokenizer)) + sample.max_new_tokens
            assert 0.98 * length <= total <= length, (sample.id, length, total)


@pytest.mark.parametrize("task", ALL)
def test_rows_are_the_same_whatever_n_and_order(task, tokenizer):
    many = samples(task, 5, 1024, tokenizer)
    assert many[:2] == samples(task, 2, 1024, tokenizer)
    assert [sample.id for sample in many] == [f"{task}/{i:06d}" for i in range(5)]
    assert len({sample.text_sha256 for sample in many}) == 5
    assert samples(task, 2, 1024, tokenizer, seed=43) != many[:2]
    assert {sample.source for sample in many} == {"builtin:tiny"}


def test_rows_are_the_same_on_every_machine(tokenizer):
    """The default haystack is the grammar, so that nothing but Python's `random` decides the text."""
    seen = "".join(sample.text_sha256 for task in ALL for sample in samples(task, 2, 1024, tokenizer))
    assert hashlib.sha256(seen.encode()).hexdigest()[:16] == "1631d7dff8475f56"


@pytest.mark.parametrize("task", ALL)
def test_the_context_holds_the_answers(task, tokenizer):
    for sample in samples(task, 3, 1024, tokenizer):
        context = sample.input.rpartition("\n")[0]
        for reference in sample.references:
            found = len(re.findall(rf"\b{re.escape(reference)}\b", context))
            assert found >= 1 and (found == 1 or task[:3] in ("vt", "vt_", "fwe", "fac"))
        assert not any(reference in sample.answer_prefix for reference in sample.references)


def test_fwe_references_are_the_three_most_frequent_words(tokenizer):
    for sample in samples("fwe_hard", 5, 1024, tokenizer):
        stream = sample.input.rpartition("\n")[0].split("no meaning.")[1].split()
        counts = sorted(((stream.count(word), word) for word in set(stream) - {"..."}), reverse=True)
        assert tuple(word for _, word in counts[:3]) == sample.references
        assert counts[2][0] > counts[3][0]


def test_vt_references_are_the_chain(tokenizer):
    for sample in samples("vt", 3, 1024, tokenizer, chains=3, hops=5, gap=2):
        value = re.search(r"Which boxes hold (\d+)\?", sample.input).group(1)
        boxes = [re.search(rf" Set {value} [^.]*?(\w+)\.", sample.input).group(1)]
        while step := re.search(rf" Copy {boxes[-1]} [^.]*?(\w+)\.", sample.input):
            boxes.append(step.group(1))
        assert tuple(boxes) == sample.references and len(boxes) == 6


def test_facts_reference_is_the_fact(tokenizer):
    for gap in (0, 1):
        for sample in samples("facts", 4, 1024, tokenizer, gap=gap):
            name = re.search(r"\n\w+ \w+ (?:does|did) (\w+) ", sample.input).group(1)
            note = re.search(rf"Note \d+: {name} [^.]*\.", sample.input).group(0)
            assert sample.references[0] in note
            assert note.count(name) == (1 if gap else 4)


def test_options_change_the_prompt(tokenizer):
    def first(task, **options):
        return samples(task, 1, 1024, tokenizer, **options)[0]

    assert first("multikey", distractors=20).input.count("Flight ") == 21
    assert len(first("multivalue", values=6).references) == 6
    assert len(first("multiquery", queries=2).references) == 2
    assert len(first("vt", hops=2).references) == 3
    assert first("vt", chains=4).input.count(". Set ") == 4
    assert len(first("single", digits=5).references[0]) == 5
    for kind in words.KEY_KINDS:
        key = first("single", keys=kind).answer_prefix.removeprefix("Flight ")
        assert (key in words.KEYS, key in words.OUTSIDE) == (kind == "listed", kind == "english")
    apart = first("single", gap=3)
    assert f"{apart.answer_prefix} {apart.references[0]}" not in apart.input
    close = first("single")
    assert f"{close.answer_prefix} {close.references[0]}" in close.input
    assert "heron" in first("single", haystack="noise").input


@pytest.mark.parametrize(
    ("task", "options", "words_in_message"),
    [
        ("qa", {}, "unknown task 'qa'.*single"),
        ("vt", {"hop": 3}, "unknown option 'hop'.*hops"),
        ("vt", {"hops": 0}, "hops must be from 1 to 16, got 0"),
        ("single", {"keys": "x"}, "keys must be one of listed, made, english, got 'x'"),
        ("single", {"haystack": "x"}, "haystack must be one of grammar"),
        ("fwe", {"alpha": 1.0}, "alpha must be above 1"),
        ("multikey", {"distractors": 300}, "multikey with a length of 1024 tokens: the needles alone need"),
    ],
)
def test_bad_input_is_named(task, options, words_in_message, tokenizer):
    with pytest.raises(ValueError, match=words_in_message):
        samples(task, 1, 1024, tokenizer, **options)


def test_other_tokenizers_are_refused():
    with pytest.raises(ValueError, match="load_tiny"):
        samples("single", 1, 1024, object())


def test_keys_of_evaluation_never_occur_in_training():
    rng = Random(0)
    trained = set(words.draw_keys(rng, 2000, "made", evaluation=False))
    evaluated = set(words.draw_keys(rng, 300, "made"))
    assert not trained & evaluated
    assert all(words.held_out(word) for word in evaluated) and not any(map(words.held_out, trained))


def test_help_topics_are_divided():
    held, trained = set(haystack.topics(held_out=True)), set(haystack.topics(held_out=False))
    assert len(held) > 100 and len(trained) > 1000
    assert not held & trained


def test_generated_numbers_score_as_the_benchmark_scores():
    assert score(" 4829173, dimel 11.", ("4829173", "5550000"), "all") == 0.5


def test_training_samples_fit_and_encode_as_their_text():
    backend = Tokenizer.from_file(str(MODEL_DIRECTORY / "tokenizer.json"))
    prose = Prose((haystack.grammar(Random(1), 200), haystack.noise()), (0.8, 0.2), ["stone", "number", "value"] * 9)
    sampler = Sampler(PieceEncoder(backend), prose)
    rng, kinds = Random(2), set()
    for place in range(120):
        length = rng.choice((136, 272, 1088))
        sample = sampler.sample(rng, length, mix(place / 120))
        kinds.add(sample.kind)
        assert len(sample.ids) <= length and sample.answers
        assert all(0 < start < stop <= len(sample.ids) for start, stop in sample.answers)
        text = backend.decode(sample.ids, skip_special_tokens=False)
        assert backend.encode(text, add_special_tokens=False).ids == sample.ids
    assert kinds == {"niah", "vt", "fwe", "facts", "pairs"}
