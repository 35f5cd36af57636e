"""SANTA++ as an attention backend of vLLM: a plugin that vLLM finds by the entry point ``vllm.general_plugins``.

vLLM serves: its scheduler, paged cache, tensor parallelism, CUDA graphs and API are untouched. This package replaces
the decoding attention of MLA layers (``forward_mqa``), makes the teams of blocks that a step fills, and counts rows.
Nothing changes for a server that does not ask for it: on CUDA by ``--attention-backend CUSTOM``, on a CPU, where vLLM
chooses the MLA backend itself, by any setting in the environment (:mod:`latent_santa.patches.vllm.settings`).
"""

from __future__ import annotations

import os


def register() -> None:
    """Offer the backend to vLLM. vLLM calls this in every one of its processes, before it reads its own options.

    Raises:
        ValueError: on a CPU where the backend is asked for, a setting or vLLM's version is not one that works.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from latent_santa.patches.vllm.settings import PREFIX

    asked = any(name.startswith(PREFIX) for name in os.environ)
    if current_platform.is_cuda():
        register_backend(AttentionBackendEnum.CUSTOM, "latent_santa.patches.vllm.cuda.SantaMLABackend")
    elif current_platform.is_cpu() and asked:
        from latent_santa.patches.vllm import cpu

        cpu.take_over()
