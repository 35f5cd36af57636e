"""Decoding steps of vLLM, dense and sampled, in one engine: its own dense kernel and ours take turns on the same cache.

A setting has its own CUDA graphs, captured once and kept; switching to it exchanges the graphs and how layers decode.
So the engine starts once, and every prompt is prefilled once: later prompts find its rows by prefix caching.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# sizes of DeepSeek-V2-Lite; a group of experts is none
LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 163840, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_bias": False, "moe_layer_freq": 1, "n_group": 1,
    "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "use_cache": True,
}  # fmt: skip
TINY = LITE | {
    "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1,
    "n_routed_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
BUDGET = 128  # of the setting that the engine starts with
SPREAD = 97  # tokens of a mixed load's prompts differ in length by a multiple of this


@dataclass(frozen=True)
class Setting:
    """How decoding is done.

    Attributes:
        name: as on the command line: ``dense``, ``dense:SPLITS``, ``own_dense``, ``per_head:S``, ``pooled:S``, and
            ``per_head+two_stage:S:K1``, ``pooled+two_stage:S:K1``.
        splits: most splits of a row in vLLM's dense kernel inside a graph; 0 is vLLM's default.
        budget: S, or 0 where nothing is sampled.
        estimator: of a sampled setting.
        parents: K1 of two stages, or None for one.
    """

    name: str
    splits: int = 0
    budget: int = 0
    estimator: str = "per_head"
    parents: int | None = None

    @property
    def platform(self) -> bool:
        """Whether vLLM's own dense kernel decodes."""
        return self.name.startswith("dense")

    @classmethod
    def parse(cls, word: str) -> Setting:
        """Read one of the names. Raises ValueError for another one."""
        name, *given = word.split(":")
        numbers = [int(number) if number.isdigit() else 0 for number in given]
        if name == "dense" and len(numbers) <= 1 and all(numbers):
            return cls(word, splits=sum(numbers))
        if word == "own_dense":
            return cls(word)
        estimator, plus, stages = name.partition("+")
        wanted = {"": 1, "+two_stage": 2}.get(plus + stages)
        if estimator in ("per_head", "pooled") and len(numbers) == wanted and all(numbers):
            return cls(word, budget=numbers[0], estimator=estimator, parents=numbers[1] if plus else None)
        raise ValueError(f"{word!r}: must be dense, dense:SPLITS, own_dense, ESTIMATOR:S or ESTIMATOR+two_stage:S:K1")


