"""Gumbel draws of several layers made at once: for one layer's alone, launching takes longer than computing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .noise import gumbel_noise

# what noise is drawn for; added to the layer in the counter, so that both have draws of their own
TEAMS, PARENTS = 0, 1 << 31
# draws made at once
MOST_DRAWS = 1 << 23


class Need(NamedTuple):
    """What one layer's draws depend on: its device, its sharing groups, its padded numbers of teams and of parents."""

    device: torch.device
    groups: int
    teams: int
    parents: int

    def count(self, of: int) -> int:
        return self.teams if of == TEAMS else self.parents


class Ahead:
    """The draws of one call of the model, by layer. The first layer that asks makes those of the layers behind it."""

    def __init__(self, needs: Sequence[Need]) -> None:
        self._needs = needs
        self._made: dict[int, dict[int, Tensor]] = {TEAMS: {}, PARENTS: {}}

    def serves(self, of: int, layer: int, count: int) -> bool:
        """Whether the layer's draws for ``count`` teams or parents are among those made here."""
        return self._needs[layer].count(of) >= count

    def gumbels(
        self,
        of: int,
        key: Tensor,
        step: Tensor,
        layer: int,
        groups: int,
        heads: int,
        shared: bool,
        first: tuple[int, int],
    ) -> Tensor:
        """One layer's draws, ``(B, G, H, at least M or C)`` float32; see :func:`~latent_santa.noise.gumbel_noise`."""
        made = self._made[of]
        if layer not in made:
            stop, most = layer, 0
            for need in self._needs[layer:]:
                if not need.count(of) or need.device != key.device or need.groups != groups:
                    break
                most = max(most, need.count(of))
                if stop > layer and (stop + 1 - layer) * len(key) * groups * heads * most > MOST_DRAWS:
                    break
                stop += 1
            layers = torch.arange(layer, stop, device=key.device)
            draws = gumbel_noise(key, step, layers + of, groups, heads, most, shared, first)
            made.clear()
            made.update(zip(range(layer, stop), draws, strict=True))
        return made.pop(layer)
