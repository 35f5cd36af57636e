"""Row counts of a call where processes have sharing groups of their own (GQA under tensor parallelism)."""

from __future__ import annotations

import torch
from torch import Tensor

from latent_santa.access import AccessLedger, Unit
from latent_santa.peers import Peers


class SpreadCounts:
    """Stands in for the ledger during a call, until the counts of the other processes join in.

    One exchange serves all layers of a call. After it every process's ledger is the whole model's, so that reading it
    asks nobody.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, Unit, Tensor]] = []

    def record(self, layer: int, unit: Unit, routing: Tensor, union: Tensor, suffix: Tensor, dense: Tensor) -> None:
        """One layer's counts, as :meth:`AccessLedger.record` takes them."""
        self._entries.append((layer, unit, torch.stack((routing, union, suffix, dense)).to(torch.int32)))

    def join(self, ledger: AccessLedger, peers: Peers) -> None:
        """Record the counts of all processes; every process must call this."""
        if not self._entries:
            return
        here = [counts for *_, counts in self._entries]
        parts = peers.joined(torch.cat(here, -1)[None], 0).split([counts.shape[-1] for counts in here], -1)
        for (layer, unit, _), part in zip(self._entries, parts, strict=True):
            ledger.record(layer, unit, *part.permute(1, 2, 0, 3).flatten(2))  # from (process, 4, B, G here)
        self._entries.clear()
