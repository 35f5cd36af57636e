"""Builtin prompts: every task at four lengths, its promises, its independence of n, and its smallest length."""

from __future__ import annotations

import json
import re
from itertools import permutations

import pytest

from latent_santa.eval.errors import EvalError
from latent_santa.eval.run.render import Renderer
from latent_santa.eval.sources import builtin, counting, words
from latent_santa.eval.sources.fitting import TooShort, largest_fit
from latent_santa.eval.sources.haystack import open_haystack, split_sentences
from latent_santa.eval.sources.samples import Sample
from latent_santa.eval.sources.tasks import BUILTIN, OFFICIAL, mean_label, resolve_tasks
from tests.eval_support import tokenizer

LENGTHS = (256, 512, 1024, 4096)
PROSE = open_haystack("prose")

# Whole documents and pairs of UUIDs are long units: below 1024 tokens the next may not fit although 10 % are left.
LONG_UNITS = {"niah_multikey_3", "facts_1", "facts_2", "json_kv"}


def count(user: str, prefix: str) -> int:
    return Renderer(tokenizer()).count(user, prefix)


def samples(task: str, n: int, length: int, haystack=PROSE, seed: int = 42) -> list[Sample]:
    return list(builtin.samples(task, n, length, count, seed, haystack))


def context(sample: Sample) -> str:
    """The user's turn without the question, its last line."""
    return sample.input.rpartition("\n")[0]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("task", [*BUILTIN, "json_kv"])
def test_fits_fills_and_keeps_its_promises(task, length):
    for sample in samples(task, 4, length):
        used = count(sample.input, sample.answer_prefix) + sample.max_new_tokens
        assert used <= length
        # At 256 tokens a sentence is a tenth of the prompt.
        small_units = length >= 1024 or (length >= 512 and task not in LONG_UNITS)
        assert used >= (0.9 if small_units else 0.8) * length
        assert sample.metric == builtin.TASKS[task].metric
        assert sample.max_new_tokens <= builtin.TASKS[task].max_new_tokens
        assert sample.source == "builtin"
        question = sample.input.rpartition("\n")[2]
        assert question.endswith(("?", ".")) and not any(reference in question for reference in sample.references)
        assert not any(reference in sample.answer_prefix for reference in sample.references)


def test_a_json_object_holds_the_asked_pair_at_every_depth_and_two_other_examples():
    places = set()
    for sample in samples("json_kv", 24, 4096):
        _, line, *examples, question = sample.input.split("\n")
        pairs = json.loads(line)
        key = question.removeprefix("What is the value of ").removesuffix("?")
        assert sample.references == (pairs[key],)
        shown = dict(re.fullmatch(r"The value of (\S+) is (\S+)\.", text).groups() for text in examples)
        assert len(shown) == 2 and key not in shown and shown.items() <= pairs.items()
        places.add(round(5 * list(pairs).index(key) / (len(pairs) - 1)))
        assert sample.answer_prefix == f" The value of {key} is"
    assert places == set(range(6))
    assert resolve_tasks("json_kv", "builtin") == ("json_kv",) and "json_kv" not in resolve_tasks("all", "builtin")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("task", [t for t in BUILTIN if t.startswith("niah")])
def test_needles_stand_once_and_keys_are_unique(task, length):
    for sample in samples(task, 3, length):
        text = context(sample)
        found = re.findall(r"parcel code of (\S+) is (\S+)\.", text)
        values = [value for _, value in found]
        assert len(set(values)) == len(values)
        assert all(values.count(reference) == 1 and text.count(reference) == 1 for reference in sample.references)
        keys = {key for key, _ in found}
        asked = {key for key in keys if key in sample.input.rpartition("\n")[2]}
        assert {value for key, value in found if key in asked} == set(sample.references)
        few = length < 512
        wanted = {"niah_multivalue": (1, 2 if few else 4), "niah_multiquery": (2 if few else 4,) * 2}.get(task)
        if wanted:
            assert (len(asked), len(sample.references)) == wanted
        else:
            assert (len(asked), len(sample.references)) == (1, 1)
        if task != "niah_multivalue":
            assert len(keys) == len(found)
        if task in ("niah_multikey_2", "niah_multikey_3"):
            assert len(text.split("\n")) == len(found) + 1


