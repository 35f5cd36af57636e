"""The runner with answers that the test gives: what is stored, what is stopped, what goes on."""

from __future__ import annotations

import copy
import io
import json

import pytest
import torch
from rich.console import Console
from tokenizers import normalizers
from transformers import AutoModelForCausalLM, GenerationConfig

import latent_santa
from latent_santa.eval.errors import EvalError
from latent_santa.eval.run import generation, models, processes
from latent_santa.eval.run.conditions import slug
from latent_santa.eval.run.processes import Processes
from latent_santa.eval.run.progress import Progress
from latent_santa.eval.run.render import Renderer
from latent_santa.eval.run.runner import Runner
from latent_santa.eval.run.store import Store
from latent_santa.eval.sources.samples import make_sample
from latent_santa.patches.limits import context_limit
from tests.eval_support import DENSE, FakeGenerator, santapp, save_random_model, tokenizer

SPARSE = santapp(32, "kmeans", "pooled")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return AutoModelForCausalLM.from_pretrained(save_random_model(tmp_path_factory.mktemp("model"))).eval()


def make_runner(directory, generator=None, tasks=("single", "fwe"), n=3, floor=0.0, joined=None, text=None):
    renderer = Renderer(tokenizer())
    store = Store(directory, *(joined.places if joined else ()))
    prompts = []
    for task in tasks:
        for i in range(n):
            sample = make_sample(task, i, f"Flight {i} of {task}?", ["zz", "qq"], max_new_tokens=5, source="test")
            prompts.append(renderer.prompt(sample, None))
    if not store.frozen:
        store.freeze({"settings": {"n": n}, "conditions": []}, prompts)
    progress = Progress(Console(file=text or io.StringIO()), every=0)
    return Runner(store, generator or FakeGenerator(), renderer, floor, progress, joined or Processes())


