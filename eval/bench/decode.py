"""Whole-model time and memory, patched and unpatched in one run: prefill, preparation, decode step, peak, bytes."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from latent_santa.patches.control import CACHE_NAMES

SHAPES: dict[str, dict[str, Any]] = {
    # sizes of deepseek-ai/DeepSeek-V2-Lite's config.json; weights are random here
    "deepseek-v2-lite": dict(
        vocab_size=102400, hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=27,
        num_attention_heads=16, num_key_value_heads=16, n_shared_experts=2, n_routed_experts=64, num_experts_per_tok=6,
        first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128,
        v_head_dim=128, max_position_embeddings=163840,
    ),
    "small": dict(
        vocab_size=1024, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=4, num_experts_per_tok=2,
        first_k_dense_replace=1, kv_lora_rank=64, q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=32,
        v_head_dim=32, max_position_embeddings=163840,
    ),
}  # fmt: skip


def shape_config(shape: str, layers: int | None, dtype: torch.dtype) -> Any:
    """The DeepseekV2Config of a known shape; ``layers`` replaces its number of layers."""
    from transformers import DeepseekV2Config

    return DeepseekV2Config(**{**SHAPES[shape], **({"num_hidden_layers": layers} if layers else {})}, dtype=dtype)


def weight_bytes(config: Any) -> int:
    """Memory of the model's weights, from a model of two layers with experts; nothing is allocated."""

    def of(layers: int) -> int:
        few = copy.copy(config)
        few.num_hidden_layers = layers
        model = random_model(few, config.dtype, "meta")
        return sum(weight.numel() * weight.element_size() for weight in model.parameters())

    all_kinds = config.first_k_dense_replace + 1
    more = config.num_hidden_layers - all_kinds
    if more <= 1:
        return of(config.num_hidden_layers)
    return of(all_kinds) + more * (of(all_kinds + 1) - of(all_kinds))


def random_model(config: Any, dtype: torch.dtype, device: str) -> Any:
    """A DeepseekV2ForCausalLM with random weights, made on its device."""
    from transformers import DeepseekV2ForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = DeepseekV2ForCausalLM._from_config(config, dtype=dtype)
    return model.eval()


SHORT = 2048  # tokens of the prefill whose rows stand in for those of a long one
UNTIMED = 2  # decoding steps before the timed ones


@dataclass
class Timing:
    """Figures of one setting; times in milliseconds are medians, memory in bytes.

    Attributes:
        prefill_ms: dense prefill of the whole batch, without preparation; None if the cache was filled with drawn rows.
        prepare_ms: parents, teams and frozen representatives of all layers; 0 for the unpatched model.
        step_ms: one decoding step of the whole batch.
        decode_peak: highest allocated GPU memory while decoding, weights included; None on a CPU.
        bytes_per_token: cache and team records, all layers, per cached token of one sequence.
        percent: rows read by the timed steps (Equation 14), in percent of dense.
    """

    name: str
    prefill_ms: float | None
    prepare_ms: float
    step_ms: float
    decode_peak: int | None
    bytes_per_token: float
    percent: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    model: Any,
    batch: int,
    context: int,
    steps: int,
    repeats: int,
    settings: list[dict[str, Any]],
    fill: str = "prefill",
) -> Iterator[Timing]:
    """Time the unpatched model and then every setting (overrides of SantaConfig) on the same random tokens.

    Args:
        batch: sequences.
        context: cached tokens per sequence before the first timed step.
        steps: timed decoding steps, after ``UNTIMED`` untimed ones.
        repeats: prefills, of which the median is taken; one more comes first, untimed.
        fill: where the cached rows come from. ``"prefill"`` of all tokens; or ``"rows"``, for contexts whose prefill
            would take minutes: rows drawn from those of a short prefill, with noise of a tenth of their spread.
    """
    import latent_santa

    device = model.get_input_embeddings().weight.device
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (batch, context), generator=generator).to(device)
    filled = _prefills if fill == "prefill" else _drawn
    yield _unpatched(model, ids, steps, repeats, filled)
    for overrides in settings:
        # the prefill is timed without the replay, which would be counted as preparation otherwise
        with latent_santa.patch(model, **{**overrides, "first_token": "dense"}) as santa:
            yield _patched(santa, model, ids, steps, repeats, _name(overrides), filled)