@pytest.mark.parametrize("length", LENGTHS)
def test_the_other_tasks_mean_what_they_ask(length):
    for sample in samples("vt", 3, length):
        value = re.search(r"number (\d{5})\? Name all of them\.$", sample.input).group(1)
        notes = re.findall(r"Box (\w+) gets (?:the number|a copy of box) (\w+)\.", context(sample))
        holds = {value}
        for box, what in notes:
            if what in holds:
                holds.add(box)
        assert holds - {value} == set(sample.references)
        assert len(sample.references) == (5 if length >= 512 else 3)
    for sample in samples("cwe", 3, length):
        entries = re.findall(r"\d+\. (\S+)", context(sample).rpartition("Now the task.")[2])
        counts = sorted(((entries.count(word), word) for word in set(entries)), reverse=True)
        top = counts[: len(sample.references)]
        assert {word for _, word in top} == set(sample.references)
        assert top[-1][0] > counts[len(top)][0]
    for sample in samples("fwe", 3, length):
        text = context(sample).split("\n")[1].split()
        counts = sorted(((text.count(word), word) for word in set(text) - {"..."}), reverse=True)
        assert text.count("...") > counts[0][0]
        assert [word for _, word in counts[:3]] == list(sample.references)
        assert counts[0][0] > counts[1][0] > counts[2][0] > counts[3][0]
    for sample in samples("facts_1", 3, length):
        person = re.search(r"was (.+) born\?", sample.input).group(1)
        assert re.findall(rf"{person} was born in ([\w ]+?) and", context(sample)) == [sample.references[0]]
    for sample in samples("facts_2", 3, length):
        person = re.search(r"firm that (.+) works for\?", sample.input).group(1)
        (firm,) = re.findall(rf"{person} works as a \w+ for ([\w ]+)\.", context(sample))
        assert re.findall(rf"{firm} makes .+ seat in ([\w ]+)\.", context(sample))[0].startswith(sample.references[0])
    for task in ("facts_1", "facts_2"):
        for sample in samples(task, 3, length):
            town, hyphened = sample.references
            assert builtin.occurrences(context(sample), town) == 1 and hyphened == town.replace(" ", "-")


def test_long_word_lists_are_made_of_pairs():
    sample = samples("cwe", 1, 8192)[0]
    entries = re.findall(r"\d+\. (\S+)", context(sample).rpartition("Now the task.")[2])
    assert all("-" in word for word in entries)
    counts = {word: entries.count(word) for word in set(entries)}
    assert {word for word, times in counts.items() if times == 30} == set(sample.references)
    assert sorted(set(counts.values())) == [3, 30]
    assert count(sample.input, sample.answer_prefix) + sample.max_new_tokens >= 0.95 * 8192


def test_the_most_frequent_words_are_never_tied():
    for n in range(8, 400):
        counts = counting._zeta_counts(n, 12)
        assert counts[0] > counts[1] > counts[2] > counts[3] > counts[4] >= 1


@pytest.mark.parametrize("task", BUILTIN)
def test_sample_i_does_not_depend_on_n_and_samples_differ(task):
    few, many = samples(task, 2, 512), samples(task, 5, 512)
    assert many[:2] == few
    assert len({sample.text_sha256 for sample in many}) == 5
    assert samples(task, 1, 512, seed=43)[0].text_sha256 != few[0].text_sha256


@pytest.mark.parametrize("task", BUILTIN)
def test_too_short_a_length_names_the_least_that_works(task):
    with pytest.raises(EvalError, match=f"{task}.*at least") as caught:
        samples(task, 1, 60)
    least = int(re.search(r"at least (\d+)", str(caught.value)).group(1))
    assert samples(task, 1, least)


