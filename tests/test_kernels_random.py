"""A handful of random small steps in Triton's interpreter; tests/gpu runs a thousand."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed: the kernels cannot run")

from latent_santa.kernels.support import interpreting

from .random_steps import check_case

if not interpreting():
    pytest.skip("tests/gpu runs the kernels on the GPU", allow_module_level=True)


@pytest.mark.parametrize("seed", [2, 6, 7, 10])
def test_random_steps(seed: int) -> None:
    check_case(seed, "cpu", longest=60)
