"""Gumbel noise from a counter-based generator, the same draw wherever and in whatever company it is made.

Philox4x32-10 (Salmon et al., 2011) maps a 128-bit counter under a 64-bit key to four 32-bit words. The key is made of
the base seed and a sequence's own key; the counter is (team, group and head quad, step, layer), and the head's place in
its quad picks the word. Nothing else enters: a sequence draws the same noise on any device, alone or in a padded batch,
for every budget.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
WEYL_A, WEYL_B = 0x9E3779B9, 0xBB67AE85
GROUP_STRIDE = 1 << 16
SMALLEST, LARGEST = 2.0**-33, 1.0 - 2.0**-24


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32-bit words of a product of 32-bit words held in int64.

    The product needs 64 unsigned bits, so it is formed from 16-bit halves of ``b``.
    """
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 on broadcastable int64 tensors of 32-bit words.

    Args:
        c0, c1, c2, c3: counter words.
        key: ``(..., 2)`` key words; its leading shape broadcasts with the counters.

    Returns:
        Four words, each of the broadcast shape.
    """
    k0, k1 = key[..., 0], key[..., 1]
    for _ in range(10):
        high_a, low_a = _multiply(c0, ROUND_A)
        high_b, low_b = _multiply(c2, ROUND_B)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + WEYL_A) & MASK, (k1 + WEYL_B) & MASK
    return c0, c1, c2, c3


def uniform(word: Tensor) -> Tensor:
    """Uniform float32 in (0, 1) from 32-bit words, bounded away from both ends.

    Near 0, where the largest Gumbel draws come from, the word keeps its full float32 precision.
    """
    return (word.to(torch.float32) * 2.0**-32).clamp(SMALLEST, LARGEST)


def gumbel(word: Tensor) -> Tensor:
    """Standard Gumbel draws, float32: -log(-log(1 - u)), the form that is fine-grained in its upper tail."""
    return -torch.log(-torch.log1p(-uniform(word)))


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
        sequence_keys: one integer a sequence; equal integers draw equal noise.

    Returns:
        ``(B, 2)`` int64, each a 32-bit word.
    """
    mixed = [_mix(_mix(seed) ^ (key & 0xFFFFFFFFFFFFFFFF)) for key in sequence_keys]
    return torch.tensor([[key & MASK, key >> 32] for key in mixed], dtype=torch.int64, device=device)


def gumbel_noise(key: Tensor, step: Tensor, layer: int, groups: int, heads: int, teams: int, shared: bool) -> Tensor:
    """The noise of one layer's decoding call.

    Args:
        key: ``(B, 2)`` from :func:`noise_keys`.
        step: ``(B,)`` int64, rows that each sequence can see at this call.
        layer: layer index.
        groups: G sharing groups.
        heads: H query heads a group, below 4 * 65536.
        teams: M, the team index is the counter's first word.
        shared: every head of a group takes the draw of its first head.

    Returns:
        ``(B, G, H, M)`` float32; a stride-0 view over H when shared.
    """
    device = key.device
    quads = 1 if shared else -(-heads // 4)
    c0 = torch.arange(teams, device=device)
    c1 = torch.arange(groups, device=device)[:, None] * GROUP_STRIDE + torch.arange(quads, device=device)
    words = philox(
        c0,
        c1[None, :, :, None],
        step[:, None, None, None],
        torch.tensor(layer, device=device),
        key[:, None, None, None, :],
    )
    if shared:
        return gumbel(words[0]).expand(-1, -1, heads, -1)
    word = torch.stack(torch.broadcast_tensors(*words), dim=3).flatten(2, 3)[:, :, :heads]
    return gumbel(word)