def test_haystacks_pydoc_and_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"Sentence number {words.NOUNS[i]} stands here alone." for i in range(30)))
    for spec in ("pydoc", f"file:{path}"):
        haystack = open_haystack(spec)
        sample = samples("niah_multivalue", 1, 1024, haystack)[0]
        assert 0.9 * 1024 <= count(sample.input, sample.answer_prefix) + sample.max_new_tokens <= 1024
    assert sample.input.count("stands here alone") > 30  # a short text begins again
    path.write_text("Too short.")
    with pytest.raises(EvalError, match="0 usable sentences"):
        open_haystack(f"file:{path}")
    with pytest.raises(EvalError, match="cannot read"):
        open_haystack(f"file:{tmp_path / 'missing'}")
    with pytest.raises(EvalError, match="prose, pydoc or file:PATH"):
        open_haystack("essays")


def test_a_haystack_that_holds_the_answer_is_refused(tmp_path):
    values = {sample.references[0] for sample in samples("niah_single_2", 1, 512)}
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"The answer to all of it may well be {values.copy().pop()} today." for _ in range(30)))
    sample = samples("niah_single_2", 1, 512, open_haystack(f"file:{path}"))[0]
    # The first draw's value stands in the haystack, so another one was drawn.
    assert sample.references[0] not in values and sample.input.count(sample.references[0]) == 1


def test_words_that_could_be_answers_do_not_contain_each_other():
    pool = words.NOUNS + words.ADJECTIVES
    assert len(set(pool)) == len(pool)
    assert [(a, b) for a, b in permutations(pool, 2) if a in b] == []


def test_split_sentences_drops_code_and_fragments():
    text = "A first sentence here.  A second\none follows.\n\nx = {1: 2, 3: 4}; y[0] += 1.\n\nNo."
    assert split_sentences(text) == ["A first sentence here.", "A second one follows."]


@pytest.mark.parametrize("cost", [1, 3, 17, 400])
@pytest.mark.parametrize("budget", [500, 5_000, 100_000])
def test_largest_fit_is_exact_and_bounded(cost, budget):
    calls = []

    def tokens(k: int) -> int:
        calls.append(k)
        return 90 + cost * k

    assert largest_fit(tokens, budget, 0, 1 << 20) == (budget - 90) // cost
    assert len(calls) <= 12
    assert largest_fit(tokens, budget, 0, 7) == min(7, (budget - 90) // cost)
    with pytest.raises(TooShort) as caught:
        largest_fit(tokens, 80, 0, 10)
    assert caught.value.needed == 90


def test_largest_fit_ends_on_wobbling_counts():
    def tokens(k: int) -> int:
        return 5 * k + (k * 7919) % 11

    found = largest_fit(tokens, 10_000, 0, 1 << 20)
    assert tokens(found) <= 10_000 and found >= 1_990


def test_task_names():
    assert resolve_tasks("all", "official") == tuple(OFFICIAL)
    assert resolve_tasks("mla3", "official") == ("niah_multivalue", "fwe", "qa_1")
    assert resolve_tasks("mla3", "builtin") == ("niah_multivalue", "fwe", "facts_1")
    assert resolve_tasks("mla3", "tiny") == ("multivalue", "fwe", "facts")
    assert resolve_tasks("fwe_hard, vt", "tiny") == ("fwe_hard", "vt")
    with pytest.raises(EvalError, match="'qa_3'.*facts_2"):
        resolve_tasks("qa_1,qa_3", "builtin")
    with pytest.raises(EvalError, match="twice"):
        resolve_tasks("qa_1,facts_1", "builtin")


def test_only_all_13_tasks_are_called_all():
    assert mean_label(tuple(OFFICIAL)) == "all 13 tasks"
    assert mean_label(tuple(BUILTIN)) == "all 13 builtin tasks"
    assert mean_label(tuple(OFFICIAL)[:12]) == "mean of 12 tasks"
    assert mean_label(("fwe",)) == "fwe"
