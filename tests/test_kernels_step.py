"""Small kernels around attention in a decoding step, in Triton's interpreter, against PyTorch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: the kernels cannot run")

from latent_santa.kernels.gqa_inputs import gqa_inputs
from latent_santa.kernels.mla_inputs import Angles, mla_inputs
from latent_santa.kernels.router import softmax_router
from latent_santa.kernels.support import interpreting

from .step_cases import normal, turned

if not interpreting():
    pytest.skip("tests/gpu runs the kernels on the GPU", allow_module_level=True)


@pytest.mark.parametrize(("tokens", "experts", "top", "width"), [(1, 9, 4, 41), (3, 17, 1, 1500)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_softmax_router_takes_the_largest_probabilities(
    tokens: int, experts: int, top: int, width: int, dtype: torch.dtype
) -> None:
    states, weight = normal(tokens, width).to(dtype), normal(experts, width, seed=1).div(width**0.5).to(dtype)
    logits, shares, index = softmax_router(states, weight, top, 2.5)
    wanted = states.double() @ weight.double().T
    torch.testing.assert_close(logits.double(), wanted, rtol=1e-5, atol=1e-5)
    values, places = wanted.softmax(-1).topk(top)
    torch.testing.assert_close(shares.double(), 2.5 * values, rtol=1e-5, atol=1e-6)
    assert torch.equal(index, places)


def test_of_equal_probabilities_the_first_experts_count() -> None:
    _, shares, index = softmax_router(normal(2, 8), torch.ones(5, 8), 3, 1.0)
    assert index.tolist() == [[0, 1, 2]] * 2 and torch.allclose(shares, torch.tensor(0.2))


@pytest.mark.parametrize(("pairs_in", "pairs_out"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("batch", [1, 3])
def test_mla_inputs_are_normed_and_rotated(pairs_in: bool, pairs_out: bool, batch: int) -> None:
    heads, nope, rope, rank, room = 3, 5, 12, 20, 7
    query, compressed, weight = normal(batch, heads, nope + rope), normal(batch, rank + rope), normal(rank)
    turns = normal(batch, 1, rope // 2, seed=3)
    if pairs_out:  # complex numbers, as real ones
        whole = torch.view_as_real(torch.polar(torch.ones_like(turns), turns))
        angles = Angles(whole[..., 0], whole[..., 1], pairs_in, pairs_out)
    else:  # each cosine twice
        angles = Angles(turns.cos().repeat(1, 1, 2), turns.sin().repeat(1, 1, 2), pairs_in, pairs_out)
    cos, sin = turns.cos(), turns.sin()
    latent = compressed[:, :rank]
    latent = latent * torch.rsqrt(latent.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    rotated = torch.cat((query[..., :nope], turned(query[..., nope:], cos, sin, angles)), -1)
    key = turned(compressed[:, rank:], cos[:, 0], sin[:, 0], angles)
    for place in (None, torch.tensor([4])):
        row = 0 if place is None else 4
        states, latents, keys = query.clone(), torch.zeros(batch, 1, room, rank), torch.zeros(batch, 1, room, rope)
        mla_inputs(states, compressed, weight, 1e-6, angles, rope, latents, keys, place)
        torch.testing.assert_close(states, rotated)
        torch.testing.assert_close(latents[:, 0, row], latent)
        torch.testing.assert_close(keys[:, 0, row], key)
        assert latents.any(-1).sum() == keys.any(-1).sum() == batch  # one row each


def test_gqa_inputs_are_rotated_and_the_row_is_written() -> None:
    batch, heads, groups, width, room = 2, 6, 3, 12, 5
    query, key, value = (normal(batch, n, width, seed=n) for n in (heads, groups, groups + 1))
    value = value[:, :groups]
    turns = normal(1, 1, width // 2, seed=3).repeat(1, 1, 2)
    angles = Angles(turns.cos(), turns.sin(), False, False)
    cos, sin = (part[..., : width // 2] for part in angles[:2])
    states, keys, values = (
        query.clone(),
        torch.zeros(batch, groups, room, width),
        torch.zeros(batch, groups, room, width),
    )
    gqa_inputs(states, key, value, angles, keys, values, torch.tensor([2]))
    torch.testing.assert_close(states, turned(query, cos, sin, angles))
    torch.testing.assert_close(keys[:, :, 2], turned(key, cos, sin, angles))
    assert torch.equal(values[:, :, 2], value)
    assert keys.any(-1).sum() == values.any(-1).sum() == batch * groups
