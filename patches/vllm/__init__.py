"""SANTA++ as an attention backend of vLLM.

vLLM serves: its scheduler, paged cache, tensor parallelism, CUDA graphs and API are untouched. This package replaces
the decoding attention of MLA layers (``forward_mqa``), makes the teams of blocks that a step fills, and counts rows.
:mod:`latent_santa.vllm_plugin` is how vLLM finds it.
"""
