"""Prompts generated together give the rows that each gives alone, and conditions of one grouping group them once."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import latent_santa
from latent_santa.eval.cli import main
from latent_santa.eval.commands.evaluate import prefill_bytes
from latent_santa.eval.run import generation
from latent_santa.eval.run.conditions import Condition, running_order
from latent_santa.eval.run.models import ModelSpec
from latent_santa.eval.run.processes import Processes
from latent_santa.eval.run.progress import Progress
from latent_santa.eval.run.render import Renderer, ids_sha256
from latent_santa.eval.run.runner import Runner, batches
from latent_santa.eval.run.store import Prompt, Store
from latent_santa.eval.sources.samples import make_sample
from latent_santa.methods import santapp
from tests.eval_support import save_random_model, tokenizer

DENSE = Condition("dense")
POOLED = [Condition("santa++", budget, "kmeans", 16, 4, "pooled") for budget in (16, 32)]
PER_HEAD = [Condition("santa++", budget, "contiguous", 16, 4, "per_head") for budget in (16, 32)]
OTHERS = (Condition("santa", 16), Condition("centroid", 32, "contiguous", 16))
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
            row = make_sample(task, i, text, ["zz", "qq"], max_new_tokens=cap, source="test")
            ids = renderer.prompt(row, None)
            prompts.append(Prompt(row, len(ids), ids_sha256(ids)))
    return prompts


def make_runner(directory, model, handle, batch_size, text=None):
    renderer = Renderer(tokenizer())
    store = Store(directory)
    if not store.frozen:
        store.freeze({"settings": {}, "conditions": []}, make_prompts(renderer))
    progress = Progress(Console(file=text or io.StringIO(), width=200), every=0)
    return Runner(store, model, handle, renderer, 3, 0.0, progress, Processes(), batch_size)


def rows(store):
    """Every condition's results in the order of their lines, without what tells how they were made."""
    found = {}
    for condition in CONDITIONS:
        path = store.results_directory / f"{condition.slug}.jsonl"
        if path.is_file():
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found[condition.slug] = [{k: v for k, v in line.items() if k not in ("batch", "seconds")} for line in lines]
    return found


@pytest.fixture(scope="module")
def handle(model):
    """The model patched, with end ids that let answers stop at different lengths."""
    with latent_santa.patch(model, **DENSE.overrides()) as santa:
        generation.make_greedy(model, tokenizer())
        prompts = [Renderer(tokenizer()).encode(p.sample.input, "") for p in make_prompts(Renderer(tokenizer()))]
        ends = []
        for place, ids in enumerate(prompts[:3]):
            output = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=6)
            ends.append(output[0, len(ids) + place].item())
        model.generation_config.eos_token_id = [END, *ends]
        yield santa


@pytest.fixture(scope="module")
def alone(tmp_path_factory, model, handle):
    runner = make_runner(tmp_path_factory.mktemp("alone"), model, handle, 1)
    assert runner.run(CONDITIONS) == 0
    return rows(runner.store)


@pytest.fixture
def formed(monkeypatch):
    calls, form = [], santapp.form_parents
    monkeypatch.setattr(santapp, "form_parents", lambda *args: calls.append(args[2].grouping) or form(*args))
    return calls


def test_a_batch_is_its_prompts_alone(tmp_path, model, handle, alone, formed):
    runner = make_runner(tmp_path, model, handle, 3)
    assert runner.run(CONDITIONS) == 0
    assert rows(runner.store) == alone
    lines = [json.loads(line) for line in (runner.store.results_directory / "dense.jsonl").read_text().splitlines()]
    assert [line["batch"] for line in lines] == [3, 3, 3, 2, 2] * 2
    # answers of one batch end early, at the cap, and with their first token
    for results in alone.values():
        lengths = [result["n_new"] for result in results]
        assert len(set(lengths[:3])) > 1 and {result["hit_cap"] for result in results} == {True, False}
        sparse = results[0]["condition"] != "dense"
        for result in results:
            calls = (result["sparse_calls"], result["dense_calls"])
            assert calls == ((result["n_new"], 0) if sparse else (0, result["n_new"] - 1))
            assert result["access"]["calls"] == 2 * sum(calls)
    assert min(result["n_new"] for result in alone["dense"]) == 1