def test_one_result_a_prompt_with_all_its_parts(tmp_path):
    generator, text = FakeGenerator(sparse_calls=5), io.StringIO()
    generator.access = {"numerator": 30, "row_read": 20, "denominator": 60}
    runner = make_runner(tmp_path, generator, text=text)
    assert runner.run((DENSE, SPARSE)) == 0
    lines = (tmp_path / "results" / f"{slug(SPARSE)}.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    assert [json.loads(line)["id"] for line in lines] == [f"{t}/{i:06d}" for i in range(3) for t in ("single", "fwe")]
    assert first["n_new"] == 5 and first["hit_cap"] and first["sparse_calls"] == 5
    assert first["access"] == generator.access and first["seconds"] >= 0
    assert 0 <= first["score"] <= 1
    # All conditions answer a prompt before the next is prefilled.
    asked = [(condition, batch.names) for condition, batch in generator.asked]
    assert asked == [(c, (json.loads(line)["id"],)) for line in lines for c in (DENSE, SPARSE)]
    assert "fwe score 0.0, rows 50.0 %" in text.getvalue()


def test_only_new_ids_are_decoded_and_any_end_id_stops(model):
    ids = tokenizer()("<s><|user|>Flight kasuk?<|assistant|>", add_special_tokens=False)["input_ids"]
    batch = generation.Batch(("one",), [ids], 6)
    original = model.generation_config
    with latent_santa.patch(model, DENSE) as santa:
        model.generation_config = GenerationConfig(
            do_sample=True, temperature=0.3, repetition_penalty=20.0, eos_token_id=[2, 7]
        )
        generator = generation.Generator(santa, tokenizer(), seed=0)
        assert model.generation_config.eos_token_id == [2, 7]
        assert model.generation_config.repetition_penalty in (None, 1.0)
        (answer,) = generator.answers(DENSE, batch)
        # Greedy by hand.
        sequence = list(ids)
        with torch.no_grad():
            for _ in range(6):
                sequence.append(int(model(torch.tensor([sequence])).logits[0, -1].argmax()))
        assert answer.text == tokenizer().decode(sequence[len(ids) :], skip_special_tokens=True)
        assert (answer.n_new, answer.hit_cap) == (6, True)
        model.generation_config.eos_token_id = [2, sequence[len(ids) + 2]]
        (again,) = generator.answers(DENSE, batch)
        assert again.n_new <= 3 and not again.hit_cap
        assert tokenizer().decode(sequence[len(ids) : len(ids) + again.n_new], skip_special_tokens=True) == again.text
    model.generation_config = original


def test_what_is_done_is_not_done_again(tmp_path):
    make_runner(tmp_path).run((DENSE,))
    generator = FakeGenerator()
    assert make_runner(tmp_path, generator).run((DENSE,)) == 0
    assert generator.asked == []


def test_a_failing_prompt_is_recorded_and_tried_again_later(tmp_path):
    error = torch.OutOfMemoryError("out of memory: 3 GiB\nwith details")
    runner = make_runner(tmp_path, FakeGenerator(fails=lambda call: error if call == 3 else None))
    assert runner.run((DENSE,)) == 1
    results = runner.store.results("dense")
    assert len(results) == 6
    assert results["single/000001"]["error"] == "OutOfMemoryError: out of memory: 3 GiB"
    generator = FakeGenerator()
    assert make_runner(tmp_path, generator).run((DENSE,)) == 0
    assert [batch.names for _, batch in generator.asked] == [("single/000001",)]
    assert not any("error" in result for result in Store(tmp_path).results("dense").values())


def test_nothing_but_failures_stops_the_run(tmp_path):
    with pytest.raises(EvalError, match="first 3 prompts all failed.*ZeroDivisionError"):
        make_runner(tmp_path, FakeGenerator(fails=lambda call: ZeroDivisionError("by 0"))).run((DENSE,))


def test_dense_below_the_floor_stops_with_three_answers(tmp_path):
    with pytest.raises(EvalError, match="scores 0 % on the first 5 prompts of single") as caught:
        make_runner(tmp_path, n=6, floor=50.0).run((DENSE, SPARSE))
    assert str(caught.value).count("expected ('zz', 'qq')") == 3
    assert len(Store(tmp_path).results("dense")) == 5
    # Fewer prompts than five are judged when they are done; other tasks are not judged at all.
    with pytest.raises(EvalError, match="on the first 2 prompts"):
        make_runner(tmp_path / "few", n=2, floor=50.0).run((DENSE,))
    assert make_runner(tmp_path / "fwe", tasks=("fwe",), floor=50.0).run((DENSE,)) == 0


def test_the_floor_stops_a_resumed_run_again(tmp_path):
    for _ in range(2):
        with pytest.raises(EvalError, match="scores 0 % on the first 5 prompts of single"):
            make_runner(tmp_path, n=5, floor=50.0).run((DENSE, SPARSE))
    assert len(Store(tmp_path).results("dense")) == 5 and not Store(tmp_path).results(slug(SPARSE))
    assert make_runner(tmp_path, n=5).run((DENSE, SPARSE)) == 0


def test_a_failed_prompt_does_not_hide_a_score_below_the_floor(tmp_path):
    generator = FakeGenerator(fails=lambda call: MemoryError("out of memory") if call == 1 else None)
    with pytest.raises(EvalError, match="scores 0 % on the first 2 prompts of single"):
        make_runner(tmp_path, generator, n=3, floor=50.0).run((DENSE, SPARSE))


def test_a_sparse_method_without_sparse_calls_stops(tmp_path):
    with pytest.raises(EvalError, match=r"S=32, single/000000: no call of this generation was sparse"):
        make_runner(tmp_path, FakeGenerator(sparse_calls=0)).run((DENSE, SPARSE))
    assert len(Store(tmp_path).results("dense")) == 1


def test_processes_share_the_prompts(tmp_path):
    for rank in range(2):
        make_runner(tmp_path, joined=Processes(rank, 2)).run((DENSE,))
    files = {path.name: len(path.read_text().splitlines()) for path in (tmp_path / "results").iterdir()}
    assert files == {"dense.rank0.jsonl": 3, "dense.rank1.jsonl": 3}
    assert len(Store(tmp_path).results("dense")) == 6


def test_processes_that_hold_one_model_answer_every_prompt_and_one_writes(tmp_path):
    for rank in range(2):
        generator = FakeGenerator()
        make_runner(tmp_path / str(rank), generator, joined=Processes(rank, 2, together=True)).run((DENSE,))
        assert len(generator.asked) == 6
    assert {path.name for path in (tmp_path / "0" / "results").iterdir()} == {"dense.jsonl"}
    assert len(Store(tmp_path / "0").results("dense")) == 6 and not Store(tmp_path / "1").results("dense")


def test_processes_that_hold_one_model_stop_at_a_failure(tmp_path):
    generator = FakeGenerator(fails=lambda call: MemoryError("out of memory") if call == 3 else None)
    with pytest.raises(EvalError, match="single/000001: MemoryError: out of memory.*--resume goes on from there"):
        make_runner(tmp_path, generator, joined=Processes(0, 2, together=True)).run((DENSE,))
    assert len(Store(tmp_path).results("dense")) == 2


def test_other_ids_than_frozen_are_refused(tmp_path):
    runner = make_runner(tmp_path)
    changed = copy.deepcopy(tokenizer())
    changed.backend_tokenizer.normalizer = normalizers.Lowercase()
    runner.renderer = Renderer(changed)
    with pytest.raises(EvalError, match="makes other ids"):
        runner.run((DENSE,))


def test_noise_keys_are_those_of_the_prompt():
    keys = {generation.sequence_key(seed, f"qa/{i:06d}") for seed in range(3) for i in range(50)}
    assert len(keys) == 150 and all(0 <= key < 2**63 for key in keys)


def test_progress_prints_lines_without_a_terminal():
    text = io.StringIO()
    with Progress(Console(file=text), every=1000.0) as progress:
        progress.stage("dense", 3, 1)
        progress.step("fwe score 50.0")
        assert text.getvalue() == ""
        progress.end_stage()
    assert text.getvalue() == "dense: 2/3, fwe score 50.0\n"
    quiet = io.StringIO()
    with Progress(Console(file=quiet), quiet=True, every=0) as progress:
        progress.stage("dense", 1)
        progress.step()
        progress.end_stage()
    assert quiet.getvalue() == ""


def test_progress_draws_one_bar_on_a_terminal():
    text = io.StringIO()
    with Progress(Console(file=text, force_terminal=True, width=120)) as progress:
        progress.stage("dense", 2)
        progress.step("vt score 75.0, rows 40.0 %")
        progress.step()
        progress.bar.refresh()
        assert "2/2" in text.getvalue() and "vt score 75.0, rows 40.0 %" in text.getvalue()
        progress.end_stage()
        assert progress.bar.tasks == []
    assert "dense: 2/2, vt score 75.0, rows 40.0 %" in text.getvalue()


def test_a_long_note_leaves_count_and_times_whole_at_80_columns():
    text = io.StringIO()
    with Progress(Console(file=text, force_terminal=True, width=80)) as progress:
        progress.stage("answers", 1284)
        progress.step("SANTA++ contiguous 16/4 per head S=4096, multivalue score 100.0, rows 50.8 %")
        progress.bar.refresh()
        shown = text.getvalue().split("\r")[-1]
        assert "answers" in shown and "1/1284" in shown and "0:00:00" in shown and "SANTA++ contig" in shown
        assert "…" not in shown


def test_model_options_are_checked_before_loading(tmp_path):
    def refuses(match, **options):
        with pytest.raises(EvalError, match=match):
            models.ModelSpec(**options).check()

    refuses("no such directory.*builtin:tiny", name="./nowhere")
    refuses("no such directory", name="nowhere")
    refuses("large models", name="builtin:tiny", quant="int8")
    refuses("fits on one device", name="builtin:tiny", device_map="auto")
    if not torch.cuda.is_available():
        refuses("sees no GPU", name="owner/name", device="cuda")
    models.ModelSpec("owner/name").check()
    models.ModelSpec("builtin:tiny").check()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EvalError, match="cannot load the tokenizer"):
        models.load_tokenizer(models.ModelSpec(str(tmp_path), offline=True))