class Engine:
    """vLLM in this process, with random weights, and the settings it can be switched to."""

    def __init__(self, config: dict[str, Any], folder: Path, length: int, sequences: int, options: dict[str, Any],
                 parents: int | None = None):  # fmt: skip
        os.environ.update(
            HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0",
            LATENT_SANTA_BUDGET=str(BUDGET), LATENT_SANTA_LOG_SECONDS="0",
            LATENT_SANTA_ROUTING="two_stage" if parents else "one_stage",
            LATENT_SANTA_PARENTS_PER_HEAD=str(parents or 1),
        )  # fmt: skip
        from latent_santa.vllm_plugin import register

        register()  # also where the package was not installed, and vLLM finds no entry point
        from vllm import LLM, SamplingParams

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        self._params, self._vocabulary = SamplingParams, config["vocab_size"]
        self.llm = LLM(model=str(folder), skip_tokenizer_init=True, load_format="dummy", seed=0, max_num_seqs=sequences,
                       max_model_len=length, disable_log_stats=True, **options)  # fmt: skip
        core = self.llm.llm_engine.engine_core
        self.runner = core.engine_core.model_executor.driver_worker.model_runner
        self.builder = self.runner.attn_groups[0][0].get_metadata_builder(0)
        manager = getattr(self.runner, "cudagraph_manager", None)
        first = f"per_head+two_stage:{BUDGET}:{parents}" if parents else f"per_head:{BUDGET}"
        self._graphs: dict[str, Any] = {} if manager is None else {first: manager.graphs}
        self.steps: list[tuple[float, int]] = []
        answer = core.get_output

        def timed() -> Any:
            outputs = answer()
            if outputs.outputs:
                self.steps.append((time.perf_counter(), sum(bool(o.new_token_ids) for o in outputs.outputs)))
            return outputs

        core.get_output = timed

    def cached_tokens(self) -> int:
        """Rows that the paged cache holds."""
        cache = self.llm.llm_engine.vllm_config.cache_config
        return int(cache.num_gpu_blocks) * int(cache.block_size)

    def totals(self) -> dict[str, Any]:
        """What the ledger has counted."""
        found: dict[str, Any] = self.builder.ledger.as_dict()["totals"]
        return found

    def use(self, setting: Setting) -> None:
        """Decode like this from now on; captures graphs the first time."""
        builder, manager = self.builder, getattr(self.runner, "cudagraph_manager", None)
        builder.on = not setting.platform
        if setting.splits and hasattr(builder, "max_num_splits"):
            builder.max_num_splits = setting.splits
        elif hasattr(builder, "max_num_splits"):
            attention = self.llm.llm_engine.vllm_config.attention_config
            builder.max_num_splits = attention.flash_attn_max_num_splits_for_cuda_graph
        for sampler in builder.samplers.values():
            below = 0 if setting.budget else 1 << 30
            sampler.sampling = replace(
                sampler.sampling, dense_below=below, estimator=setting.estimator,
                teams_per_head=max(1, setting.budget // 4), parents_per_head=setting.parents,
            )  # fmt: skip
        if manager is None or not manager.needs_capture():
            return
        if setting.name not in self._graphs:
            manager.graphs = {}
            self.runner.capture_model()
            self._graphs[setting.name] = manager.graphs
        manager.graphs = self._graphs[setting.name]

    def prompts(self, batch: int, context: int) -> list[list[int]]:
        """The first ``context`` tokens of ``batch`` random sequences, the same ones for every call."""
        return [self._sequence(i, context) for i in range(batch)]

    def _sequence(self, number: int, context: int) -> list[int]:
        generator = random.Random(number)
        return [generator.randrange(2, self._vocabulary) for _ in range(context)]

    def generate(self, prompts: Sequence[list[int]], tokens: int, seed: int | None = 0, top: int = 0) -> Any:
        """``tokens`` tokens for every prompt, at temperature 1 so that sequences differ; with ``seed=None`` greedy."""
        self.steps.clear()
        params = self._params(max_tokens=tokens, temperature=0.0 if seed is None else 1.0, seed=seed, ignore_eos=True,
                              detokenize=False, logprobs=top or None)  # fmt: skip
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return self.llm.generate(given, params, use_tqdm=False)

    def prefill(self, prompts: Sequence[list[int]]) -> float:
        """Cache the prompts' rows with their teams, which a dense setting does not make; seconds."""
        self.builder.on = True
        begun = time.perf_counter()
        self.generate(prompts, 1)
        return time.perf_counter() - begun

    def gaps(self, batch: int) -> list[float]:
        """Milliseconds between engine steps that both brought a token for every sequence."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return [1e3 * (late[0] - early[0]) for early, late in pairs if early[1] == late[1] == batch]


def facts(engine: Engine, small: bool) -> dict[str, Any]:
    """What a run's numbers rest on."""
    import torch
    import vllm

    cache = engine.llm.llm_engine.vllm_config.cache_config
    return {
        "vllm": vllm.__version__, "torch": torch.__version__, "shape": "tiny" if small else "deepseek-v2-lite",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "weights": "random",
        "block_size": cache.block_size, "cached_tokens": engine.cached_tokens(),
    }  # fmt: skip


def step_times(
    engine: Engine, points: Sequence[tuple[int, int]], settings: Sequence[Setting], tokens: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Each point's median step, the settings taking turns on the same cached rows."""
    for batch, context in points:
        prompts = engine.prompts(batch, context)
        prefill = engine.prefill(prompts)
        gaps: dict[str, list[float]] = {setting.name: [] for setting in settings}
        read: dict[str, float | None] = {}
        for turn in range(repeats + 1):  # the first warms up
            for setting in settings:
                engine.use(setting)
                before = engine.totals()
                engine.generate(prompts, tokens if turn else 9, seed=turn)
                read[setting.name] = None if setting.platform else _percent(before, engine.totals())
                if turn:
                    gaps[setting.name] += engine.gaps(batch)
        for name, found in gaps.items():
            yield {
                "batch": batch, "context": context, "setting": name, "prefill_s": round(prefill, 2),
                "steps": len(found), "step_ms": _median(found), "rows_read_percent": read[name],
            }  # fmt: skip


def mixed_load(
    engine: Engine, requests: int, shortest: int, longest: int, distinct: int, settings: Sequence[Setting], tokens: int
) -> Iterator[dict[str, Any]]:
    """Tokens per second of ``requests`` prompts of different lengths at once, whose rows are cached before.

    The prompts begin ``distinct`` sequences, so several requests share blocks, as requests with a common document do.
    """
    lengths = [shortest + (longest - shortest) * i // max(1, requests - 1) for i in range(requests)]
    lengths = [length - length % SPREAD for length in lengths]
    whole = engine.prompts(distinct, longest)
    prompts = [whole[i % distinct][:length] for i, length in enumerate(lengths)]
    engine.prefill(prompts)
    for setting in settings:
        engine.use(setting)
        engine.generate(prompts, 9)
        begun = time.perf_counter()
        engine.generate(prompts, tokens, seed=1)
        seconds = time.perf_counter() - begun
        yield {
            "requests": requests, "shortest": min(lengths), "longest": max(lengths), "setting": setting.name,
            "tokens_per_second": round(requests * tokens / seconds, 1), "step_ms": _median(engine.gaps(requests)),
        }  # fmt: skip


def _percent(before: dict[str, Any], after: dict[str, Any]) -> float | None:
    """Rows read between two looks at the ledger, in percent of dense's."""
    read, dense = (
        sum(after[name] - before[name] for name in names)
        for names in (("routing", "union", "suffix", "dense_rows"), ("dense",))
    )
    return round(100 * read / dense, 1) if dense else None


def _median(found: Sequence[float]) -> float | None:
    return round(statistics.median(found), 3) if found else None
