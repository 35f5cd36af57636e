"""Philox and the draws made from it, one number at a time: the reference of :mod:`latent_santa.noise`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

MASK32 = 0xFFFFFFFF


def philox4x32_10(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Philox4x32 with 10 rounds (Salmon et al., 2011): 4 counter words and 2 key words to 4 words, all uint32."""
    c0, c1, c2, c3 = (int(word) for word in counter)
    k0, k1 = (int(word) for word in key)
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = (product1 >> 32) ^ c1 ^ k0, product1 & MASK32
        c2, c3 = (product0 >> 32) ^ c3 ^ k1, product0 & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def noise_word(key: Sequence[int], step: int, layer: int, group: int, head: int, place: int, shared: bool) -> int:
    """The uint32 behind one draw: ``key`` is the sequence's two uint32 (low, high), ``head`` counts within its group.

    ``place`` is the team, or the number of the draw. Shared noise gives every head of the group the word of head 0.
    """
    head = 0 if shared else head
    return philox4x32_10((place, group * 65536 + head // 4, step, layer), key)[head % 4]


def uniform(word: int) -> float:
    """A word as a number in (0, 1): clamp(float32(word) * 2^-32, 2^-33, 1 - 2^-24), every step in float32."""
    u = np.float32(np.uint32(word)) * np.float32(2.0**-32)
    return float(min(max(u, np.float32(2.0**-33)), np.float32(1.0 - 2.0**-24)))


def uniform64(word: int) -> float:
    """A word as a number in (0, 1) in float64, (word + 1/2) 2^-32: what SANTA draws rows by."""
    return (word + 0.5) * 2.0**-32


def gumbel(key: Sequence[int], step: int, layer: int, group: int, head: int, team: int, shared: bool) -> float:
    """Algorithm 1, line 8: one standard Gumbel draw, -log(-log1p(-u))."""
    return -math.log(-math.log1p(-uniform(noise_word(key, step, layer, group, head, team, shared))))
