"""Gumbel draws of several layers made at once: for one layer's alone, launching takes longer than computing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .noise import gumbel_noise

# draws made at once
MOST_DRAWS = 1 << 23


class Need(NamedTuple):
    """What one layer's draws depend on: its device, its sharing groups and its padded number of teams (0 for none)."""

    device: torch.device
    groups: int
    teams: int


class Ahead:
    """The draws of one call of the model, by layer. The first layer that asks makes those of the layers behind it."""

    def __init__(self, needs: Sequence[Need]) -> None:
        self._needs = needs
        self._made: dict[int, Tensor] = {}

    def serves(self, layer: int, teams: int) -> bool:
        """Whether the layer's draws for ``teams`` teams are among those made here."""
        return self._needs[layer].teams >= teams

    def gumbels(self, key: Tensor, step: Tensor, layer: int, groups: int, heads: int, shared: bool) -> Tensor:
        """One layer's draws, ``(B, G, H, at least M)`` float32; see :func:`~latent_santa.noise.gumbel_noise`."""
        if layer not in self._made:
            stop, most = layer, 0
            for need in self._needs[layer:]:
                if not need.teams or need.device != key.device or need.groups != groups:
                    break
                most = max(most, need.teams)
                if stop > layer and (stop + 1 - layer) * len(key) * groups * heads * most > MOST_DRAWS:
                    break
                stop += 1
            layers = torch.arange(layer, stop, device=key.device)
            made = gumbel_noise(key, step, layers, groups, heads, most, shared)
            self._made = dict(zip(range(layer, stop), made, strict=True))
        return self._made.pop(layer)
