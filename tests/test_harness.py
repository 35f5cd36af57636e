"""lm-evaluation-harness on the embedded model, where it is installed: a task of our own that generates."""

from __future__ import annotations

import json
import sys

import pytest

import latent_santa
from latent_santa.eval.tiny import load_tiny, samples


def test_without_the_package_the_module_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "latent_santa.eval.harness", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'latent-santa\[harness\]'"):
        import latent_santa.eval.harness  # noqa: F401


@pytest.fixture(scope="module")
def harness():
    evaluator = pytest.importorskip("lm_eval.evaluator")
    from latent_santa.eval import harness

    manager = harness.TaskManager()  # reads the definitions of all tasks
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(evaluator, "add_env_info", lambda results: None)  # asks pip and git, for half a minute
        patched.setattr(harness, "TaskManager", lambda **options: manager)
        yield harness


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The tiny model's own questions as a task of the harness; `kind` is what it asks of the model."""
    _, tokenizer = load_tiny()
    path = tmp_path_factory.mktemp("task") / "questions.jsonl"
    asked = samples("multikey", 3, 512, tokenizer)
    path.write_text("".join(json.dumps({"text": s.input, "answer": s.references[0]}) + "\n" for s in asked))

    def make(kind: str = "generate_until") -> dict:
        config = {
            "task": f"own_{kind}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(path)}},
            "test_split": "test",
            "output_type": kind,
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{answer}}",
        }
        if kind == "generate_until":
            digits = {"function": "regex", "regex_pattern": r"(\d+)"}
            config |= {
                "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False},
                "filter_list": [{"name": "digits", "filter": [digits, {"function": "take_first"}]}],
                "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
            }
        return config

    return make


def run(harness, task, batch_size: int = 1, **settings):
    model, tokenizer = load_tiny()
    with latent_santa.patch(model, **settings) as santa:
        lm = harness.SampledLM(santa, tokenizer, batch_size=batch_size)
        results = harness.evaluate(lm, [task()], apply_chat_template=True, bootstrap_iters=0, log_samples=True)
    answers = {s["doc_id"]: s["resps"][0][0] for s in results["samples"]["own_generate_until"]}
    return results["results"]["own_generate_until"]["exact_match,digits"], results["latent_santa"], answers


SETTINGS = {"budget": 32, "parents": "contiguous", "estimator": "pooled"}


def test_a_task_that_generates_is_sampled_and_counted(harness, task):
    score, told, answers = run(harness, task, **SETTINGS)
    dense, all_rows, _ = run(harness, task, method="dense")
    assert dense == 1 and score > 0.5
    assert told["sparse_calls"] > 0 and told["dense_calls"] == 0 and 0 < told["rows_percent"] < 100
    assert told["settings"]["budget"] == 32 and all_rows["sparse_calls"] == 0
    _, batched, together = run(harness, task, batch_size=3, **SETTINGS)
    assert together == answers  # the noise is the prompt's own


def test_log_likelihoods_are_refused_before_anything_runs(harness, task):
    model, tokenizer = load_tiny()
    with latent_santa.patch(model, **SETTINGS) as santa:
        lm = harness.SampledLM(santa, tokenizer)
        with pytest.raises(NotImplementedError, match=r"own_loglikelihood \(loglikelihood\).*santa.score"):
            harness.evaluate(lm, [task(), task("loglikelihood")])
        assert santa.sparse_calls == 0
        for refused in (lm.loglikelihood, lm.loglikelihood_rolling):
            with pytest.raises(NotImplementedError, match=r"santa\.score"):
                refused([])
