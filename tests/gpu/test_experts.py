"""Routed experts of few tokens on a CUDA device, against transformers' grouped product."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from ..expert_cases import case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("tokens", [1, 8, 33, 64])
@pytest.mark.parametrize("own", [0, 2816])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_experts_of_deepseek_v2_lites_sizes(tokens: int, own: int, dtype: torch.dtype) -> None:
    from latent_santa.kernels.experts import Shared, routed_experts

    states, index, shares, gate_up, down = (part.cuda() for part in case(tokens, 6, 64, 2048, 1408, dtype))
    wanted = torch.zeros(tokens, 2048, dtype=torch.float64, device="cuda")
    for expert in index.unique().tolist():
        token, choice = torch.where(index == expert)
        gate, up = (states[token].double() @ gate_up[expert].double().T).chunk(2, -1)
        wanted[token] += shares[token, choice].double()[:, None] * ((silu(gate) * up) @ down[expert].double().T)
    generator = torch.Generator("cuda").manual_seed(own)
    rows = [torch.randn(n, m, generator=generator, device="cuda") for n, m in ((own, 2048), (own, 2048), (2048, own))]
    shared = Shared(*(part.div(part.shape[1] ** 0.5).to(dtype) for part in rows)) if own else None
    if shared is not None:
        gate, up = (states.double() @ part.double().T for part in shared[:2])
        wanted += (silu(gate) * up) @ shared.down.double().T
    found = routed_experts(states, index, shares, gate_up, down, shared)
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    assert float((found.double() - wanted).norm() / wanted.norm()) < tolerance
    assert torch.equal(found, routed_experts(states, index, shares, gate_up, down, shared))
