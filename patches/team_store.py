"""Team records of prompts that are prefilled again and again under settings that share a grouping."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from latent_santa.teams import Teams

LIMIT_BYTES = 4 << 30


@dataclass(frozen=True)
class _Kept:
    """Records of some layers, and which rows of the batch they are of."""

    member: Tensor
    records: list[Teams]


class TeamStore:
    """Keeps the team records of named batches, so that each is grouped once for many decode settings.

    Teams depend on the prompt and on the settings in :attr:`SantaConfig.grouping`, on no budget, estimator or noise. A
    handle whose ``team_store`` is one of these asks it before it groups the rows of a cache from its beginning on, for
    method "santa++". Routing keys are not kept: they are copied from the cache's rows every time. Records stay on the
    layers' device, in about 6 bytes per row, group, layer and sequence.

    Batches go by their names (``handle.batch``): shapes and padding are compared, rows are not. (Teams of other rows
    would still give unbiased sums, of a larger variance.) One thread at a time may use it.

    Attributes:
        limit_bytes: what would not fit is not kept, and is grouped each time.
        found: how often records were found instead of formed.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.found = 0
        self.bytes = 0
        self._grouping: tuple[object, ...] | None = None
        self._kept: dict[tuple[Hashable, tuple[int, ...]], _Kept] = {}

    def begin(self, grouping: tuple[object, ...]) -> None:
        """Free all records if they were made under another grouping."""
        if grouping != self._grouping:
            self.clear()
            self._grouping = grouping

    def clear(self) -> None:
        """Free all records."""
        self._kept.clear()
        self.bytes = 0

    def find(
        self, batch: Hashable, layers: Sequence[int], member: Tensor, shapes: Sequence[tuple[int, ...]]
    ) -> list[Teams] | None:
        """Records of these layers in a batch, without routing keys; None unless they are of the same rows.

        Args:
            batch: the batch's name.
            layers: numbers of the layers.
            member: ``(B, N)`` bool, rows to group.
            shapes: each layer's ``(B, G, N)``.
        """
        kept = self._kept.get((batch, tuple(layers)))
        if kept is None:
            return None
        if [tuple(teams.team_of_row.shape) for teams in kept.records] != list(shapes):
            return None
        if kept.member.device != member.device or not torch.equal(kept.member, member):
            return None
        self.found += 1
        return kept.records

    def keep(self, batch: Hashable, layers: Sequence[int], member: Tensor, records: list[Teams]) -> None:
        """Keep records without routing keys, in the place of earlier ones for the same batch and layers."""
        key = (batch, tuple(layers))
        old = self._kept.pop(key, None)
        self.bytes -= _bytes(old) if old is not None else 0
        new = _Kept(member.clone(), records)
        if self.bytes + _bytes(new) <= self.limit_bytes:
            self._kept[key] = new
            self.bytes += _bytes(new)


def _bytes(kept: _Kept) -> int:
    return kept.member.numel() + sum(teams.bytes() for teams in kept.records)
