"""The kernels' noise and corrections beside the method's: equal words, and the same numbers to float32 rounding."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: the kernels cannot run")

import triton
import triton.language as tl

from latent_santa.kernels import draws, maths
from latent_santa.kernels.support import interpreting
from latent_santa.noise import GROUP_STRIDE, gumbel, gumbel_noise, noise_keys, philox
from latent_santa.sampling import log_inclusion as twin_log_inclusion

from .cases import PHILOX_KNOWN_ANSWERS

if not interpreting():
    pytest.skip("tests/gpu runs the kernels on the GPU", allow_module_level=True)


@triton.jit
def words_kernel(key, out, team, counter, step, layer, T: tl.constexpr):
    place = tl.arange(0, T)
    four = draws.philox_words(tl.load(key) | (tl.load(key + 1) << 32), team + place, counter + place * 0, step, layer)
    for i in tl.static_range(4):
        tl.store(out + i * T + place, four[i].to(tl.int64))


def kernel_words(key: tuple[int, int], team: int, counter: int, step: int, layer: int, count: int) -> torch.Tensor:
    out = torch.empty(4, count, dtype=torch.int64)
    signed = [torch.tensor(value, dtype=torch.int64) for value in (team, counter, step, layer)]
    words_kernel[(1,)](torch.tensor(key), out, *(int(value) for value in signed), T=count)
    return out


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX_KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert tuple(kernel_words(key, *counter, 1)[:, 0].tolist()) == expected


def test_words_equal_the_methods() -> None:
    key = noise_keys(2**63 + 5, [-3], "cpu")
    got = kernel_words(tuple(key[0].tolist()), 100, 3 * GROUP_STRIDE + 31, 131_072, 59, 64)
    team = torch.arange(100, 164)
    rest = (torch.tensor(value) for value in (3 * GROUP_STRIDE + 31, 131_072, 59))
    assert torch.equal(got, torch.stack(torch.broadcast_tensors(*philox(team, *rest, key[0]))))


@triton.jit
def tile_kernel(key, step, out, group, head, layer, T: tl.constexpr, HEADS: tl.constexpr, SHARED: tl.constexpr):
    team = tl.arange(0, T)
    seed = draws.sequence_key(key, 0)
    now = tl.load(step)
    tile = draws.gumbel_tile(seed, team, group * 65536, head, now, layer, HEADS, SHARED)
    tl.store(out + tl.arange(0, HEADS)[None, :] * T + team[:, None], tile)
    for h in range(HEADS):
        one = draws.gumbel_head(seed, team, group * 65536, head + h, now, layer, SHARED)
        tl.store(out + (HEADS + h) * T + team, one)


@pytest.mark.parametrize("shared", [False, True])
def test_draws_of_a_block_of_heads(shared: bool) -> None:
    key, step = noise_keys(7, [11], "cpu"), torch.tensor([321])
    want = gumbel_noise(key, step, 5, 3, 16, 32, shared)[0, 2, 8:16]
    out = torch.empty(2, 8, 32)
    tile_kernel[(1,)](key, step, out, 2, 8, 5, T=32, HEADS=8, SHARED=shared)
    assert torch.equal(out[0], out[1])
    torch.testing.assert_close(out[0], want, rtol=2e-6, atol=2e-6)


@triton.jit
def map_kernel(x, out, WHICH: tl.constexpr, N: tl.constexpr):
    place = tl.arange(0, N)
    value = tl.load(x + place)
    if WHICH == "gumbel":
        tl.store(out + place, draws.gumbel(value.to(tl.uint32)))
    else:
        tl.store(out + place, maths.log_inclusion(value))


def test_gumbel_at_the_ends_of_the_range() -> None:
    edges = [0, 1, 2, 3, 2**16, 2**28, 2**29 - 1, 2**29, 2**29 + 1, 2**31, 2**32 - 2**9, 2**32 - 1]
    word = torch.tensor(edges + list(range(4)), dtype=torch.int64)
    out = torch.empty(len(word))
    map_kernel[(1,)](word, out, WHICH="gumbel", N=len(word))
    torch.testing.assert_close(out, gumbel(word), rtol=2e-6, atol=2e-6)


def test_log_inclusion_keeps_tiny_corrections() -> None:
    grid = [-math.inf, -80.0, -30.0, -12.0, -10.0, -9.9, -5.0, -1.0, -0.70, -0.69, -0.5, 0.0, 1.0, 3.0, 80.0, math.inf]
    x = torch.tensor(grid)
    out = torch.empty(len(grid))
    map_kernel[(1,)](x, out, WHICH="inclusion", N=len(grid))
    torch.testing.assert_close(out, twin_log_inclusion(x.double()).float(), rtol=1e-6, atol=1e-7)
