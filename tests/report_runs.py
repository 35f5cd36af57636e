"""Runs whose results are given, for the tests of what is made of them."""

from __future__ import annotations

from latent_santa.eval.report import paper_tables
from latent_santa.eval.run.conditions import slug, swept
from latent_santa.eval.run.store import Prompt, Store
from latent_santa.eval.sources.samples import make_sample
from tests.eval_support import DENSE, santapp

PAPER = [santapp(s, "kmeans", "per_head") for s in (128, 256)]
POOLED = santapp(128, "kmeans", "pooled")
TASKS = paper_tables.MLA_TASKS


def make_run(directory, scores, data="jsonl", model="deepseek-ai/DeepSeek-V2-Lite-Chat", n=4, tokens=8000, **settings):
    """A run whose results are given: condition -> task -> scores. Reads: 10 routing, 20 rows, 60 dense a prompt."""
    store = Store(directory)
    prompts = [
        Prompt(make_sample(task, i, f"Question {i}?", ["x"], max_new_tokens=4, source=data), tokens + i, "hash")
        for task in TASKS
        for i in range(n)
    ]
    base = {"model": model, "length": 8192, "n": n, "tasks": list(TASKS), "data_seed": 42, "data": data, "seed": 0}
    base |= {"kmeans_seed": 0, "first_token": "replay", "noise": "independent", "quant": "int8", "dtype": "bfloat16"}
    base |= {"answer_prefix": "assistant", "select": "sample", "device": "cuda"}
    base |= {"kmeans_engine": "sklearn", "math_sdpa": False}
    manifest = {"settings": base | settings, "conditions": [swept(c) for c in scores], "origin": {"data": data}}
    manifest["loaded"] = {"parameters": 1000, "int8_parameters": 970, "int8_meant": 970}
    store.freeze(manifest | {"warnings": ["from the data"], "environment": {}}, prompts)
    for condition, by_task in scores.items():
        for prompt in prompts:
            number = int(prompt.sample.id[-6:])
            value = by_task[prompt.sample.task][number]
            if value is None:
                continue
            result = {"id": prompt.sample.id, "run": store.manifest()["key"], "text_sha256": prompt.sample.text_sha256}
            if value == "error":
                store.append(slug(condition), result | {"error": "OutOfMemoryError"})
                continue
            reads = (60, 60) if condition == DENSE else (30 + number, 20 + number)
            result |= {"score": value, "output": "x", "hit_cap": number == 0, "n_new": 3}
            result |= {"sparse_calls": 0 if condition == DENSE else 3, "dense_calls": 0, "seconds": 1.0}
            result["access"] = {"numerator": reads[0], "row_read": reads[1], "denominator": 60}
            store.append(slug(condition), result)
    return store


def same(values):
    return {task: values for task in TASKS}
