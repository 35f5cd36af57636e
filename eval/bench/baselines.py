"""Dense attention over the same rows and queries: PyTorch's kernels, ours, FlashAttention-3, FlashMLA, FlashInfer."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from latent_santa.step import DecodeStep

from .workload import Workload

Launch = Callable[[], Tensor]

PAGE = 64
FLASHINFER_BYTES = 128 << 20  # of scratch, as its documentation advises


def baselines(w: Workload) -> tuple[dict[str, Launch], dict[str, str]]:
    """Dense methods for a workload, each a call that returns ``(B, G, H, V)`` in its own layout's shape, and the
    reasons for those that cannot run here."""
    makers = MLA if w.layout == "mla" else GQA
    ready: dict[str, Launch] = {}
    missing: dict[str, str] = {}
    for name, maker in makers.items():
        try:
            launch = maker(w.step)
            launch()
            torch.cuda.synchronize()
            ready[name] = launch
        except (ImportError, RuntimeError, TypeError, ValueError, AttributeError, OSError) as error:
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}" if str(error) else repr(error)
    return ready, missing


def _sdpa(backend: str) -> Callable[[DecodeStep], Launch]:
    def make(step: DecodeStep) -> Launch:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        query = step.query[0].to(step.rows.values.dtype).flatten(1, 2)[:, :, None].contiguous()
        keys, values = step.rows.keys[0], step.rows.values
        kind = getattr(SDPBackend, backend)

        def launch() -> Tensor:
            with sdpa_kernel(kind):
                return torch.nn.functional.scaled_dot_product_attention(
                    query, keys, values, scale=step.scale, enable_gqa=True
                )

        return launch

    return make


def _bmm(step: DecodeStep) -> Launch:
    """Absorbed attention in PyTorch: two products, a softmax and a product."""
    dtype = step.rows.values.dtype
    content, rotary = (part.to(dtype).flatten(0, 1) for part in step.query)
    latent, key = (part.flatten(0, 1) for part in step.rows.keys)

    def launch() -> Tensor:
        score = content @ latent.transpose(1, 2)
        score = torch.baddbmm(score, rotary, key.transpose(1, 2), beta=step.scale, alpha=step.scale)
        return score.softmax(-1) @ latent

    return launch


def _fa3(step: DecodeStep) -> Launch:
    kernel = importlib.import_module("fa3_fwd_interface").flash_attn_with_kvcache
    dtype = step.rows.values.dtype
    lengths = torch.full((step.batch,), step.rows.length, dtype=torch.int32, device=step.rows.values.device)
    options: dict[str, Any] = {"cache_seqlens": lengths, "softmax_scale": step.scale, "causal": False}

    def rows(part: Tensor) -> Tensor:
        return part.transpose(1, 2)  # (B, N, G, D), a view

    query = tuple(part.to(dtype).flatten(1, 2)[:, None].contiguous() for part in step.query)
    if len(query) == 2:
        return lambda: kernel(query[1], rows(step.rows.keys[1]), rows(step.rows.keys[0]), qv=query[0], **options)
    return lambda: kernel(query[0], rows(step.rows.keys[0]), rows(step.rows.values), **options)


def _split(step: DecodeStep) -> Launch:
    """This package's own exact attention."""
    from latent_santa.kernels.dense import dense_attention

    halved = replace(step, query=tuple(part.to(step.rows.values.dtype) for part in step.query))
    return lambda: dense_attention(halved, None, None, False)[0]


def _flash_mla(step: DecodeStep) -> Launch:
    module = importlib.import_module("flash_mla")
    dtype = step.rows.values.dtype
    page = _page(step)
    cache = torch.cat(step.rows.keys, -1).view(-1, page, 1, step.rows.keys[0].shape[-1] + step.rows.keys[1].shape[-1])
    query = torch.cat(step.query, -1).to(dtype).flatten(1, 2)[:, None].contiguous()
    pages = step.rows.length // page
    table = torch.arange(step.batch * pages, dtype=torch.int32, device=cache.device).view(step.batch, pages)
    lengths = torch.full((step.batch,), step.rows.length, dtype=torch.int32, device=cache.device)
    plan, _ = module.get_mla_metadata()
    width = step.rows.values.shape[-1]
    return lambda: module.flash_mla_with_kvcache(
        query, cache, table, lengths, width, plan, softmax_scale=step.scale, causal=False
    )[0]


def _flashinfer_mla(step: DecodeStep) -> Launch:
    module = importlib.import_module("flashinfer.mla")
    dtype, device = step.rows.values.dtype, step.rows.values.device
    page = _page(step)
    latent, rotary = (part.reshape(-1, page, part.shape[-1]) for part in step.rows.keys)
    content, key = (part.to(dtype).flatten(1, 2).contiguous() for part in step.query)
    queries = torch.arange(step.batch + 1, dtype=torch.int32, device=device)
    lengths = torch.full((step.batch,), step.rows.length, dtype=torch.int32, device=device)
    pages = torch.arange(latent.shape[0], dtype=torch.int32, device=device)
    wrapper = module.BatchMLAPagedAttentionWrapper(torch.empty(FLASHINFER_BYTES, dtype=torch.int8, device=device))
    wrapper.plan(
        queries, queries * (step.rows.length // page), pages, lengths, content.shape[1], latent.shape[-1],
        rotary.shape[-1], page, False, step.scale, dtype, dtype,
    )  # fmt: skip
    return lambda: wrapper.run(content, key, latent, rotary, return_lse=False)


def _flashinfer(step: DecodeStep) -> Launch:
    module = importlib.import_module("flashinfer")
    keys, values = step.rows.keys[0], step.rows.values
    page = _page(step)

    def paged(part: Tensor) -> Tensor:  # (B N / page, G, page, D)
        return part.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1).contiguous()

    cache = (paged(keys), paged(values))
    query = step.query[0].to(values.dtype).flatten(1, 2).contiguous()
    last = torch.full((step.batch,), page, dtype=torch.int32, device=values.device)
    starts = torch.arange(step.batch + 1, dtype=torch.int32, device=values.device) * (step.rows.length // page)
    pages = torch.arange(cache[0].shape[0], dtype=torch.int32, device=values.device)
    space = torch.empty(FLASHINFER_BYTES, dtype=torch.uint8, device=values.device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(space, "HND", use_tensor_cores=True)
    wrapper.plan(
        starts, pages, last, query.shape[1], step.groups, keys.shape[-1], page, q_data_type=values.dtype,
        kv_data_type=values.dtype, sm_scale=step.scale,
    )  # fmt: skip
    return lambda: wrapper.run(query, cache)


def _page(step: DecodeStep) -> int:
    """Rows of a page, which FlashMLA and FlashInfer keep their cache in."""
    if step.rows.length % PAGE:
        raise RuntimeError(f"{step.rows.length} rows do not fill pages of {PAGE}")
    return PAGE


MLA: dict[str, Callable[[DecodeStep], Launch]] = {
    "bmm + softmax": _bmm,
    "FA3": _fa3,
    "FlashMLA": _flash_mla,
    "FlashInfer": _flashinfer_mla,
    "split rows": _split,
}
GQA: dict[str, Callable[[DecodeStep], Launch]] = {
    "SDPA flash": _sdpa("FLASH_ATTENTION"),
    "SDPA cuDNN": _sdpa("CUDNN_ATTENTION"),
    "FA3": _fa3,
    "FlashInfer": _flashinfer,
    "split rows": _split,
}
