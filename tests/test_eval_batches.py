"""Prompts generated together give the rows that each gives alone, and conditions of one grouping group them once."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import latent_santa
from latent_santa.config import SantaConfig
from latent_santa.eval.cli import main
from latent_santa.eval.errors import EvalError
from latent_santa.eval.run import generation
from latent_santa.eval.run.comparison import run_condition
from latent_santa.eval.run.conditions import expand, running_order, slug
from latent_santa.eval.run.generation import Batch, Generator
from latent_santa.eval.run.processes import Processes
from latent_santa.eval.run.progress import Progress
from latent_santa.eval.run.render import Renderer
from latent_santa.eval.run.runner import Runner, batches
from latent_santa.eval.run.store import Store
from latent_santa.eval.sources.samples import make_sample
from latent_santa.methods import centroid, santapp
from tests.eval_support import DENSE, save_random_model, tokenizer
from tests.eval_support import santapp as make_config

POOLED = [make_config(budget, "kmeans", "pooled") for budget in (16, 32)]
PER_HEAD = [make_config(budget, "contiguous", "per_head") for budget in (16, 32)]
OTHERS = (
    SantaConfig(method="santa", budget=16),
    SantaConfig(method="gumbel_rows", budget=16),
    SantaConfig(method="centroid", budget=32, parents="contiguous"),
)
CONDITIONS = (DENSE, *POOLED, *PER_HEAD, *OTHERS)
CAPS = {"fwe": 9, "vt": 6}
END = 2


@pytest.fixture(scope="module", params=["mla", "gqa"])
def model(request, tmp_path_factory):
    if request.param == "mla":
        return AutoModelForCausalLM.from_pretrained(save_random_model(tmp_path_factory.mktemp("model"))).eval()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=0,
        initializer_range=0.5,
    )
    return Qwen2ForCausalLM(config).eval()


def make_prompts(renderer, n=5):
    prompts = []
    for task, cap in CAPS.items():
        for i in range(n):
            text = f"Flight {i} of {task}. " * (3 + 5 * i % 13) + "Which?"
            sample = make_sample(task, i, text, ["zz", "qq"], max_new_tokens=cap, source="test")
            prompts.append(renderer.prompt(sample, None))
    return prompts


def make_runner(directory, generator, batch_size, text=None):
    renderer = Renderer(tokenizer())
    store = Store(directory)
    if not store.frozen:
        store.freeze({"settings": {}, "conditions": []}, make_prompts(renderer))
    progress = Progress(Console(file=text or io.StringIO(), width=200), every=0)
    return Runner(store, generator, renderer, 0.0, progress, Processes(), batch_size)


def rows(store):
    """Every condition's results in the order of their ids, without what tells how they were made."""
    found = {}
    for condition in CONDITIONS:
        path = store.results_directory / f"{slug(condition)}.jsonl"
        if path.is_file():
            lines = sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda line: line["id"])
            found[slug(condition)] = [
                {k: v for k, v in line.items() if k not in ("batch", "seconds")} for line in lines
            ]
    return found


@pytest.fixture(scope="module")
def generator(model):
    """The model patched, with end ids that let answers stop at different lengths."""
    with latent_santa.patch(model, DENSE) as santa:
        made = Generator(santa, tokenizer(), seed=3)
        ends = []
        for place, ids in enumerate(encoded()[:3]):
            output = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=6)
            ends.append(output[0, len(ids) + place].item())
        model.generation_config.eos_token_id = [END, *ends]
        yield made


def encoded() -> list[list[int]]:
    return [Renderer(tokenizer()).encode(prompt.sample.input, "") for prompt in make_prompts(Renderer(tokenizer()))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, generator):
    runner = make_runner(tmp_path_factory.mktemp("alone"), generator, 1)
    assert runner.run(CONDITIONS) == 0
    return rows(runner.store)


class Watched:
    """A generator that notes what it was asked for, and fails where the test says so."""

    def __init__(self, generator, fails=lambda calls, size: None):
        self.generator, self.fails, self.sizes = generator, fails, []

    def answers(self, condition, batch):
        self.sizes.append(len(batch.names))
        error = self.fails(len(self.sizes), len(batch.names))
        if error:
            raise error
        return self.generator.answers(condition, batch)


@pytest.fixture
def formed(monkeypatch):
    calls, form = [], santapp.form_parents
    for method in (santapp, centroid):
        monkeypatch.setattr(method, "form_parents", lambda *args: calls.append(args[-1].grouping) or form(*args))
    return calls


