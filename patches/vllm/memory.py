"""What the plugin keeps beside vLLM's cache is taken from the cache's share, before vLLM counts blocks.

vLLM runs the model once without attention, and gives the cache what that run left. Team records, which grow with the
blocks, and scratch of a step, which grows with the batch, come later: without this they would have to fit into what
``gpu_memory_utilization`` leaves to others.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.logger import init_logger

from latent_santa.integers import ceil_div
from latent_santa.paged import empty_records
from latent_santa.patches.vllm.sampled import SampledImpl, sampling_of
from latent_santa.patches.vllm.settings import Settings, read

logger = init_logger(f"vllm.{__name__}")
GIB = 1 << 30


def reserve(worker: Any) -> None:
    """Wrap what a worker class measures, once per process."""
    own = worker.determine_available_memory
    if hasattr(own, "leaves_room"):
        return

    @functools.wraps(own)
    def leaving(self: Any) -> int:
        found, config = own(self), self.vllm_config
        settings = read(additional=config.additional_config)
        layers = [
            layer
            for layer in config.compilation_config.static_forward_context.values()
            if isinstance(getattr(layer, "impl", None), SampledImpl)
        ]
        if not layers:
            return int(found)
        specs = list(self.get_kv_cache_spec().values())
        scratch = scratch_bytes(config, settings, layers[0], specs[0]) if self.device.type == "cuda" else 0
        return for_cache(int(found), specs, settings, scratch, config.scheduler_config.max_num_seqs)

    leaving.leaves_room = True  # type: ignore[attr-defined]
    worker.determine_available_memory = leaving


def scratch_bytes(config: Any, settings: Settings, layer: Any, spec: Any) -> int:
    """Scratch of a step of the largest batch, which all layers share."""
    from latent_santa.kernels.paged_launch import scratch_bytes as of_step

    dims = (layer.kv_lora_rank, layer.qk_rope_head_dim)
    table = (config.scheduler_config.max_num_seqs, ceil_div(config.model_config.max_model_len, spec.block_size))
    sampling = sampling_of(settings, 0, layer.num_heads, layer.scale)
    return of_step(table, layer.num_heads, dims, spec.dtype, spec.block_size, sampling, torch.device("cuda"))


def for_cache(available: int, specs: list[Any], settings: Settings, scratch: int, sequences: int) -> int:
    """Bytes for the cache's blocks, of so many ``available`` for them, their records, and ``scratch``.

    Args:
        specs: vLLM's description of every layer's cache.
        sequences: most requests in a step, for the message.

    Raises:
        ValueError: the scratch alone takes them all.
    """
    if available <= scratch:
        raise ValueError(
            f"SANTA++ needs {scratch / GIB:.2f} GiB for a step of {sequences} requests, and {available / GIB:.2f} are "
            "left for it and the cache: lower max_num_seqs or max_model_len, or raise gpu_memory_utilization"
        )
    page, records = sum(spec.page_size_bytes for spec in specs), 0
    p, r = settings.config.parent_size, settings.config.representatives
    for spec in specs:
        block = torch.empty(1, spec.block_size, spec.head_size, dtype=spec.dtype)
        means_of = None if settings.parents is None else block
        records += empty_records(1, spec.block_size, p, r, "cpu", means_of).bytes()
    cache = (available - scratch) * page // (page + records)
    logger.info(
        "SANTA++ keeps %.2f GiB of team records and %.2f GiB of scratch beside a cache of %.2f GiB",
        (available - scratch - cache) / GIB, scratch / GIB, cache / GIB,
    )  # fmt: skip
    return cache