def test_memory_for_prefills(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (64 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    auto, cpu = ModelSpec("builtin:tiny"), ModelSpec("builtin:tiny", device="cpu")
    assert prefill_bytes(None, auto, Processes()) == 16 << 30
    # three processes: two of them on the first GPU
    limits = [prefill_bytes(None, auto, Processes(rank, 3, rank, 3)) for rank in range(3)]
    assert limits == [8 << 30, 16 << 30, 8 << 30]
    assert prefill_bytes(None, cpu, Processes()) == 2 << 30
    assert [prefill_bytes(gib, spec, Processes()) for gib, spec in ((0.5, auto), (0, auto), (3, cpu))] == [
        1 << 29,
        0,
        3 << 30,
    ]


def test_a_run_goes_on_in_the_middle_of_a_batch(tmp_path, model, handle, alone):
    make_runner(tmp_path, model, handle, 3).run((DENSE, PER_HEAD[0]))
    path = Store(tmp_path).results_directory / f"{PER_HEAD[0].slug}.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[6:7]) + lines[5][:-9])
    runner = make_runner(tmp_path, model, handle, 3)
    assert runner.run((DENSE, *PER_HEAD)) == 0
    runner.store.merge(PER_HEAD[0].slug)
    assert rows(runner.store) == {c.slug: alone[c.slug] for c in (DENSE, *PER_HEAD)}


def test_a_batch_that_fails_is_tried_one_by_one(tmp_path, model, handle, alone, monkeypatch):
    real, sizes = generation.generate, []

    def limited(model, tokenizer, prompts, cap):
        sizes.append(len(prompts))
        if len(prompts) > 2 or len(sizes) == 3:
            raise torch.OutOfMemoryError("out of memory\nwith details")
        return real(model, tokenizer, prompts, cap)

    monkeypatch.setattr(generation, "generate", limited)
    text = io.StringIO()
    runner = make_runner(tmp_path, model, handle, 3, text=text)
    assert runner.run((PER_HEAD[0],)) == 1
    assert sizes == [3, 1, 1, 1, 2] + [3, 1, 1, 1, 2]
    slug = PER_HEAD[0].slug
    found = rows(runner.store)[slug]
    assert found[1].pop("error") == "OutOfMemoryError: out of memory" and "output" not in found[1]
    assert found[:1] + found[2:] == alone[slug][:1] + alone[slug][2:]
    shown = " ".join(text.getvalue().split())
    assert "3 prompts from fwe/000000 on: OutOfMemoryError: out of memory; now one by one" in shown
    assert "S=16, fwe/000001: OutOfMemoryError: out of memory" in shown
    monkeypatch.setattr(generation, "generate", real)
    assert make_runner(tmp_path, model, handle, 3).run((PER_HEAD[0],)) == 0
    runner.store.merge(slug)
    assert rows(runner.store)[slug] == alone[slug]


def test_nothing_but_failures_stops_a_run_in_batches(tmp_path, model, handle, monkeypatch):
    sizes = []

    def fail(model, tokenizer, prompts, cap):
        sizes.append(len(prompts))
        raise RuntimeError("no kernel")

    monkeypatch.setattr(generation, "generate", fail)
    with pytest.raises(latent_santa.eval.errors.EvalError, match="first 3 prompts all failed.*no kernel"):
        make_runner(tmp_path, model, handle, 5).run((DENSE,))
    assert sizes == [5, 1, 1, 1]


def test_batches_are_of_one_task_and_cap():
    prompts = make_prompts(Renderer(tokenizer()))
    names = [[prompt.sample.id for prompt in batch] for batch in batches(prompts, 4)]
    assert names == [[f"{task}/{i:06d}" for i in part] for task in CAPS for part in (range(4), range(4, 5))]
    assert [len(batch) for batch in batches(prompts, 1)] == [1] * 10
    assert [len(batch) for batch in batches(prompts, 100)] == [5, 5] and list(batches([], 3)) == []


def test_conditions_of_one_grouping_run_together():
    mixed = (DENSE, POOLED[0], OTHERS[0], PER_HEAD[0], POOLED[1], OTHERS[1], PER_HEAD[1])
    assert running_order(mixed) == [DENSE, *POOLED, OTHERS[0], *PER_HEAD, OTHERS[1]]


def test_the_embedded_model_in_batches(tmp_path):
    """The whole command: equal tables whatever the batch size, with and without kept prefills."""
    options = "--model builtin:tiny --tasks multivalue --length 512 --n 3 --budgets 16 --estimators pooled".split()
    for size, more in (("1", ["--keep-prefills", "0"]), ("3", [])):
        words = ["ruler", *options, "--no-plot", "--batch-size", size, "--out", str(tmp_path / size), *more]
        assert main(words) == 0
    tables = [(tmp_path / size / "summary.json").read_text() for size in ("1", "3")]
    assert tables[0] == tables[1]
    manifest = json.loads((tmp_path / "3" / "manifest.json").read_text())
    assert manifest["settings"]["batch_size"] == 3 and "keep_prefills" not in manifest["settings"]
