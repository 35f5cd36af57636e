"""One engine in a process of its own: ``python engine.py SPEC ANSWER``, both JSON. Tests describe what it should do.

A specification has the environment, vLLM's options, and batches of requests (token ids and how many tokens to make).
The answer has every request's tokens and cached prefix, the preemptions, and on request the inputs of decoding steps.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# several ranks need processes; one rank in this process lets a test look into it
FIXED = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TOKENIZERS_PARALLELISM": "false", "VLLM_HOST_IP": "127.0.0.1",
    "TORCHDYNAMO_DISABLE": "1",  # a rank of several compiles an embedding, which would need a C++ compiler
}  # fmt: skip
# vLLM 0.32.0's CPU kernel for interleaved rotary embeddings is wrong for several heads; its PyTorch code is not
OPTIONS = {"dtype": "float32", "enforce_eager": True, "seed": 0, "compilation_config": {"custom_ops": ["none"]}}


def environment(spec: dict[str, Any]) -> dict[str, str]:
    """The process's environment: nothing of the plugin's is inherited."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LATENT_SANTA_")}
    inside = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(spec["options"].get("tensor_parallel_size", 1) > 1))}
    return {**kept, **FIXED, **inside, **spec.get("environment", {})}


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Start the engine, answer the batches, and say what happened."""
    from vllm import LLM, SamplingParams

    llm = LLM(**{**OPTIONS, **spec["options"]})
    inner = getattr(llm.llm_engine.engine_core, "engine_core", None)
    preempted = _watch_preemption(inner.scheduler) if inner else []
    steps: list[dict[str, Any]] = []
    if spec.get("record"):
        _record(steps)
    answers = []
    for batch in spec["batches"]:
        params = [SamplingParams(max_tokens=r["tokens"], temperature=0.0, ignore_eos=True) for r in batch]
        made = llm.generate([{"prompt_token_ids": r["ids"]} for r in batch], params, use_tqdm=False)
        answers.append([{"id": o.request_id, "tokens": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens}
                        for o in made])  # fmt: skip
    found: dict[str, Any] = {"answers": answers, "preempted": preempted, "steps": steps}
    if inner and "LATENT_SANTA_BUDGET" in os.environ:
        builder = inner.model_executor.driver_worker.model_runner.attn_groups[0][0].get_metadata_builder(0)
        found["ledger"] = builder.ledger.as_dict()
    return found


def _watch_preemption(scheduler: Any) -> list[tuple[str, int]]:
    noted: list[tuple[str, int]] = []
    own = scheduler._preempt_request

    def noting(request: Any, *rest: Any, **options: Any) -> Any:
        noted.append((request.request_id, request.num_output_tokens))
        return own(request, *rest, **options)

    scheduler._preempt_request = noting
    return noted


def _record(steps: list[dict[str, Any]]) -> None:
    """Keep what every decoding call was given: query, visible rows, layer, K, and what it counted."""
    import torch

    from latent_santa.patches.vllm import sampled

    own = sampled.paged_attention

    def keeping(query: Any, cache: Any, records: Any, table: Any, lens: Any, s: Any, counts: Any, **rest: Any) -> Any:
        before, rank = counts.clone(), query[0].shape[2]
        out = own(query, cache, records, table, lens, s, counts, **rest)
        for b, n in enumerate(lens.tolist()):
            rows = cache[table[b, : -(-n // cache.shape[1])].long()].flatten(0, 1)[:n]
            asked = torch.cat(query, -1)[b]
            steps.append({"query": asked.tolist(), "rows": rows.tolist(), "layer": s.layer, "k": s.teams_per_head,
                          "scale": s.scale, "seed": s.seed, "block": cache.shape[1], "rank": rank,
                          "counts": (counts - before)[b].tolist(), "out": out[b].tolist()})  # fmt: skip
        return out

    sampled.paged_attention = keeping


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as stream:
        given = json.load(stream)
    os.environ.clear()
    os.environ.update(environment(given))
    result = run(given)
    with open(sys.argv[2], "w", encoding="utf-8") as stream:
        json.dump(result, stream)