def test_a_stop_text_ends_an_answer_as_an_end_token_does(generator):
    ids, names = encoded()[3], ("fwe/000003",)
    for condition in CONDITIONS[:2]:
        (whole,) = generator.answers(condition, Batch(names, [ids], 9))
        texts = [tokenizer().decode([token]) for token in range(300, 4096)]
        stops = (*(text for text in texts if text in whole.text[1:]), "no such token")  # one of them is generated
        (short,) = generator.answers(condition, Batch(names, [ids], 9, stops))
        assert whole.text.startswith(short.text) and short.text.endswith(stops[:-1])
        assert 0 < short.n_new < whole.n_new and not short.hit_cap
        assert short.sparse_calls + short.dense_calls == short.n_new and short.access != whole.access
        assert generator.answers(condition, Batch(names, [ids], 9)) == [whole]


def test_answers_are_those_of_plain_generation(generator):
    """Tokens, calls and rows read of `model.generate` under the same settings and noise."""
    santa = generator.santa
    for number, ids in enumerate(encoded()[:3]):
        names = (f"fwe/{number:06d}",)
        for condition in CONDITIONS:
            (answer,) = generator.answers(condition, Batch(names, [ids], 9))
            santa.configure(condition)
            santa.reset()
            santa.sequence_keys = [generation.sequence_key(3, names[0])]
            prompt = torch.tensor([ids])
            output = santa.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9)
            new = output[0, len(ids) :].tolist()
            assert (answer.text, answer.n_new) == (tokenizer().decode(new, skip_special_tokens=True), len(new))
            if condition != DENSE:  # which plain generation counts from the second token on
                assert (answer.sparse_calls, answer.dense_calls) == (santa.sparse_calls, 0)
                assert answer.access == santa.access.sequence_totals([santa.sparse_calls])[0]


def test_a_batch_is_its_prompts_alone(tmp_path, generator, alone):
    runner = make_runner(tmp_path, generator, 3)
    assert runner.run(CONDITIONS) == 0
    assert rows(runner.store) == alone
    lines = [json.loads(line) for line in (runner.store.results_directory / "dense.jsonl").read_text().splitlines()]
    assert [line["batch"] for line in lines] == [3] * 6 + [2] * 4
    # answers of one batch end early, at the cap, and with their first token
    for results in alone.values():
        lengths = [result["n_new"] for result in results]
        assert len(set(lengths[:3])) > 1 and {result["hit_cap"] for result in results} == {True, False}
        sparse = results[0]["condition"] != "dense"
        for result in results:
            calls = (result["sparse_calls"], result["dense_calls"])
            assert calls == ((result["n_new"], 0) if sparse else (0, result["n_new"]))
            assert result["access"]["calls"] == 2 * sum(calls)
    assert min(result["n_new"] for result in alone["dense"]) == 1


def test_a_batch_is_prefilled_once_and_grouped_once_per_grouping(tmp_path, model, generator, alone, formed):
    lengths = []
    hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    conditions = (POOLED[0], PER_HEAD[0], DENSE, *OTHERS, POOLED[1], PER_HEAD[1])  # out of order
    runner = make_runner(tmp_path, generator, 3)
    assert runner.run(conditions) == 0
    hook.remove()
    assert rows(runner.store) == alone
    assert sum(length > 1 for length in lengths) == 4  # batches
    assert len(formed) == 4 * 3 and len(set(formed)) == 3  # k-means, contiguous, clusters
    assert all(formed[i : i + 3] == formed[:3] for i in range(0, 12, 3))


def test_other_failures_leave_the_next_prompts_whole(tmp_path, generator, alone):
    watched = Watched(generator, lambda calls, size: ValueError("no such answer") if calls == 3 else None)
    runner = make_runner(tmp_path, watched, 1)
    assert runner.run((DENSE, PER_HEAD[0])) == 1
    assert len(watched.sizes) == 20
    found = rows(runner.store)
    assert found["dense"][5].pop("error") == "ValueError: no such answer"  # the second task's first prompt
    assert found["dense"][:5] + found["dense"][6:] == alone["dense"][:5] + alone["dense"][6:]
    assert found[slug(PER_HEAD[0])] == alone[slug(PER_HEAD[0])]


