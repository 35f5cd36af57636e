"""Generations and single steps with captured graphs, on a stand-in for CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch

from .tiny_models import cache_name, cache_of, prompt

ROUNDING = {"rtol": 1e-4, "atol": 1e-4}  # PyTorch takes other kernels where rows are reserved
SMALL = {"budget": 16, "parents": "contiguous"}
NEW = 20


def generated(model: Any, ids: Any, new: int = NEW, **kwargs: Any) -> Any:
    options = {"do_sample": False, "min_new_tokens": new, "output_logits": True, "return_dict_in_generate": True}
    given = {"attention_mask": torch.ones_like(ids), **options, **kwargs}
    return model.generate(ids, max_new_tokens=new, **given)


@torch.no_grad()
def step(model: Any, cache: Any, token: int = 7, **kwargs: Any) -> Any:
    ids = torch.full((cache.layers[0].keys.shape[0], 1), token)
    return model(input_ids=ids, **{cache_name(model): cache}, use_cache=True, logits_to_keep=1, **kwargs)


@torch.no_grad()
def filled(model: Any, length: int = 50, batch: int = 1) -> Any:
    return cache_of(model(input_ids=prompt(length, batch), use_cache=True, logits_to_keep=1))
