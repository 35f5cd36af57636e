"""MLA's projections in half precision on a GPU: absorbed without a float32 copy, to float32's precision."""

from __future__ import annotations

import pytest
import torch

from latent_santa.patches.families import find_adapters

from ..tiny_models import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_query_is_absorbed_in_float32(dtype, batch):
    model = tiny_model("deepseek_v2").to("cuda", dtype)
    adapter = find_adapters(model)[1]
    states = torch.randn(batch, 4, 1, 16, device="cuda", dtype=dtype)
    absorbed, rotary = adapter.query(states)
    w_uk = adapter.up_projection()[:, :8].double()
    wanted = torch.einsum("bhd,hdr->bhr", states[:, :, 0, :8].double(), w_uk)[:, None]
    assert absorbed.dtype == rotary.dtype == torch.float32
    torch.testing.assert_close(absorbed.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(rotary, states[:, None, :, 0, 8:].float())
