"""Whole generations on a CUDA device: the Triton backend against the PyTorch one, on models of both layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import latent_santa
from latent_santa.eval.bench import shapes

from ..tiny_models import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
NEW_TOKENS = 12


def generation(model: Any, backend: str, **settings: Any) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Tokens of a left-padded batch, and each sequence's counts."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, model.config.vocab_size, (3, 200), generator=generator).cuda()
    mask = torch.ones_like(ids)
    for row, length in enumerate((137, 64, 200)):
        mask[row, : 200 - length] = 0
    with latent_santa.patch(model, backend=backend, **settings) as santa:
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
        )
        return out[:, 200:].tolist(), santa.access.per_sequence()


@pytest.mark.parametrize("name", ["deepseek_v2", "qwen2"], ids=["mla", "gqa"])
@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
@pytest.mark.parametrize("parents", ["contiguous", "kmeans"])
@pytest.mark.parametrize("routing", ["one_stage", "two_stage"])
def test_the_triton_backend_gives_the_torch_backends_tokens_and_rows(
    name: str, estimator: str, parents: str, routing: str
) -> None:
    model = tiny_model(name).cuda()
    settings = {"budget": 24, "estimator": estimator, "parents": parents, "kmeans_engine": "sklearn"}
    settings |= {"routing": routing, "parents_per_head": 3}
    tokens, rows = generation(model, "torch", **settings)
    assert generation(model, "triton", **settings) == (tokens, rows)


@pytest.mark.parametrize("name", ["deepseek_v2", "qwen2"], ids=["mla", "gqa"])
def test_a_bfloat16_model_generates_with_the_triton_backend(name: str) -> None:
    tokens, rows = generation(tiny_model(name).bfloat16().cuda(), "triton", budget=24, parents="contiguous")
    assert all(len(row) == NEW_TOKENS for row in tokens) and all(0 < entry["percent"] for entry in rows)


@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
def test_a_model_of_deepseek_v2_lites_sizes(estimator: str) -> None:
    """Four of its layers, bfloat16: the first sampled token's logits are those of the PyTorch backend."""
    model = shapes.random_model(shapes.shape_config("deepseek-v2-lite", 4, torch.bfloat16), torch.bfloat16, "cuda")
    ids = torch.randint(3, 1000, (2, 700), generator=torch.Generator().manual_seed(3)).cuda()
    logits, rows = {}, {}
    for backend in ("torch", "triton"):
        with latent_santa.patch(model, backend=backend, budget=64, estimator=estimator, parents="contiguous") as santa:
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, min_new_tokens=4, do_sample=False,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            rows[backend] = [entry["routing"] for entry in santa.access.per_sequence()]
        assert all(step.isfinite().all() for step in out.logits)
        logits[backend] = out.logits[0].float()
    # one rounding may send a token to another expert; unrelated logits would be 1.4 apart
    apart = (logits["triton"] - logits["torch"]).norm(dim=-1) / logits["torch"].norm(dim=-1)
    assert bool((apart < 0.3).all())
    assert rows["torch"] == rows["triton"] and all(0 < count for count in rows["torch"])
