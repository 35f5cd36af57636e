"""A decoding step whose addresses and shapes stay the same from token to token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from latent_santa.access import Unit
from latent_santa.count_ring import CountRing, Entry
from latent_santa.step import Suffix

from ..calls import ModelCall

if TYPE_CHECKING:
    from ..cache_layer import TeamLayer

# steps whose counts are kept on the device
SLOTS = 256


class FixedCall(ModelCall):
    """A call of one token on reserved rows. What changes from step to step stands in tensors of its own.

    Attributes:
        place: ``(1,)`` int64, the row that the step writes; rows behind it are not there yet.
        key: ``(B, 2)`` int64 noise keys.
        mask: ``(B, room)`` bool, False for padding rows, or None, which only calls without padding masks can use.
        start: ``(1,)`` int64, the first row of a suffix of limited length, or None.
        ring: the counts of the steps that ran, once a first one has.
    """

    def __init__(self, call: ModelCall) -> None:
        super().__init__(call.kind)
        first = call.layers[0]
        device = first.keys.device
        self.batch, self.room = first.keys.shape[0], first.room
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.key = torch.zeros(self.batch, 2, dtype=torch.int64, device=device)
        padded = call.visible is not None
        self.mask = torch.zeros(self.batch, self.room, dtype=torch.bool, device=device) if padded else None
        self.start = torch.zeros(1, dtype=torch.int64, device=device) if first.limit else None
        self.ring: CountRing | None = None
        self._key_from: Tensor | None = None
        self._rows = torch.arange(self.room, device=device)
        self._index: dict[tuple[Any, ...], Tensor] = {}
        self._suffixes: dict[tuple[Any, ...], Suffix] = {}
        self._entries: list[Entry] = []

    @torch.inference_mode()
    def set(self, call: ModelCall) -> None:
        """Enter what the next step depends on; a few small launches.

        Tensors that were made in inference mode are read-only outside it, and a cache may be used in both.
        """
        held = call.layers[0].get_seq_length()
        self.place.fill_(held)
        if self.start is not None:
            self.start.fill_(call.layers[0].grouped.stop)
        key = call.layers[0].noise_key
        if key is not None and key is not self._key_from:
            self.key.copy_(key)
            self._key_from = key
        if self.mask is not None:
            now = self.mask[:, : held + 1]
            now.fill_(True) if call.visible is None else now.copy_(call.visible)

    def begin(self, layers: Sequence[TeamLayer]) -> None:
        """What all layers share, from the place alone. The cache's layers are forgotten at the end of the step: they
        keep the graph, which would otherwise keep them."""
        self.layers = layers
        self.ledger = self  # type: ignore[assignment]
        for layer in layers:
            layer.place = self.place
        seen = self._rows <= self.place
        self.visible = seen.expand(self.batch, -1) if self.mask is None else self.mask & seen
        self.step = (self.place + 1).repeat(self.batch) if self.mask is None else self.visible.sum(-1)
        self._suffixes.clear()
        self._entries = []
        self._ahead = None

    def count(self) -> None:
        """Enter the step's counts."""
        if self.ring is None:
            self.ring = CountRing.for_entries(self._entries, SLOTS)
        self.ring.write(self._entries)

    def end(self) -> None:
        """Let go of the cache and of what the step computed."""
        for layer in self.layers:
            layer.place = None
        self.layers, self.ledger, self._entries = (), None, []
        self._suffixes.clear()
        self.visible = self.step = self._ahead = None

    # what a layer asks its call

    def record(self, layer: int, unit: Unit, routing: Tensor, union: Tensor, suffix: Tensor, dense: Tensor) -> None:
        """One layer's counts, as :meth:`AccessLedger.record` takes them."""
        self._entries.append((layer, unit, routing, union, suffix, dense))

    def noise_key(self, layer: int, device: torch.device) -> Tensor:
        return self.key

    def suffix(self, layer: int, device: torch.device) -> Suffix:
        grouped = self.layers[layer].grouped
        spans = grouped.exact if self.start is not None else (*grouped.exact, grouped.stop)
        if spans not in self._suffixes:
            if spans not in self._index:
                stop = self.room if self.start is None else grouped.stop
                self._index[spans] = self.layers[layer].suffix_rows(stop)
            index = self._index[spans]
            if self.start is not None:
                index = torch.cat((index, self.start + self._rows[: self.layers[layer].limit]))
            assert self.visible is not None
            # a limited suffix may reach beyond the reserved rows
            held = index.clamp_max(self.room - 1)
            seen = grouped.attended(held, self.visible)
            assert seen is not None
            self._suffixes[spans] = Suffix(held, seen & (index < self.room), index.numel())
        return self._suffixes[spans]

    def dense_mask(self, mask: Tensor | None, implementation: str) -> Tensor | None:
        assert self.visible is not None
        seen = self.visible[:, None, None]
        if implementation == "eager":  # it adds its mask to the scores
            nothing = torch.zeros(seen.shape, dtype=torch.float32, device=seen.device)
            return nothing.masked_fill(~seen, torch.finfo(torch.float32).min)
        return seen
