"""A filled cache that many settings decode from in turn: the same rows, the teams of each grouping made once."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from latent_santa.methods import METHODS
from latent_santa.patches.cache_layer import TeamLayer
from latent_santa.patches.control import CACHE_NAMES
from latent_santa.patches.layer_state import Snapshot

SHORT = 2048  # tokens of the prefill whose rows stand in for those of a long one
SLOW_MS = 5000.0  # preparation from here on is timed at its first run


class FilledCache:
    """Rows of all layers, filled once, with free rows behind them that each turn writes again.

    A turn gets a cache whose layers hold these rows and not copies of them. What a turn writes lies behind the filled
    rows, so turns do not see each other.

    Args:
        layers: of a cache, filled.
        free: the most rows that a turn writes.
    """

    def __init__(self, layers: list[TeamLayer], free: int) -> None:
        self._free = free
        for layer in layers:
            layer.regroup()
        self._plain = [layer.snapshot() for layer in layers]
        self._grouped: dict[Any, tuple[list[Snapshot], float]] = {}

    @property
    def bytes(self) -> int:
        """Memory of the buffers that hold the rows, free rows included."""
        buffers = [buffer for state in self._plain for buffer in state.buffers or (state.keys, state.values)]
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    @property
    def row_bytes(self) -> float:
        """Bytes of one cached token of one sequence, in all layers."""
        parts = [(state.keys, state.values) for state in self._plain]
        numbers = sum(part.numel() * part.element_size() for pair in parts for part in pair)
        return numbers / (parts[0][0].shape[0] * parts[0][0].shape[2])

    def for_transformers(self) -> DynamicCache:
        """A cache as an unpatched model makes it. Its first step copies the rows, as each of its steps does."""
        cache = DynamicCache()
        for state in self._plain:
            layer = DynamicLayer()
            layer.lazy_initialization(state.keys, state.values)
            layer.keys, layer.values = state.keys, state.values
            cache.layers.append(layer)
        return cache

    def for_patched(self) -> DynamicCache:
        """A cache for a patched model, to be rewound before each turn."""
        cache = DynamicCache()
        for state in self._plain:
            layer = TeamLayer()
            layer.lazy_initialization(state.keys, state.values)
            cache.layers.append(layer)
        return cache

    def rewind(self, cache: DynamicCache, santa: Any) -> float:
        """Take a cache of :meth:`for_patched` back to the filled rows, grouped under the settings in force.

        Returns:
            Milliseconds that the grouping took when it was made.
        """
        states, milliseconds = self._states(santa)
        for layer, state in zip(cache.layers, states, strict=True):
            layer.rewind(state)
        return milliseconds

    def team_bytes(self, santa: Any) -> int:
        """Memory of the team records under the settings in force."""
        states, _ = self._states(santa)
        return sum(state.grouped.teams.bytes() for state in states if state.grouped.teams is not None)

    def _states(self, santa: Any) -> tuple[list[Snapshot], float]:
        key = (santa.config.grouping, santa.graphs.mode)
        if key not in self._grouped:
            self._grouped[key] = self._prepared(santa)
        return self._grouped[key]

    def _prepared(self, santa: Any) -> tuple[list[Snapshot], float]:
        cache = self.for_patched()
        times: list[float] = []
        while not times or (len(times) == 1 and times[0] < SLOW_MS):  # a quick first run is all warm-up
            for layer, state in zip(cache.layers, self._plain, strict=True):
                layer.rewind(state)
            times.append(timed(lambda: santa.prepare(cache), self._plain[0].keys.device)[1])
        after = METHODS[santa.config.method].regroup_after(santa.config)
        if not 0 < self._free < after or cache.layers[0].grouped.teams is None:
            return [layer.snapshot() for layer in cache.layers], times[-1]
        # records have room for the teams of generated rows, but no turn is long enough to write into it: one copy
        # serves all caches, where a snapshot would let every capture make its own
        kept = [
            Snapshot(layer.keys, layer.values, layer.buffers, layer.grouped, layer.waiting, layer.observed)
            for layer in cache.layers
        ]
        return kept, times[-1]


@torch.no_grad()
def filled_by_prefill(model: Any, ids: torch.Tensor, free: int, repeats: int) -> tuple[FilledCache, float]:
    """The rows of a prefill of ``ids (B, N)`` by the unpatched base model, and its median time in milliseconds."""
    times: list[float] = []
    rows: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(repeats + 1):
        rows.clear()
        collect(ids.device)
        rows, milliseconds = timed(partial(_prefill, model, ids), ids.device)
        times.append(milliseconds)
    layers = []
    while rows:  # a layer at a time: its rows go once they are copied
        keys, values = rows.pop(0)
        layers.append(_with_room(keys, values, free))
    return FilledCache(layers, free), sorted(times[1:])[repeats // 2]


@torch.no_grad()
def filled_by_drawing(model: Any, batch: int, context: int, free: int) -> FilledCache:
    """Rows drawn from those of a short prefill, with noise of a tenth of their spread."""
    device = model.get_input_embeddings().weight.device
    generator = torch.Generator(device).manual_seed(2)
    ids = torch.randint(model.config.vocab_size, (1, min(SHORT, context)), generator=generator, device=device)
    layers = []
    for short in _prefill(model, ids):
        drawn = []
        for rows in short:
            pick = torch.randint(rows.shape[2], (batch, context), generator=generator, device=device)
            part = rows[0, :, pick].transpose(0, 1).contiguous()
            spread = 0.1 * rows.float().std()
            for sequence in part:  # one at a time bounds the float32 copies
                noise = torch.randn(sequence.shape, generator=generator, device=device)
                sequence.add_((spread * noise).to(rows.dtype))
            drawn.append(part)
        layers.append(_with_room(drawn[0], drawn[1], free))
    return FilledCache(layers, free)


def _prefill(model: Any, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each layer's rows."""
    output = model.get_decoder()(input_ids=ids, use_cache=True)
    cache = next(getattr(output, name) for name in CACHE_NAMES if getattr(output, name, None) is not None)
    return [(layer.keys, layer.values) for layer in cache.layers]


def _with_room(keys: torch.Tensor, values: torch.Tensor, free: int) -> TeamLayer:
    layer = TeamLayer()
    layer.asked = keys.shape[2] + free
    layer.update(keys, values)
    return layer


def timed(action: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """The action's result and its wall time in milliseconds, the device's work included."""
    wait(device)
    start = time.perf_counter()
    result = action()
    wait(device)
    return result, 1000 * (time.perf_counter() - start)


def wait(device: torch.device) -> None:
    """Wait for the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def collect(device: torch.device) -> None:
    """Give unused memory back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
