"""MLA's projections on a GPU: in half precision they stay in it, as in the model's own attention."""

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
def test_projections_are_absorbed_to_the_precision_of_the_model(dtype, batch):
    model = tiny_model("deepseek_v2").to("cuda", dtype)
    adapter = find_adapters(model)[1]
    states = torch.randn(batch, 4, 1, 16, device="cuda", dtype=dtype)
    absorbed, rotary = adapter.query(states)
    weights = adapter.up_projection().double()
    wanted = torch.einsum("bhd,hdr->bhr", states[:, :, 0, :8].double(), weights[:, :8])[:, None]
    rounding = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    assert absorbed.dtype == rotary.dtype == dtype
    torch.testing.assert_close(absorbed.double(), wanted, **rounding)
    assert torch.equal(rotary, states[:, None, :, 0, 8:])
    out = torch.randn(batch, 1, 4, 16, device="cuda")
    value = torch.einsum("bhr,hvr->bhv", out[:, 0].double(), weights[:, 8:])[:, None]
    torch.testing.assert_close(adapter.output(out, dtype).double(), value, **rounding)
    # what compares with dense attention asks for float32, and gets its precision
    torch.testing.assert_close(adapter.output(out, torch.float32).double(), value, rtol=1e-5, atol=1e-5)
