"""The small kernels around attention in a decoding step on a GPU, in bfloat16 and at a model's sizes."""

from __future__ import annotations

import pytest
import torch

from ..step_cases import normal, turned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def half(*shape: int, seed: int = 0) -> torch.Tensor:
    return normal(*shape, seed=seed).bfloat16().cuda()


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found.double() - wanted.double()).norm() <= 0.01 * wanted.double().norm())


@pytest.mark.parametrize("tokens", [1, 8, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_softmax_router(tokens: int, dtype: torch.dtype) -> None:
    from latent_santa.kernels.router import softmax_router

    states, weight = half(tokens, 2048), normal(64, 2048, seed=1).div(45).to(dtype).cuda()
    logits, shares, index = softmax_router(states, weight, 6, 1.5)
    wanted = states.double() @ weight.double().T
    assert float((logits - wanted).abs().max()) < 1e-4
    assert torch.equal(index, logits.softmax(-1).topk(6).indices)
    assert close(shares, 1.5 * wanted.softmax(-1).gather(1, index))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("batch", [1, 8])
def test_mla_inputs(heads: int, batch: int) -> None:
    from latent_santa.kernels.mla_inputs import Angles, mla_inputs

    query, compressed, weight = half(batch, heads, 192), half(batch, 576, seed=1), half(512, seed=2)
    turns = normal(batch, 1, 32, seed=3).cuda()
    whole = torch.view_as_real(torch.polar(torch.ones_like(turns), turns))
    angles = Angles(whole[..., 0], whole[..., 1], True, True)
    wanted = turned(query[..., 128:].float(), turns.cos(), turns.sin(), angles)
    key = turned(compressed[:, 512:].float(), turns.cos()[:, 0], turns.sin()[:, 0], angles)
    latent = compressed[:, :512].float()
    latent = latent * torch.rsqrt(latent.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()
    latents, keys = (torch.zeros(batch, 1, 40, n, dtype=torch.bfloat16, device="cuda") for n in (512, 64))
    content = query[..., :128].clone()
    mla_inputs(query, compressed, weight, 1e-6, angles, 64, latents, keys, torch.tensor([33], device="cuda"))
    assert close(query[..., 128:], wanted) and torch.equal(query[..., :128], content)
    assert close(latents[:, 0, 33], latent) and close(keys[:, 0, 33], key)
    assert int(latents.any(-1).sum()) == int(keys.any(-1).sum()) == batch


@pytest.mark.parametrize("batch", [1, 8])
def test_gqa_inputs(batch: int) -> None:
    from latent_santa.kernels.gqa_inputs import gqa_inputs
    from latent_santa.kernels.mla_inputs import Angles

    query, key, value = (half(batch, heads, 128, seed=heads) for heads in (28, 4, 5))
    value = value[:, :4].contiguous()
    turns = normal(1, 1, 64, seed=3).cuda()
    angles = Angles(turns.cos().repeat(1, 1, 2).bfloat16(), turns.sin().repeat(1, 1, 2).bfloat16(), False, False)
    cos, sin = (part[..., :64].float() for part in angles[:2])
    wanted, rotated = (turned(part.float(), cos, sin, angles) for part in (query, key))
    keys, values = (torch.zeros(batch, 4, 40, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    gqa_inputs(query, key, value, angles, keys, values, torch.tensor([33], device="cuda"))
    assert close(query, wanted) and close(keys[:, :, 33], rotated) and torch.equal(values[:, :, 33], value)
    assert int(keys.any(-1).sum()) == int(values.any(-1).sum()) == 4 * batch
