"""A thousand random small steps on a CUDA device, one in five of more than 32 heads: `make test-random SEED=5000
CASES=200` starts elsewhere."""

from __future__ import annotations

import os

import pytest
import torch

from ..random_steps import check_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_random_steps() -> None:
    first, cases = (int(os.environ.get(name, value)) for name, value in (("SEED", "0"), ("CASES", "1000")))
    failed = []
    for seed in range(first, first + cases):
        try:
            check_case(seed, "cuda", many=seed % 5 == 4)
        except AssertionError as error:
            failed.append(str(error))
    assert not failed, f"{len(failed)} of {cases} cases differ:\n" + "\n".join(failed[:20])
