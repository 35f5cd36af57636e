"""Counts of decoding steps with fixed addresses, kept on the device until the ledger takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .access import Unit

Entry: TypeAlias = "tuple[int, Unit, Tensor, Tensor, Tensor, Tensor]"


@dataclass
class CountRing:
    """Row counts of up to ``slots`` steps. The step itself writes them, at a place that is kept on the device, so that
    a captured CUDA graph does so on each of its replays.

    Attributes:
        layers: per recording layer its number and what its rows cost.
        counts: ``(slots, layers, 4, B, G)`` int32: routing, union, suffix and dense.
        slot: ``(1,)`` int64, the next step's place.
        filled: steps that wait, as the host counts them.
    """

    layers: list[tuple[int, Unit]]
    counts: Tensor
    slot: Tensor
    filled: int = 0

    @classmethod
    def for_entries(cls, entries: Sequence[Entry], slots: int) -> CountRing:
        """A ring for steps that record what ``entries`` do: (layer, unit, routing, union, suffix, dense)."""
        first = entries[0][2]
        counts = torch.zeros(slots, len(entries), 4, *first.shape, dtype=torch.int32, device=first.device)
        layers = [(layer, unit) for layer, unit, *_ in entries]
        return cls(layers, counts, torch.zeros(1, dtype=torch.int64, device=first.device))

    @property
    def slots(self) -> int:
        """Steps that fit."""
        return self.counts.shape[0]

    # a ring that was made in inference mode is read-only outside it
    @torch.inference_mode()
    def write(self, entries: Sequence[Entry]) -> None:
        """Enter one step's counts. A few launches for all layers, and nothing waits for the device."""
        stacked = torch.stack([count for _, _, *counts in entries for count in counts])
        self.counts.index_copy_(0, self.slot, stacked.to(torch.int32).view(1, *self.counts.shape[1:]))
        self.slot.add_(1)

    @torch.inference_mode()
    def back(self) -> None:
        """Let the next step write where the last one did: a run of it was not a step of the model."""
        self.slot.fill_(self.filled)

    def take(self) -> Iterator[tuple[int, Unit, Tensor]]:
        """(layer, unit, ``(C, 4, B, G)`` int32) of the C steps that waited, which the ring forgets."""
        taken = self.counts[: self.filled].clone()
        self.filled = 0
        self.back()
        for place, (layer, unit) in enumerate(self.layers):
            yield layer, unit, taken[:, place]