@pytest.mark.parametrize("baseline", OTHERS, ids=lambda condition: condition.method)
def test_a_baseline_is_the_same_whatever_ran_before_it(model, generator, baseline):
    """Settings of the one before, its estimator above all, are not inherited."""
    batch = Batch(("fwe/000003",), [encoded()[3]], 9)
    before = replace(POOLED[0], noise="shared", seed=9)
    (alone,) = Generator(generator.santa, tokenizer(), seed=3).answers(baseline, batch)
    follower = Generator(generator.santa, tokenizer(), seed=3)
    follower.answers(before, batch)
    assert follower.answers(baseline, batch) == [alone]
    (expanded,) = expand(DENSE, [baseline.method], [baseline.budget], ["pooled"], ["contiguous"], [(16, 4)], [16])
    assert expanded == baseline

    prefilled = generator.santa.prefill(torch.tensor([batch.ids[0]]))

    def compared() -> dict:
        outcome = run_condition(generator.santa, tokenizer(), prefilled, baseline, 9, None).as_dict()
        return {name: value for name, value in outcome.items() if name not in ("seconds", "tokens_per_second")}

    own = compared()
    run_condition(generator.santa, tokenizer(), prefilled, before, 9, None)
    assert compared() == own


def test_a_run_goes_on_in_the_middle_of_a_batch(tmp_path, generator, alone):
    make_runner(tmp_path, generator, 3).run((DENSE, PER_HEAD[0]))
    path = Store(tmp_path).results_directory / f"{slug(PER_HEAD[0])}.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[6:7]) + lines[5][:-9])
    runner = make_runner(tmp_path, generator, 3)
    assert runner.run((DENSE, *PER_HEAD)) == 0
    runner.store.merge(slug(PER_HEAD[0]))
    assert rows(runner.store) == {slug(c): alone[slug(c)] for c in (DENSE, *PER_HEAD)}


def test_a_batch_that_fails_is_tried_one_by_one(tmp_path, generator, alone):
    error = torch.OutOfMemoryError("out of memory\nwith details")
    watched = Watched(generator, lambda calls, size: error if size > 2 or calls == 3 else None)
    text = io.StringIO()
    runner = make_runner(tmp_path, watched, 3, text=text)
    assert runner.run((PER_HEAD[0],)) == 1
    assert watched.sizes == [3, 1, 1, 1] * 2 + [2, 2]
    own = slug(PER_HEAD[0])
    found = rows(runner.store)[own]
    assert found[1].pop("error") == "OutOfMemoryError: out of memory" and "output" not in found[1]
    assert found[:1] + found[2:] == alone[own][:1] + alone[own][2:]
    shown = " ".join(text.getvalue().split())
    assert "3 prompts from fwe/000000 on: OutOfMemoryError: out of memory; now one by one" in shown
    assert "S=16, fwe/000001: OutOfMemoryError: out of memory" in shown
    assert make_runner(tmp_path, generator, 3).run((PER_HEAD[0],)) == 0
    runner.store.merge(own)
    assert rows(runner.store)[own] == alone[own]


def test_nothing_but_failures_stops_a_run_in_batches(tmp_path, generator):
    watched = Watched(generator, lambda calls, size: RuntimeError("no kernel"))
    with pytest.raises(EvalError, match="first 3 prompts all failed.*no kernel"):
        make_runner(tmp_path, watched, 5).run((DENSE,))
    assert watched.sizes == [5, 1, 1, 1]


def test_batches_are_of_one_task_and_cap_and_tasks_take_turns():
    prompts = make_prompts(Renderer(tokenizer()))
    names = [[prompt.sample.id for prompt in batch] for batch in batches(prompts, 4)]
    assert names == [[f"{task}/{i:06d}" for i in part] for part in (range(4), range(4, 5)) for task in CAPS]
    assert [len(batch) for batch in batches(prompts, 1)] == [1] * 10
    assert [len(batch) for batch in batches(prompts, 100)] == [5, 5] and list(batches([], 3)) == []


def test_conditions_of_one_grouping_run_together():
    mixed = (DENSE, POOLED[0], OTHERS[0], PER_HEAD[0], POOLED[1], OTHERS[1], PER_HEAD[1])
    assert running_order(mixed) == [DENSE, *POOLED, OTHERS[0], *PER_HEAD, OTHERS[1]]


def test_the_embedded_model_in_batches(tmp_path):
    """The whole command: equal tables whatever the batch size."""
    options = "--model builtin:tiny --tasks multivalue --length 512 --n 3 --budgets 16 --estimators pooled".split()
    for size in ("1", "3"):
        words = ["ruler", *options, "--no-plot", "--batch-size", size, "--out", str(tmp_path / size)]
        assert main(words) == 0
    tables = [(tmp_path / size / "summary.json").read_text() for size in ("1", "3")]
    assert tables[0] == tables[1]
    manifest = json.loads((tmp_path / "3" / "manifest.json").read_text())
    assert manifest["settings"]["batch_size"] == 3
