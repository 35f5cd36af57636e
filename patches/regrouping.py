"""Regrouping: rows that a model generated become teams in room behind the prompt's records.

No step should take long for it. Contiguous parents are known long before the suffix is full, so their teams are made
some steps ahead, and join the records in the step that finds it full. When both happen depends on the number of rows
alone: a step gives the same bits whether or not it was captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from latent_santa.config import SantaConfig
from latent_santa.growth import append_, has_room, with_room
from latent_santa.integers import ceil_div
from latent_santa.methods import METHODS
from latent_santa.teams import Teams

from .cache_layer import TeamLayer
from .families import Adapter
from .grouping import agreed, coded_like, span_of
from .layer_state import Grouped, mask_of

LEAST_ROOM = 256  # rows
# contiguous teams are made in the last of so many parts of the suffix's steps: 8 before it holds 128 rows
SHARE = 16


@dataclass(frozen=True, eq=False)
class Coming:
    """Teams that are made and have not come to the records: those of the rows from ``start`` to ``stop``.

    Attributes:
        config: the settings they were made under.
        grouped: what was known of the layers' rows then; behind other teams they would be numbered otherwise.
        teams: each layer's.
        seen: ``(B, stop)`` bool, the padding mask they were made under, or None when all rows were real.
    """

    config: SantaConfig
    grouped: tuple[Grouped, ...]
    start: int
    stop: int
    teams: list[Teams]
    seen: Tensor | None

    def serves(self, layers: Sequence[TeamLayer], visible: Tensor | None, config: SantaConfig) -> bool:
        """Whether they are still the teams to come, and enough. With a mask this waits for the device."""
        same = self.config is config and all(a is b.grouped for a, b in zip(self.grouped, layers, strict=True))
        enough = same and all(layer.get_seq_length() - self.stop < layer.limit for layer in layers)
        # a draft that was rejected meanwhile may be hidden by a mask
        return enough and not Grouped(stop=self.stop, seen=self.seen).hides(visible)


def due(layer: TeamLayer) -> bool:
    """Whether a step on this layer has teams to make or to add first."""
    return 0 < layer.limit <= layer.open_rows + (0 if layer.coming is not None else layer.ahead)


def regroup_generated(
    layers: Sequence[TeamLayer], adapters: Sequence[Adapter], visible: Tensor | None, config: SantaConfig
) -> None:
    """Group the oldest rows of exact suffixes that have reached ``regroup_after`` rows.

    With contiguous parents these are whole parents, as few as leave less than ``regroup_after`` rows, and nothing waits
    for the device. With k-means they are all rows, clustered like a further turn. The teams are written into room
    behind the records. Arguments as in :func:`latent_santa.patches.grouping.group_waiting`, which comes first.
    """
    method, size = METHODS[config.method], config.parent_size
    after, even = method.regroup_after(config), method.parents(config) == "contiguous"
    for layer in layers:
        layer.limit = after if layer.grouped.teams is not None else 0
        # the first parent's P rows are there, whatever regroup_after is
        layer.ahead = min(after // SHARE, after - size) if even else 0
    if not after:
        return
    _make_room(layers, config)
    jobs: dict[tuple[Any, ...], list[int]] = {}
    for n, layer in enumerate(layers):
        if due(layer):
            assert layer.grouped.teams is not None
            alike = layer.keys.device, layer.grouped.stop, layer.open_rows, layer.grouped.teams.count.shape
            jobs.setdefault(alike, []).append(n)
    for (_, start, rows, _), numbers in jobs.items():
        theirs, own = [layers[n] for n in numbers], [adapters[n] for n in numbers]
        coming = theirs[0].coming
        if coming is None or not coming.serves(theirs, visible, config):
            least = size * ceil_div(max(rows - after, 0) + 1, size)
            coming = _made(theirs, own, visible, start, start + (least if even else rows), config)
            for layer in theirs:
                layer.coming = coming
        if rows >= after:
            _come(theirs, coming, config)


def _made(
    layers: Sequence[TeamLayer],
    adapters: Sequence[Adapter],
    visible: Tensor | None,
    start: int,
    stop: int,
    config: SantaConfig,
) -> Coming:
    method = METHODS[config.method]
    spans = _parents_of(stop - start, config) if method.parents(config) == "contiguous" else None
    # few rows, so all layers' at once
    built = list(method.build(*span_of(layers, adapters, visible, start, stop), config, spans))
    teams = [one for one in agreed(built, adapters[0], layers[0].keys.device) if one is not None]
    assert len(teams) == len(layers)
    return Coming(config, tuple(layer.grouped for layer in layers), start, stop, teams, mask_of(visible, stop))


def _come(layers: Sequence[TeamLayer], coming: Coming, config: SantaConfig) -> None:
    """Write the teams into the records."""
    start, stop = coming.start, coming.stop
    spans = _parents_of(stop - start, config)
    records = [_roomy(layer, spans, config) for layer in layers]
    new = [coded_like(teams, old, config) for teams, old in zip(coming.teams, records, strict=True)]
    append_(records, new, start, spans)
    for layer in layers:
        layer.grouped, layer.coming = replace(layer.grouped, stop=stop, seen=coming.seen), None


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
