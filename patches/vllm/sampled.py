"""What replaces decoding in a platform's MLA classes: an implementation and a metadata builder to mix into them.

A block's teams are made with the cache write that fills it, in prefill and decode alike, and belong to the physical
block. So chunked prefill, shared prefixes and preemption need nothing. One token per request is decoded by sampled
attention; several at once (prompts, speculative tokens) are vLLM's own dense prefill attention. Nothing here reads the
device, and all tensors keep their addresses, so that a decoding step can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_dp_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder, QueryLenSupport
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionCGSupport

from latent_santa.paged import PagedRecords, PagedSampling, empty_records, paged_attention, write_rows
from latent_santa.patches.vllm import batch
from latent_santa.patches.vllm.ledger import Ledger
from latent_santa.patches.vllm.settings import Settings, check_engine, read

logger = init_logger(f"vllm.{__name__}")  # vLLM shows the loggers below its own name

SEVERAL_TOKENS = "several tokens at once: speculative decoding"


@dataclass
class Sampler:
    """One layer's part: records of its blocks, how it samples, and the tensors that all layers share."""

    cache: Tensor
    records: PagedRecords
    sampling: PagedSampling
    counts: Tensor
    dense: Tensor


class SampledImpl:
    """Comes before a platform's MLA implementation in the order of classes."""

    sampler: Sampler | None = None

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *rest: Any
    ) -> None:
        """Write a step's rows and make the teams of the blocks that they fill, in one launch."""
        if self.sampler is None or not kv_cache.numel():
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, *rest)  # type: ignore[misc]
        else:
            write_rows(kv_cache, self.sampler.records, kv_c_normed, k_pe.squeeze(1), slot_mapping.flatten())

    def forward_mqa(self, q: Any, cache: Tensor, metadata: Any, layer: Any) -> tuple[Tensor, Tensor | None]:
        """Attention of one token per request in latent space, ``(B, H, rank)``."""
        s, decode = self.sampler, metadata.decode
        if s is None:
            return super().forward_mqa(q, cache, metadata, layer)  # type: ignore[misc]
        query = q if isinstance(q, tuple) else q.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)  # type: ignore[attr-defined]
        where = (cache, s.records, decode.block_table, decode.seq_lens)
        return paged_attention(query, *where, s.sampling, s.counts, dense=s.dense), None


def sampling_of(settings: Settings, layer: int, heads: int, scale: float) -> PagedSampling:
    """How a layer with so many heads in this process samples."""
    config = settings.config
    return PagedSampling(
        teams_per_head=config.teams_per_head,
        estimator=config.estimator,
        noise=config.noise,
        seed=config.seed,
        layer=layer,
        first_head=get_tensor_model_parallel_rank() * heads,
        heads_in_model=get_tensor_model_parallel_world_size() * heads,
        dense_below=settings.dense_below,
        parents_per_head=settings.parents,
        parent_size=config.parent_size,
        representatives=config.representatives,
        scale=scale,
    )


class SampledBuilder:
    """Comes before a platform's metadata builder: its part of every step is what the host has to do."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    query_len_support = QueryLenSupport.SINGLE_ONLY
    reorder_batch_threshold: int = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        settings = read(additional=vllm_config.additional_config)
        check_engine(vllm_config, settings, kv_cache_spec.block_size)
        self.metadata_cls = _of_any_rank(self.metadata_cls)  # type: ignore[has-type]
        context = vllm_config.compilation_config.static_forward_context
        self.layers = {name: context[name] for name in layer_names}
        self.settings = settings
        if vllm_config.parallel_config.rank == 0:
            logger.info(settings.line())
        scheduler, graphs = vllm_config.scheduler_config, vllm_config.compilation_config.cudagraph_capture_sizes or [0]
        places = max(scheduler.max_num_seqs, *graphs)
        self.ledger = Ledger(
            places,
            len(layer_names),
            device,
            {"settings": settings.line(), "config": settings.config.used() | {"dense_below": settings.dense_below}},
            _path(settings, vllm_config),
            settings.log_seconds if get_tensor_model_parallel_rank() == 0 else 0.0,
            logger.info,
        )
        self.dense = torch.zeros(places, dtype=torch.uint8, device=device)
        self.samplers: dict[str, Sampler] = {}
        self.on = True  # False leaves decoding to the platform's dense MLA: a benchmark measures both in one engine
        self._some_dense = False
        batch.watch()

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """vLLM's metadata of a step, after what the step needs of ours is in place."""
        found = super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        for name, layer in self.layers.items():
            known = self.samplers.get(name)
            if known is None or known.cache is not layer.kv_cache:
                known = self.samplers[name] = self._sampler(name, layer)
            layer.impl.sampler = known if self.on else None
        self._before_step(common_attn_metadata, found.num_decodes)
        return found

    def _build_decode(self, **parts: Any) -> Any:
        """Without the platform's schedule for its own dense kernel, unless that one decodes."""
        if not self.on:
            return super()._build_decode(**parts)  # type: ignore[misc]
        return MLACommonMetadataBuilder._build_decode(self, **parts)  # type: ignore[arg-type]

    def _sampler(self, name: str, layer: Any) -> Sampler:
        """Records of no teams beside the layer's cache; a cache in another place is another cache."""
        config, cache = self.settings.config, layer.kv_cache
        sampling = sampling_of(self.settings, extract_layer_index(name), layer.num_heads, layer.scale)
        p, r = config.parent_size, config.representatives
        means_of = None if self.settings.parents is None else cache
        records = empty_records(cache.shape[0], cache.shape[1], p, r, cache.device, means_of)
        return Sampler(cache, records, sampling, self.ledger.counts, self.dense)

    def _before_step(self, step: Any, decodes: int) -> None:
        ids = batch.take()
        if ids is None or not self.on:
            return
        starts = step.query_start_loc_cpu.tolist()
        rows = step.seq_lens_cpu_upper_bound.tolist()
        waiting = step.is_prefilling.tolist()
        decodes = min(decodes, len(ids))
        # a prompt's last chunk may be one token, which vLLM decodes; dense, as if the prompt had come in one piece
        flags = waiting[:decodes]
        if any(flags) or self._some_dense:
            others = [False] * (len(self.dense) - decodes)
            self.dense.copy_(torch.tensor(flags + others, dtype=torch.uint8), non_blocking=True)
            self._some_dense = any(flags)
        self.ledger.before_step(ids, rows, decodes)
        for b in range(decodes, len(ids)):
            if not waiting[b]:
                self.ledger.unsampled(SEVERAL_TOKENS, (starts[b + 1] - starts[b]) * rows[b])


def _of_any_rank(metadata: type) -> type:
    """The same metadata without vLLM's list of head sizes, which its own kernels have: ours take any rank."""
    return type(metadata.__name__, (metadata,), {"__post_init__": lambda self: None})


def _path(settings: Settings, vllm_config: Any) -> str:
    if not settings.ledger:
        return ""
    path, parallel = Path(settings.ledger), vllm_config.parallel_config
    replica = f".replica{get_dp_group().rank_in_group}" if parallel.data_parallel_size > 1 else ""
    return str(path.with_name(f"{path.stem}{replica}.rank{parallel.rank}{path.suffix or '.json'}"))