def _name(overrides: dict[str, Any]) -> str:
    return ", ".join(str(value) if name != "budget" else f"S={value}" for name, value in overrides.items())


# (model, ids, repeats) -> (filled cache, milliseconds of a prefill)
Fill = Callable[[Any, torch.Tensor, int], tuple[Any, float | None]]


@torch.inference_mode()
def _unpatched(model: Any, ids: torch.Tensor, steps: int, repeats: int, filled: Fill) -> Timing:
    cache, prefill_ms = filled(model, ids, repeats)
    step_ms, peak = _steps(model, ids, cache, steps)
    return Timing(
        "unpatched", prefill_ms, 0.0, step_ms, peak, _bytes(cache) / (ids.shape[0] * cache.get_seq_length()), 100.0
    )


@torch.inference_mode()
def _patched(santa: Any, model: Any, ids: torch.Tensor, steps: int, repeats: int, name: str, filled: Fill) -> Timing:
    cache, prefill_ms = filled(model, ids, repeats)
    santa.prepare(cache)  # untimed: it takes in a cache that no patched forward made
    prepared = []
    for _ in range(repeats):
        for layer in cache.layers:
            layer.regroup()
        prepared.append(_timed(lambda: santa.prepare(cache), ids.device)[1])
    santa.reset()
    step_ms, peak = _steps(model, ids, cache, steps)
    held = _bytes(cache) + sum(layer.grouped.teams.bytes() for layer in cache.layers if layer.grouped.teams is not None)
    per_token = held / (ids.shape[0] * cache.get_seq_length())
    return Timing(name, prefill_ms, statistics.median(prepared), step_ms, peak, per_token, santa.access.percent)


def _prefills(model: Any, ids: torch.Tensor, repeats: int) -> tuple[Any, float | None]:
    """A filled cache and the median time of a prefill of the base model."""
    times = []
    cache = None
    for _ in range(repeats + 1):
        cache = None
        _collect(ids.device)
        output, milliseconds = _timed(lambda: model.get_decoder()(input_ids=ids, use_cache=True), ids.device)
        times.append(milliseconds)
        cache = next(getattr(output, n) for n in CACHE_NAMES if getattr(output, n, None) is not None)
        del output
    return cache, statistics.median(times[1:])


def _drawn(model: Any, ids: torch.Tensor, repeats: int) -> tuple[Any, None]:
    """A cache of drawn rows, and no time."""
    from transformers import DynamicCache

    short = _prefills(model, ids[:1, :SHORT], 1)[0]
    cache = DynamicCache()
    batch, context = ids.shape
    generator = torch.Generator(ids.device).manual_seed(2)
    for number, layer in enumerate(short.layers):
        drawn = []
        for rows in (layer.keys, layer.values):
            pick = torch.randint(rows.shape[2], (batch, context), generator=generator, device=ids.device)
            part = rows[0, :, pick].transpose(0, 1).contiguous()
            for sequence in part:  # one at a time bounds the float32 copies
                noise = torch.randn(sequence.shape, generator=generator, device=ids.device)
                sequence.add_((0.1 * rows.float().std() * noise).to(rows.dtype))
            drawn.append(part)
        cache.update(*drawn, number)
    return cache, None


def _steps(model: Any, ids: torch.Tensor, cache: Any, steps: int) -> tuple[float, int | None]:
    """Median time of a decoding step of the whole model, head included, and the peak memory of the timed ones."""
    _collect(ids.device)
    name = next(n for n in CACHE_NAMES if _accepts(model, n))
    times = []
    for number in range(steps + UNTIMED):
        if number == UNTIMED and ids.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(ids.device)
        inputs = {"input_ids": ids[:, number % ids.shape[1]][:, None], name: cache}
        times.append(_timed(partial(model, **inputs, use_cache=True), ids.device)[1])
    peak = torch.cuda.max_memory_allocated(ids.device) if ids.device.type == "cuda" else None
    return statistics.median(times[UNTIMED:]), peak


def _accepts(model: Any, name: str) -> bool:
    import inspect

    return name in inspect.signature(type(model).forward).parameters


def _timed(action: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """The action's result and its wall time in milliseconds, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, 1000 * (time.perf_counter() - start)


def _bytes(cache: Any) -> int:
    """Bytes of the cached rows themselves (free room behind them is not counted)."""
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
