"""SANTA++ on CUDA: vLLM's ``--attention-backend CUSTOM``, over the platform's MLA classes for all but decoding."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.fa_utils import flash_attn_supports_mla
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

from latent_santa.patches.vllm import memory
from latent_santa.patches.vllm.sampled import SampledBuilder, SampledImpl
from latent_santa.patches.vllm.settings import check_engine, check_version, read

check_version("cuda")


def _platform() -> Any:
    """The MLA backend that vLLM itself prefers on this device: FlashAttention-3's on Hopper, else Triton's."""
    if not flash_attn_supports_mla():
        return TritonMLABackend
    from vllm.v1.attention.backends.mla.flashattn_mla import FlashAttnMLABackend

    return FlashAttnMLABackend


PLATFORM: Any = _platform()


class SantaMLAImpl(SampledImpl, PLATFORM.get_impl_cls()):  # type: ignore[misc]
    """vLLM's prefill, cache and projections, with sampled decoding."""

    can_return_lse_for_decode = False

    def __init__(self, *args: Any, **options: Any) -> None:
        from vllm.v1.worker.gpu_worker import Worker  # a front end that only checks options needs no worker

        config = get_current_vllm_config()
        check_engine(config, read(additional=config.additional_config))  # before weights are loaded
        memory.reserve(Worker)
        super().__init__(*args, **options)


class SantaMLABuilder(SampledBuilder, PLATFORM.get_builder_cls()):  # type: ignore[misc]
    """The platform's metadata, with what every step needs."""


class SantaMLABackend(PLATFORM):  # type: ignore[misc]
    """Named CUSTOM in vLLM's options."""

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's log."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[SantaMLAImpl]:
        """The class of the layers' attention."""
        return SantaMLAImpl

    @staticmethod
    def get_builder_cls() -> type[SantaMLABuilder]:
        """The class of the steps' metadata."""
        return SantaMLABuilder
