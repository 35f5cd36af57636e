"""Gumbel noise from a counter-based generator: a draw does not depend on device, batch or budget.

Philox4x32-10 (Salmon et al., 2011) maps a 128-bit counter under a 64-bit key to four 32-bit words. The key is made of
the base seed and a sequence's own key; the counter is (team, group and head quad, step, layer), and the head's place in
its quad picks the word. Nothing else enters: a sequence draws the same noise on any device, alone or in a padded batch,
for every budget. The same draws one by one are :func:`latent_santa.naive_noise.gumbel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .integers import ceil_div

MASK = 0xFFFFFFFF
ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
WEYL_A, WEYL_B = 0x9E3779B9, 0xBB67AE85
GROUP_STRIDE = 1 << 16
SMALLEST, LARGEST = 2.0**-33, 1.0 - 2.0**-24


def philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 on broadcastable int64 tensors of 32-bit words.

    Both products of a round are formed at once, in int64: the wrapped product has the bits of the unsigned one.

    Args:
        c0, c1, c2, c3: counter words.
        key: ``(..., 2)`` key words; its leading shape broadcasts with the counters.

    Returns:
        Four words, each of the broadcast shape.
    """
    c0, c1, c2, c3, _ = torch.broadcast_tensors(c0, c1, c2, c3, key[..., 0])
    ones = (1,) * c0.dim()
    k = key.movedim(-1, 0)
    k = k.reshape(2, *ones[k.dim() - 1 :], *k.shape[1:])
    factor, weyl = (numbers.view(2, *ones) for numbers in _constants(key.device))
    even, odd = torch.stack((c0, c2)), torch.stack((c1, c3))
    for turn in range(10):
        # in place: these are the largest temporaries of a decoding step
        product = even.flip(0).mul_(factor)
        even = (product >> 32).bitwise_xor_(odd).bitwise_xor_(k + weyl * turn).bitwise_and_(MASK)
        odd = product.bitwise_and_(MASK)
    return even[0], odd[0], even[1], odd[1]


@lru_cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """The multipliers and the key's steps, ``(2,)`` int64 each, copied to a device once."""
    return torch.tensor((ROUND_B, ROUND_A), device=device), torch.tensor((WEYL_A, WEYL_B), device=device)


def uniform(word: Tensor) -> Tensor:
    """Uniform float32 in (0, 1) from 32-bit words, bounded away from both ends.

    Near 0, where the largest Gumbel draws come from, the word keeps its full float32 precision.
    """
    return word.to(torch.float32).mul_(2.0**-32).clamp_(SMALLEST, LARGEST)


def gumbel(word: Tensor) -> Tensor:
    """Standard Gumbel draws, float32: -log(-log(1 - u)), the form that is fine-grained in its upper tail."""
    return uniform(word).neg_().log1p_().neg_().log_().neg_()


def _mix(x: int) -> int:
    """The finaliser of SplitMix64: a bijection of 64-bit integers without visible structure."""
    x = (x + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def noise_keys(seed: int, sequence_keys: Sequence[int], device: torch.device | str) -> Tensor:
    """Philox keys of a batch.

    Args:
        seed: base seed, below 2**64.
        sequence_keys: one integer per sequence; equal integers draw equal noise.

    Returns:
        ``(B, 2)`` int64, each a 32-bit word.
    """
    mixed = [_mix(_mix(seed) ^ (key & 0xFFFFFFFFFFFFFFFF)) for key in sequence_keys]
    return torch.tensor([[key & MASK, key >> 32] for key in mixed], dtype=torch.int64, device=device)


def gumbel_noise(
    key: Tensor,
    step: Tensor,
    layer: int | Tensor,
    groups: int,
    heads: int,
    teams: int | Tensor,
    shared: bool,
    first: tuple[int, int] = (0, 0),
) -> Tensor:
    """Gumbel noise of one layer's decoding step, or of several layers' at one step.

    Args:
        key: ``(B, 2)`` from :func:`noise_keys`.
        step: ``(B,)`` int64, rows that each sequence can see at this call.
        layer: layer index, or ``(L,)`` int64 of them.
        groups: G sharing groups.
        heads: H query heads per group, below 4 * 65536.
        teams: M, the team index is the counter's first word; or ``(B, G, M)`` int64, the indices themselves.
        shared: every head of a group takes the draw of its first head.
        first: numbers in the whole model of the first group here and of the first head here of each group. They are
            other than 0 where the heads of a layer are spread over processes.

    Returns:
        ``(B, G, H, M)`` float32, or ``(L, B, G, H, M)``; a stride-0 view over H when shared.
    """
    return _noise(gumbel, key, step, layer, groups, heads, teams, shared, first)


def uniform_noise(
    key: Tensor,
    step: Tensor,
    layer: int | Tensor,
    groups: int,
    heads: int,
    draws: int,
    shared: bool,
    first: tuple[int, int] = (0, 0),
) -> Tensor:
    """SANTA's draws in (0, 1), float64 ``(B, G, H, draws)``; arguments as in :func:`gumbel_noise`.

    One by one they are :func:`latent_santa.naive_noise.uniform64`.
    """
    return _noise(lambda word: (word.double() + 0.5) * 2.0**-32, key, step, layer, groups, heads, draws, shared, first)


def _noise(
    turned: Callable[[Tensor], Tensor],
    key: Tensor,
    step: Tensor,
    layer: int | Tensor,
    groups: int,
    heads: int,
    teams: int | Tensor,
    shared: bool,
    first: tuple[int, int],
) -> Tensor:
    """The counters' words, ``turned`` into draws."""
    device = key.device
    first_group, first_head = first
    first_quad, last_quad = (0, 1) if shared else (first_head // 4, ceil_div(first_head + heads, 4))
    c0 = teams[:, :, None] if isinstance(teams, Tensor) else torch.arange(teams, device=device)
    group = torch.arange(first_group, first_group + groups, device=device)
    c1 = group[:, None] * GROUP_STRIDE + torch.arange(first_quad, last_quad, device=device)
    c3 = torch.as_tensor(layer, device=device)
    words = philox(
        c0, c1[..., None], step[:, None, None, None], c3.view(*c3.shape, 1, 1, 1, 1), key[:, None, None, None, :]
    )
    if shared:
        return turned(words[0]).expand(*(-1,) * (words[0].dim() - 2), heads, -1)
    place = first_head - 4 * first_quad
    word = torch.stack(words, dim=-2).flatten(-3, -2)[..., place : place + heads, :]
    del words
    return turned(word)