def test_more_processes_than_gpus_share_them(monkeypatch):
    spec = models.ModelSpec("owner/name")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [spec.resolved_device(rank) for rank in range(5)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]
    assert spec.sharing(2) is None and spec.sharing(1) is None
    assert "5 processes share 2 GPUs:" in spec.sharing(5)
    assert "2 processes share 1 GPU:" in models.ModelSpec("owner/name", device="cuda:1").sharing(2)
    assert models.ModelSpec("owner/name", device="cpu").sharing(4) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert spec.sharing(4) is None


def test_options_beside_tensor_parallel(monkeypatch):
    def refuses(match, **options):
        with pytest.raises(EvalError, match=match):
            models.ModelSpec("owner/name", tensor_parallel=True, **options).check()

    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    models.ModelSpec("owner/name", tensor_parallel=True).check()
    refuses("without --device-map auto", device_map="auto")
    refuses("--device cpu: .*leave it out", device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    refuses("4 processes were started here for 2 GPUs")
    assert models.ModelSpec("owner/name", tensor_parallel=True).sharing(4) is None


def test_processes_join_through_gloo_whatever_the_devices(monkeypatch):
    """NCCL would refuse two processes on one GPU."""
    joined, devices = [], []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: joined.append(args))
    for name, value in {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert processes.join() == Processes(6, 8, 2, 4) and joined == [("gloo",)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    assert processes.join() == Processes(6, 8, 2, 4) and joined[1:] == [("gloo",)] and not devices
    # one model over several GPUs needs it
    assert processes.join(together=True) == Processes(6, 8, 2, 4, True)
    assert joined[2:] == [("cpu:gloo,cuda:nccl",)] and devices == [2]


def test_a_model_is_told_from_another_of_its_name(tmp_path):
    spec = models.ModelSpec(str(save_random_model(tmp_path)))
    config = models.load_config(spec)
    before = models.identity(spec, config)
    assert context_limit(config) == 4096
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text() + " ")
    assert models.identity(spec, config) != before
