"""SANTA++ on a CPU's vLLM: for tests and small models; the platform's own MLA there is for tests too.

vLLM's CPU platform chooses the MLA backend itself, turns chunked prefill and prefix caching off because its prefill
does not read cached rows, and makes blocks of 16 rows because its decoding takes no others. This backend's prefill
reads them and its decoding takes others, so all three stay as the user set them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata, MLACommonMetadataBuilder
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from latent_santa.patches.vllm import memory
from latent_santa.patches.vllm.sampled import SampledBuilder, SampledImpl
from latent_santa.patches.vllm.settings import check_engine, check_version, read


class SantaCPUImpl(SampledImpl, CPUMLAImpl):  # type: ignore[misc]
    """The platform's implementation, with sampled decoding and a prefill that reads cached rows."""

    def __init__(self, *args: Any, **options: Any) -> None:
        from vllm.v1.worker.cpu_worker import CPUWorker  # which imports the platform, and that this plugin

        memory.reserve(CPUWorker)
        super().__init__(*args, **options)

    def forward_mha(self, q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, cache: Tensor, metadata: Any, k_scale: Tensor,
                    output: Tensor, output_scale: Tensor | None = None) -> None:  # fmt: skip
        """Dense attention of several tokens per request, whose rows the cache holds already."""
        prefill = metadata.prefill
        if prefill.chunked_context is None:
            return super().forward_mha(q, kv_c_normed, k_pe, cache, metadata, k_scale, output, output_scale)
        starts = prefill.query_start_loc.tolist()
        seen = metadata.rows_seen[metadata.num_decodes :]
        out = output.view(-1, self.num_heads, self.v_head_dim)
        for table, first, end, rows in zip(prefill.block_table, starts[:-1], starts[1:], seen, strict=True):
            blocks = table[: -(-rows // cache.shape[1])].long()
            latent, rotary = cache[blocks].flatten(0, 1)[:rows].split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
            expanded = self.kv_b_proj(latent.contiguous())[0].view(rows, self.num_heads, -1)
            content, value = expanded.split([self.qk_nope_head_dim, self.v_head_dim], -1)
            key = torch.cat([content, rotary[:, None].expand(-1, self.num_heads, -1)], -1)
            hidden = torch.ones(end - first, rows, dtype=torch.bool).triu(rows - (end - first) + 1)
            scores = torch.einsum("qhd,khd->hqk", q[first:end].float(), key.float()) * self.scale
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[first:end] = torch.einsum("hqk,khd->qhd", weights, value.float()).to(out.dtype)


class SantaCPUBuilder(SampledBuilder, MLACommonMetadataBuilder[MLACommonMetadata]):  # type: ignore[misc]
    """The common builder, with what every step needs."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """As :meth:`SampledBuilder.build`; a prefill also needs the rows of each request."""
        found = super().build(common_prefix_len, common_attn_metadata, fast_build)
        found.rows_seen = common_attn_metadata.seq_lens.tolist()
        return found


class SantaCPUBackend(CPUMLABackend):
    """Any rank, and any block that whole parents fill."""

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """No list: PyTorch takes any."""
        return []

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Blocks of whole parents; :func:`.settings.check_engine` says which."""
        return [MultipleOf(1)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """As above."""
        return True

    @staticmethod
    def get_impl_cls() -> type[SantaCPUImpl]:
        """The class of the layers' attention."""
        return SantaCPUImpl

    @staticmethod
    def get_builder_cls() -> type[SantaCPUBuilder]:
        """The class of the steps' metadata."""
        return SantaCPUBuilder


def take_over() -> None:
    """Serve MLA on this CPU by :class:`SantaCPUBackend`, whichever backend the platform chooses.

    Raises:
        ValueError: vLLM's version, or a setting, is not one that works.
    """
    check_version("cpu")
    read()
    path = f"{__name__}.{SantaCPUBackend.__name__}"
    register_backend(AttentionBackendEnum.CPU_MLA, path)
    register_backend(AttentionBackendEnum.AMX_MLA, path)
    own = CpuPlatform.check_and_update_config
    if hasattr(own, "keeps_caching"):
        return

    def keeping(cls: type, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        kept = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching
        block_size = cache.block_size if cache.user_specified_block_size else None
        cache.user_specified_block_size = False  # else it warns of overriding what is set again below
        own(vllm_config)
        cache.user_specified_block_size = block_size is not None
        if block_size is not None:
            cache.block_size = block_size
        if vllm_config.model_config is None:
            return
        check_engine(vllm_config, read(additional=vllm_config.additional_config), block_size)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching = kept

    keeping.keeps_caching = True  # type: ignore[attr-defined]
    CpuPlatform.check_and_update_config = classmethod(keeping)
