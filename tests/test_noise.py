"""Counter-based Gumbel noise: the generator, the layout of its counters, what it depends on and its law."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from latent_santa import naive_noise, noise

from .cases import PHILOX_KNOWN_ANSWERS


def tensor(words):
    return torch.tensor(words, dtype=torch.int64)


@pytest.mark.parametrize("counter, key, expected", PHILOX_KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, expected):
    words = noise.philox(*(tensor(word) for word in counter), tensor(key))
    assert tuple(int(word) for word in words) == expected


def test_philox_equals_the_reference():
    rng = np.random.default_rng(0)
    counters = rng.integers(0, 2**32, size=(500, 4))
    keys = rng.integers(0, 2**32, size=(500, 2))
    # words whose products overflow or vanish
    counters[:64] = rng.choice([0, 1, 0xFFFF, 0x10000, 2**31, naive_noise.MASK32], size=(64, 4))
    keys[:32] = rng.choice([0, 1, 2**31, naive_noise.MASK32], size=(32, 2))
    words = torch.stack(noise.philox(*tensor(counters.tolist()).unbind(1), tensor(keys.tolist())), 1)
    expected = [naive_noise.philox4x32_10(c, k) for c, k in zip(counters.tolist(), keys.tolist(), strict=True)]
    assert words.tolist() == [list(row) for row in expected]


def test_splitmix_known_answers():
    """The first two outputs of SplitMix64 seeded with 0 (Vigna's reference implementation)."""
    first, second = 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4
    # the inner mix of seed 0 is `first`, so these sequence keys put 0 and one increment into the outer one
    keys = noise.noise_keys(0, [first, first ^ 0x9E3779B97F4A7C15], "cpu")
    assert keys.dtype == torch.int64
    assert keys.tolist() == [[value & naive_noise.MASK32, value >> 32] for value in (first, second)]


def test_noise_keys_tell_seeds_and_sequences_apart():
    seeds = [0, 1, 2, 2**32, 2**63, 2**64 - 1]
    sequences = list(range(200)) + [-1, 2**40]
    pairs = {tuple(row) for seed in seeds for row in noise.noise_keys(seed, sequences, "cpu").tolist()}
    assert len(pairs) == len(seeds) * len(sequences)
    assert all(0 <= word <= naive_noise.MASK32 for pair in pairs for word in pair)
    # a 64-bit key, whatever Python's sign for it
    assert noise.noise_keys(3, [-1], "cpu").equal(noise.noise_keys(3, [2**64 - 1], "cpu"))
    assert noise.noise_keys(3, [7, 7], "cpu").unique(dim=0).shape[0] == 1


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("heads", [1, 4, 7, 18])
def test_gumbel_noise_equals_the_reference(heads, shared):
    key = noise.noise_keys(11, [3, 2**50], "cpu")
    step, layer, groups, teams = tensor([9, 70001]), 26, 2, 5
    draws = noise.gumbel_noise(key, step, layer, groups, heads, teams, shared)
    assert draws.shape == (2, groups, heads, teams) and draws.dtype == torch.float32
    expected = [
        [[[naive_noise.gumbel(key[b].tolist(), int(step[b]), layer, g, h, t, shared) for t in range(teams)]
          for h in range(heads)] for g in range(groups)] for b in range(2)
    ]  # fmt: skip
    torch.testing.assert_close(draws.double(), torch.tensor(expected, dtype=torch.float64), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_uniform_noise_equals_the_reference(shared):
    key, step = noise.noise_keys(11, [3, 2**50], "cpu"), tensor([9, 70001])
    draws = noise.uniform_noise(key, step, 26, 2, 7, 5, shared)

    def draw(b: int, g: int, h: int, t: int) -> float:
        word = naive_noise.noise_word(key[b].tolist(), int(step[b]), 26, g, h, t, shared)
        return naive_noise.uniform64(word)

    expected = [[[[draw(b, g, h, t) for t in range(5)] for h in range(7)] for g in range(2)] for b in range(2)]
    assert draws.dtype == torch.float64 and draws.tolist() == expected


def test_shared_noise_is_the_first_heads():
    key, step = noise.noise_keys(0, [1], "cpu"), tensor([50])
    shared = noise.gumbel_noise(key, step, 0, 2, 6, 30, True)
    independent = noise.gumbel_noise(key, step, 0, 2, 6, 30, False)
    assert shared.equal(independent[:, :, :1].expand(-1, -1, 6, -1))
    assert shared.stride(2) == 0


@pytest.mark.parametrize("shared", [False, True])
def test_several_layers_at_once(shared):
    """One call for many layers makes each layer's own draws."""
    key, step = noise.noise_keys(0, [1, 2], "cpu"), tensor([50, 8])
    layers = tensor([3, 4, 26])
    made = noise.gumbel_noise(key, step, layers, 2, 6, 30, shared)
    assert made.shape == (3, 2, 2, 6, 30)
    for part, layer in zip(made, layers.tolist(), strict=True):
        assert part.equal(noise.gumbel_noise(key, step, layer, 2, 6, 30, shared))


@pytest.mark.parametrize("shared", [False, True])
def test_heads_and_groups_that_are_spread_over_processes_draw_what_one_process_draws(shared):
    """Whatever the first head's place in its quad is."""
    key, step = noise.noise_keys(3, [1, 2], "cpu"), tensor([50, 8])
    for draws in (noise.gumbel_noise, noise.uniform_noise):
        whole = draws(key, step, 5, 4, 11, 20, shared)
        for group, head in ((0, 3), (2, 4), (1, 9), (3, 0)):
            part = draws(key, step, 5, 4 - group, 11 - head, 20, shared, (group, head))
            assert part.equal(whole[:, group:, head:])


def test_each_coordinate_moves_every_draw():
    """Team, head, group, step, layer and sequence each lead to another word, so no two draws are tied together."""
    key, step = noise.noise_keys(0, [0, 1], "cpu"), tensor([8, 8])
    parts = [noise.gumbel_noise(key, step + s, layer, 3, 9, 40, False) for s in range(3) for layer in range(3)]
    draws = torch.cat(parts).flatten().tolist()
    # 24 bits of mantissa make a few chance collisions among 19440 values likely; structure would make thousands
    assert len(set(draws)) > 0.995 * len(draws)


def test_independent_of_company_padding_and_budget():
    """A draw depends on (sequence, step, layer, group, head, team) alone: not on the batch, M, G, H or K."""
    key, step = noise.noise_keys(5, [4, 8, 15], "cpu"), tensor([100, 64, 37])
    batch = noise.gumbel_noise(key, step, 2, 2, 7, 40, False)
    for b in range(3):
        alone = noise.gumbel_noise(key[b : b + 1], step[b : b + 1], 2, 1, 5, 11, False)
        assert alone[0].equal(batch[b, :1, :5, :11])
    reordered = noise.gumbel_noise(key[[2, 0]], step[[2, 0]], 2, 2, 7, 40, False)
    assert reordered.equal(batch[[2, 0]])


def test_extreme_words():
    words = tensor([0, 1, 2, 3, 255, 2**24 + 1, 2**31, 2**32 - 2**9, 2**32 - 257, 2**32 - 1])
    u, draws = noise.uniform(words), noise.gumbel(words)
    assert u.dtype == draws.dtype == torch.float32
    assert bool(draws.isfinite().all()) and bool((u > 0).all()) and bool((u < 1).all())
    assert u.tolist() == [naive_noise.uniform(word) for word in words.tolist()]
    expected = [-math.log(-math.log1p(-naive_noise.uniform(word))) for word in words.tolist()]
    # the upper tail (small words) keeps full relative precision: the selecting end of the law
    torch.testing.assert_close(draws.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)
    assert float(draws[0]) == pytest.approx(33 * math.log(2), abs=1e-5)


def test_law_of_many_draws():
    key = noise.noise_keys(1, range(250), "cpu")
    draws = noise.gumbel_noise(key, torch.arange(250), 1, 2, 8, 100, False).double()
    n = draws.numel()
    flat = draws.flatten().sort().values
    assert abs(flat.mean() - np.euler_gamma) < 4 * math.pi / math.sqrt(6 * n)
    # the standard deviation of a sample variance is sqrt((kurtosis - 1) / n) times the variance; Gumbel: 5.4
    assert abs(flat.var() / (math.pi**2 / 6) - 1) < 4 * math.sqrt(4.4 / n)
    cdf = torch.exp(-torch.exp(-flat))
    ranks = torch.arange(n, dtype=torch.float64) / n
    distance = torch.maximum((cdf - ranks).abs(), (cdf - ranks - 1 / n).abs()).max()
    assert distance < 2.0 / math.sqrt(n)  # Kolmogorov: exceeded with probability 7e-4
    for level in (4.0, 7.0, 10.0):
        tail = n * -math.expm1(-math.exp(-level))
        assert abs(float((flat > level).sum()) - tail) < 4 * math.sqrt(tail)


def test_draws_are_uncorrelated_along_every_axis():
    draws = noise.gumbel_noise(noise.noise_keys(2, range(60), "cpu"), torch.full((60,), 5), 1, 4, 8, 64, False)
    u = torch.exp(-torch.exp(-draws.double())) - 0.5
    for axis in range(4):
        a, b = u.narrow(axis, 0, u.shape[axis] - 1), u.narrow(axis, 1, u.shape[axis] - 1)
        assert abs(float((a * b).mean()) * 12) < 4 / math.sqrt(a.numel())
    following = noise.gumbel_noise(noise.noise_keys(2, range(60), "cpu"), torch.full((60,), 6), 1, 4, 8, 64, False)
    v = torch.exp(-torch.exp(-following.double())) - 0.5
    assert abs(float((u * v).mean()) * 12) < 4 / math.sqrt(u.numel())
