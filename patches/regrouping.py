"""Regrouping: rows that a model generated become teams in room behind the prompt's records.

No step should wait for it. The teams of the oldest open rows are made some steps before the suffix is full (on a GPU,
k-means in a thread and on a stream of its own), and join the records in the step that finds it full. When both happen
depends on the number of rows alone, so that a step gives the same bits whether or not it was captured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from latent_santa.config import SantaConfig
from latent_santa.growth import append_, has_room, with_room
from latent_santa.integers import ceil_div
from latent_santa.kmeans.cuda_graph import without_graphs
from latent_santa.methods import METHODS
from latent_santa.teams import Teams

from .cache_layer import TeamLayer
from .families import Adapter
from .grouping import agreed, coded_like, span_of
from .layer_state import Grouped

LEAST_ROOM = 256  # rows
# teams are made in the last of so many parts of the suffix's steps: 16 of 256 with k-means, 8 of 128 with contiguous
SHARE = 16


@dataclass(frozen=True, eq=False)
class Coming:
    """Teams in the making, of the rows from ``start`` to ``stop`` of some layers.

    Attributes:
        config: the settings they are made under.
        grouped: what was known of the layers' rows when it began; teams that came since would be numbered otherwise.
        made: gives the layers' teams, and waits for them if it must.
    """

    config: SantaConfig
    grouped: tuple[Grouped, ...]
    start: int
    stop: int
    made: Callable[[], list[Teams]]

    def fits(self, layers: Sequence[TeamLayer], config: SantaConfig) -> bool:
        """Whether they are still the teams to come."""
        return self.config is config and all(a is b.grouped for a, b in zip(self.grouped, layers, strict=True))


def due(layer: TeamLayer) -> bool:
    """Whether a step on this layer has teams to make or to add first."""
    return 0 < layer.limit <= layer.open_rows + (0 if layer.coming is not None else layer.limit // SHARE)


def regroup_generated(
    layers: Sequence[TeamLayer], adapters: Sequence[Adapter], visible: Tensor | None, config: SantaConfig
) -> None:
    """Group the oldest rows of exact suffixes that have reached ``regroup_after`` rows.

    With contiguous parents these are whole parents, as few as leave less than ``regroup_after`` rows, and nothing waits
    for the device. With k-means they are the rows that were there ``regroup_after / SHARE`` steps before, clustered
    like a further turn. The teams are written into room behind the records. Arguments as in
    :func:`latent_santa.patches.grouping.group_waiting`, which comes first.
    """
    after = METHODS[config.method].regroup_after(config)
    for layer in layers:
        layer.limit = after if layer.grouped.teams is not None else 0
    if not after:
        return
    _make_room(layers, config)
    # a parent has P rows, and those of regroup_after = P are not there before
    least = config.parent_size if METHODS[config.method].parents(config) == "contiguous" else 1
    jobs: dict[tuple[Any, ...], list[int]] = {}
    for n, layer in enumerate(layers):
        if due(layer) and layer.open_rows >= least:
            assert layer.grouped.teams is not None
            alike = layer.keys.device, layer.grouped.stop, layer.open_rows, layer.grouped.teams.count.shape
            jobs.setdefault(alike, []).append(n)
    for (_, start, rows, _), numbers in jobs.items():
        theirs, own = [layers[n] for n in numbers], [adapters[n] for n in numbers]
        coming = theirs[0].coming
        if coming is None or not coming.fits(theirs, config):
            coming = _begin(theirs, own, visible, start, rows, config)
            for layer in theirs:
                layer.coming = coming
        if rows >= after:
            _end(theirs, own, visible, coming, config)


def _begin(
    layers: Sequence[TeamLayer],
    adapters: Sequence[Adapter],
    visible: Tensor | None,
    start: int,
    rows: int,
    config: SantaConfig,
) -> Coming:
    """Make teams of a suffix of ``rows`` rows from ``start`` on."""
    method, size = METHODS[config.method], config.parent_size
    even = method.parents(config) == "contiguous"
    if even:
        rows = size * ceil_div(max(rows - method.regroup_after(config), 0) + 1, size)
    points, own, member = span_of(layers, adapters, visible, start, start + rows)
    spans = _parents_of(rows, config) if even else None

    def made() -> list[Teams]:
        # few rows, so all layers' at once
        built = list(method.build(points, own, member, config, spans))
        assert all(teams is not None for teams in built)
        return built  # type: ignore[return-value]

    grouped = tuple(layer.grouped for layer in layers)
    beside = member.is_cuda and not even and rows < method.regroup_after(config)
    return Coming(config, grouped, start, start + rows, _beside(made, member.device) if beside else _kept(made()))


def _end(
    layers: Sequence[TeamLayer],
    adapters: Sequence[Adapter],
    visible: Tensor | None,
    coming: Coming,
    config: SantaConfig,
) -> None:
    """Add the teams to the records."""
    start, stop = coming.start, coming.stop
    spans = _parents_of(stop - start, config)
    teams = agreed(coming.made(), adapters[0], layers[0].keys.device)
    records = [_roomy(layer, spans, config) for layer in layers]
    append_(records, [coded_like(new, old, config) for new, old in zip(teams, records, strict=True)], start, spans)
    seen = None if visible is None else visible[:, :stop]
    for layer in layers:
        layer.grouped, layer.coming = replace(layer.grouped, stop=stop, seen=seen), None


def _kept(teams: list[Teams]) -> Callable[[], list[Teams]]:
    return lambda: teams


_WORKERS = threading.local()


def _beside(make: Callable[[], list[Teams]], device: torch.device) -> Callable[[], list[Teams]]:
    """Let a thread of its own make teams, on a stream of its own; what it returns waits for them."""
    if not hasattr(_WORKERS, "pool"):
        # one per generating thread, so that its teams are made one after another
        _WORKERS.pool, _WORKERS.streams = ThreadPoolExecutor(1, "latent_santa regrouping"), {}
    stream = _WORKERS.streams.setdefault(device, torch.cuda.Stream(device))
    stream.wait_stream(torch.cuda.current_stream(device))

    @torch.no_grad()
    def work() -> tuple[list[Teams], torch.cuda.Event]:
        with torch.cuda.device(device), torch.cuda.stream(stream), without_graphs():
            return make(), stream.record_event()

    future: Future[tuple[list[Teams], torch.cuda.Event]] = _WORKERS.pool.submit(work)

    def made() -> list[Teams]:
        teams, event = future.result()
        torch.cuda.current_stream(device).wait_event(event)
        return teams

    return made


def _make_room(layers: Sequence[TeamLayer], config: SantaConfig) -> None:
    """Give records room for the teams of all rows that the cache may hold before it moves."""
    for layer in layers:
        if layer.limit and layer.room > layer.grouped.stop:
            _roomy(layer, _parents_of(layer.room - layer.grouped.stop, config), config)


def _parents_of(rows: int, config: SantaConfig) -> int:
    """The most parents that a span of rows forms (Algorithm 3, line 3, asks for two at least)."""
    return max(2 if METHODS[config.method].parents(config) == "kmeans" else 0, ceil_div(rows, config.parent_size))


def _roomy(layer: TeamLayer, spans: int, config: SantaConfig) -> Teams:
    """The layer's records, with room for ``spans`` more parents; copied where there is too little.

    New room is for an eighth of the grouped rows, or 256, so that copies are few and little padding is scored.
    """
    teams = layer.grouped.teams
    assert teams is not None, "nothing is grouped yet"
    if not has_room(teams, spans):
        method = METHODS[config.method]
        rows = max(LEAST_ROOM, teams.covered // 8)
        most = max(spans, ceil_div(rows, config.parent_size))
        even = method.parents(config) == "contiguous"
        teams = with_room(teams, most, config.parent_size, method.per_parent(config), even)
        layer.grouped = replace(layer.grouped, teams=teams)
    return teams
