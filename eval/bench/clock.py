"""The device's clock: events around calls, with the rounds of a protocol."""

from __future__ import annotations

import torch

from latent_santa.eval.bench.timing import Evictor, Launch, Protocol, captured, paired


class DeviceClock:
    """Measures on one CUDA device under one protocol."""

    def __init__(self, protocol: Protocol, device: torch.device) -> None:
        self.protocol = protocol
        self.evict = Evictor(protocol.evict, device)

    def captured(self, launch: Launch) -> Launch:
        """A CUDA graph of the call."""
        return captured(launch)

    def paired(self, methods: dict[str, Launch]) -> dict[str, list[float]]:
        """Each method's round medians, microseconds."""
        return paired(methods, self.protocol, self.evict)
