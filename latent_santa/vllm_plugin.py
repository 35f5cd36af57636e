"""The entry point ``vllm.general_plugins``: vLLM runs it in every process of every server where this is installed.

So it imports nothing of vLLM's or ours that a server which does not ask for SANTA++ would otherwise do without.
"""

from __future__ import annotations

import os

PREFIX = "LATENT_SANTA_"


def register() -> None:
    """Offer the attention backend of :mod:`latent_santa.patches.vllm`.

    On CUDA it becomes vLLM's ``--attention-backend CUSTOM``, imported when that is chosen. On a CPU, where vLLM chooses
    the MLA backend itself, any setting in the environment asks for it.

    Raises:
        ValueError: on a CPU where it is asked for, a setting or vLLM's version is not one that works.
    """
    from vllm.platforms import current_platform

    asked = any(name.startswith(PREFIX) for name in os.environ)
    if current_platform.is_cuda():
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CUSTOM, "latent_santa.patches.vllm.cuda.SantaMLABackend")
        if asked:
            from vllm.logger import init_logger

            init_logger(f"vllm.{__name__}").info("SANTA++ is there for --attention-backend CUSTOM; any other is dense")
    elif current_platform.is_cpu() and asked:
        from latent_santa.patches.vllm import cpu

        cpu.take_over()
