"""The launches for groups of many heads, in Triton's interpreter against the PyTorch twin with the same noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: the kernels cannot run")

from latent_santa.kernels.support import interpreting
from latent_santa.step import DecodeStep

from .kernel_cases import SMALL, compare, kernels, make_step, poisoned, twin

if not interpreting():
    pytest.skip("tests/gpu runs the kernels on the GPU", allow_module_level=True)

KINDS = [("per_head", "independent"), ("pooled", "independent"), ("per_head", "shared"), ("pooled", "shared")]
MANY = {
    **SMALL, "many": True, "attend_heads": 64, "shares": 2, "list_lanes": 32, "combine_values": 32, "pool_teams": 16,
    "attend_tall": True,
}  # fmt: skip


def check(step: DecodeStep, k: int, estimator: str, noise: str, parents: int | None = None, **over: Any) -> None:
    """Equal to the twin, from scratch memory full of NaN; weights are rounded to 16 bits."""
    workspace = poisoned(step, k, {**MANY, **over}, estimator, noise, parents)
    compare(kernels(step, k, workspace, estimator, noise, parents), twin(step, k, estimator, noise, parents), 2e-3)


@pytest.mark.parametrize(("estimator", "noise"), KINDS[:2])
def test_one_stage(estimator: str, noise: str) -> None:
    step = make_step(heads=3, lengths=(50, 33), hidden=2, dims=(16, 16), dtype=torch.float16, query_dtype=torch.float16)
    check(step, 3, estimator, noise)


@pytest.mark.parametrize(("estimator", "noise"), KINDS[1:])
def test_two_stages(estimator: str, noise: str) -> None:
    step = make_step(
        heads=3, lengths=(60,), suffix=3, dims=(16, 16), dtype=torch.float16, query_dtype=torch.float16, parent_size=8,
        summary="mean",
    )  # fmt: skip
    check(step, 2, estimator, noise, 3)


def test_more_heads_than_a_block_has() -> None:
    step = make_step(heads=66, lengths=(20,), suffix=1, dims=(16, 16), dtype=torch.float16, query_dtype=torch.float16)
    check(step, 1, "per_head", "independent", route_heads=128, shares=1)


def test_every_team() -> None:
    """Where K reaches all teams, no launch makes the lists."""
    step = make_step(heads=3, lengths=(20,), dims=(16, 16), dtype=torch.float16, query_dtype=torch.float16)
    check(step, step.teams.M, "pooled", "shared")
