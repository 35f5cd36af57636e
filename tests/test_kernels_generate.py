"""Whole models through the kernels in Triton's interpreter: the same tokens and rows as through PyTorch."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed: the kernels cannot run")

import latent_santa
from latent_santa.kernels.support import interpreting

from .tiny_models import padded, tiny_model

if not interpreting():
    pytest.skip("tests/gpu runs the kernels on the GPU", allow_module_level=True)


@pytest.mark.parametrize(
    ("name", "estimator", "routing"), [("deepseek_v2", "pooled", "two_stage"), ("llama", "per_head", "one_stage")]
)
def test_generation(name: str, estimator: str, routing: str) -> None:
    model = tiny_model(name)
    ids, mask = padded([40, 29])
    if name == "llama":
        ids, mask = ids[:1], mask[:1]
    settings = {"parents": "contiguous", "parent_size": 4, "representatives": 2, "budget": 8, "estimator": estimator}
    settings |= {"routing": routing, "parents_per_head": 3, "exact_first": 3, "exact_last": 2}
    answers, reads = [], []
    for backend in ("torch", "triton"):
        with latent_santa.patch(model, backend=backend, **settings) as santa:
            options = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False}
            answers.append(model.generate(ids, attention_mask=mask, **options).tolist())
            reads.append(santa.access.totals())
    assert answers[0] == answers[1]
    assert reads[0] == reads[1] and reads[0]["union"] > 0
