"""Dense attention over the same rows and queries: PyTorch's kernels, and FlashAttention-3 and FlashMLA if installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .workload import Workload

Launch = Callable[[], Tensor]


def baselines(w: Workload) -> tuple[dict[str, Launch], dict[str, str]]:
    """Dense methods for a workload, each a call that returns ``(B, G, H, V)`` in its own layout's shape, and the
    reasons for those that cannot run here."""
    makers = MLA if w.layout == "mla" else GQA
    ready: dict[str, Launch] = {}
    missing: dict[str, str] = {}
    for name, maker in makers.items():
        try:
            launch = maker(w)
            launch()
            torch.cuda.synchronize()
            ready[name] = launch
        except (ImportError, RuntimeError, TypeError, AttributeError, ModuleNotFoundError) as error:
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}" if str(error) else repr(error)
    return ready, missing


def _sdpa(backend: str) -> Callable[[Workload], Launch]:
    def make(w: Workload) -> Launch:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        query = w.query[0].to(w.rows.values.dtype).flatten(1, 2)[:, :, None].contiguous()
        keys, values = w.rows.keys[0], w.rows.values
        kind = getattr(SDPBackend, backend)

        def launch() -> Tensor:
            with sdpa_kernel(kind):
                return torch.nn.functional.scaled_dot_product_attention(
                    query, keys, values, scale=w.scale, enable_gqa=True
                )

        return launch

    return make


def _bmm(w: Workload) -> Launch:
    """Absorbed attention in PyTorch: two products, a softmax and a product."""
    dtype = w.rows.values.dtype
    content, rotary = (part.to(dtype).flatten(0, 1) for part in w.query)
    latent, key = (part.flatten(0, 1) for part in w.rows.keys)

    def launch() -> Tensor:
        score = content @ latent.transpose(1, 2)
        score = torch.baddbmm(score, rotary, key.transpose(1, 2), beta=w.scale, alpha=w.scale)
        return score.softmax(-1) @ latent

    return launch


def _fa3(w: Workload) -> Launch:
    kernel = importlib.import_module("fa3_fwd_interface").flash_attn_with_kvcache
    dtype = w.rows.values.dtype
    lengths = torch.full((w.batch,), w.context, dtype=torch.int32, device=w.rows.values.device)
    options: dict[str, Any] = {"cache_seqlens": lengths, "softmax_scale": w.scale, "causal": False}

    def rows(part: Tensor) -> Tensor:
        return part.transpose(1, 2)  # (B, N, G, D), a view

    query = tuple(part.to(dtype).flatten(1, 2)[:, None].contiguous() for part in w.query)
    if w.layout == "mla":
        return lambda: kernel(query[1], rows(w.rows.keys[1]), rows(w.rows.keys[0]), qv=query[0], **options)
    return lambda: kernel(query[0], rows(w.rows.keys[0]), rows(w.rows.values), **options)


def _flash_mla(w: Workload) -> Launch:
    module = importlib.import_module("flash_mla")
    dtype = w.rows.values.dtype
    page = 64
    if w.context % page:
        raise RuntimeError(f"{w.context} rows do not fill pages of {page}")
    cache = torch.cat(w.rows.keys, -1).view(-1, page, 1, w.rows.keys[0].shape[-1] + w.rows.keys[1].shape[-1])
    query = torch.cat(w.query, -1).to(dtype).flatten(1, 2)[:, None].contiguous()
    pages = w.context // page
    table = torch.arange(w.batch * pages, dtype=torch.int32, device=cache.device).view(w.batch, pages)
    lengths = torch.full((w.batch,), w.context, dtype=torch.int32, device=cache.device)
    plan, _ = module.get_mla_metadata()
    width = w.rows.values.shape[-1]
    return lambda: module.flash_mla_with_kvcache(
        query, cache, table, lengths, width, plan, softmax_scale=w.scale, causal=False
    )[0]


MLA: dict[str, Callable[[Workload], Launch]] = {"bmm + softmax": _bmm, "FA3": _fa3, "FlashMLA": _flash_mla}
GQA: dict[str, Callable[[Workload], Launch]] = {
    "SDPA flash": _sdpa("FLASH_ATTENTION"),
    "SDPA cuDNN": _sdpa("CUDNN_ATTENTION"),
    "FA3": _fa3,
}
