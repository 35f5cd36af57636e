"""Regrouping: rows that a model generated become teams in room behind the prompt's records.

No step should take long for it. The oldest rows of a suffix are known long before it is full, so their teams are made
some steps ahead, part by part, and join the records in the step that finds the suffix full. When they do so
depends on the number of rows alone: a step gives the same bits whether or not it was captured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from latent_santa.config import SantaConfig
from latent_santa.growth import append_, has_room, with_room
from latent_santa.in_parts import Work, share_of
from latent_santa.integers import ceil_div
from latent_santa.kmeans import clustering
from latent_santa.methods import METHODS
from latent_santa.parents import form_parents, kmeans_parents_in_parts, requested_parents
from latent_santa.rows import Rows
from latent_santa.teams import Teams

from .cache_layer import TeamLayer
from .families import Adapter
from .grouping import agreed, coded_like, span_of
from .layer_state import Grouped, mask_of

LEAST_ROOM = 256  # rows
# teams are made in the last of so many parts of the suffix's steps: contiguous ones in three of 8 before it holds 128
# rows, k-means ones in 32 before it holds 256
SHARES = {"contiguous": 16, "kmeans": 8}
# kinds of device on which the first use of a kernel loads it, and that of a library reserves memory
SLOW_AT_FIRST = ("cuda",)
_rehearsed: set[tuple[Any, ...]] = set()


class Making:
    """The teams of a span of rows of several layers, in the making.

    Attributes:
        grouping: the settings that they are made under (:attr:`SantaConfig.grouping`).
        start, stop: the span.
        seen: ``(B, stop)`` bool, the padding mask that they are made under, or None when all rows are real.
        begun: rows of the exact suffix in the step that began.
        teams: each layer's, as soon as they are made; else None.
    """

    def __init__(
        self,
        layers: Sequence[TeamLayer],
        adapters: Sequence[Adapter],
        visible: Tensor | None,
        span: tuple[int, int],
        config: SantaConfig,
    ) -> None:
        self.grouping, (self.start, self.stop), self.seen = config.grouping, span, mask_of(visible, span[1])
        self.begun = layers[0].open_rows
        self.teams: list[Teams] | None = None
        self._device, self._done = layers[0].keys.device, 0.0
        # the work keeps rows, and no layer: a cache goes when its user lets go of it
        self._work = _made(*span_of(layers, adapters, visible, *span, copied=True), config)

    def advance(self, share: float) -> None:
        """Run the next part, and more while a smaller ``share`` of the work is done."""
        while self.teams is None:
            # parts may run in steps with and without inference mode, and only that mode writes into what it made
            with clustering(self._device), torch.inference_mode():
                try:
                    self._done = next(self._work)
                except StopIteration as end:
                    self.teams = end.value
            if self._done >= share:
                return


@dataclass(frozen=True, eq=False)
class Coming:
    """One layer's teams that have not come to the records.

    Attributes:
        making: where they are made, for several layers.
        place: the layer's among these.
        index: ``(B,)`` int64, which of the sequences then each present one was, or None where none moved.
    """

    making: Making
    place: int
    index: Tensor | None = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # a copied or pickled cache makes its own
        return (type(None), ())

    @property
    def stop(self) -> int:
        """The first row behind theirs."""
        return self.making.stop

    def followed(self, index: Tensor) -> Coming:
        """Those of the sequences ``index (B',)``."""
        return replace(self, index=index if self.index is None else self.index.index_select(0, index))

    def continues(self, layers: Sequence[TeamLayer], config: SantaConfig) -> bool:
        """Whether these are the teams to come of all the layers."""
        making = self.making
        same = all(layer.coming is not None and layer.coming.making is making for layer in layers)
        return same and making.grouping == config.grouping and making.start == layers[0].grouped.stop

    def seen(self) -> Tensor | None:
        """``(B, stop)`` bool, the padding mask that they were made under, of the present sequences."""
        seen = self.making.seen
        return seen if seen is None or self.index is None else seen.index_select(0, self.index.to(seen.device))

    def teams(self) -> Teams:
        """The made teams of the present sequences."""
        assert self.making.teams is not None
        teams = self.making.teams[self.place]
        return teams if self.index is None else teams.select_batch(self.index)


def due(layer: TeamLayer) -> bool:
    """Whether a step on this layer has teams to make or to add first."""
    made = layer.coming is not None and layer.coming.making.teams is not None
    return 0 < layer.limit <= layer.open_rows + (0 if made else layer.ahead)


def regroup_generated(
    layers: Sequence[TeamLayer], adapters: Sequence[Adapter], visible: Tensor | None, config: SantaConfig
) -> None:
    """Group the oldest rows of exact suffixes that have reached ``regroup_after`` rows.

    With contiguous parents these are whole parents, as few as leave less than ``regroup_after`` rows. With k-means they
    are all rows but those of the last steps, in which they were clustered, like a further turn. The teams are written
    into room behind the records. Arguments as in :func:`latent_santa.patches.grouping.group_waiting`, to be called
    before.
    """
    method, size = METHODS[config.method], config.parent_size
    after, form = method.regroup_after(config), method.parents(config)
    for layer in layers:
        layer.limit = after if layer.grouped.teams is not None else 0
        # at least P rows are there, whatever regroup_after is
        layer.ahead = min(after // SHARES[form], after - size) if after else 0
    if not after:
        return
    if _make_room(layers, config):
        _rehearse(layers, adapters, visible, config)
    jobs: dict[tuple[Any, ...], list[int]] = {}
    for n, layer in enumerate(layers):
        if due(layer):
            assert layer.grouped.teams is not None
            alike = layer.keys.device, layer.grouped.stop, layer.open_rows, layer.grouped.teams.count.shape
            jobs.setdefault(alike, []).append(n)
    for (_, start, rows, _), numbers in jobs.items():
        theirs, own = [layers[n] for n in numbers], [adapters[n] for n in numbers]
        if not _continues(theirs, visible, rows >= after, config):
            making = Making(theirs, own, visible, (start, start + _taken(theirs[0], rows, config)), config)
            for place, layer in enumerate(theirs):
                layer.coming = Coming(making, place)
        making = theirs[0].coming.making
        try:
            # a part in each step ahead, and more where there are more parts than steps; all that is left in the last
            making.advance(math.inf if rows >= after else (rows - making.begun) / (after - making.begun))
            if rows >= after:
                _come(theirs, own, config)
        except BaseException:
            for layer in theirs:
                layer.coming = None
            raise


def _taken(layer: TeamLayer, rows: int, config: SantaConfig) -> int:
    """How many of the ``rows`` of a suffix, or of those it will have when it is full, become teams together."""
    if METHODS[config.method].parents(config) == "contiguous":
        return config.parent_size * ceil_div(max(rows - layer.limit, 0) + 1, config.parent_size)
    return max(rows, layer.limit) - layer.ahead


def _rehearse(
    layers: Sequence[TeamLayer], adapters: Sequence[Adapter], visible: Tensor | None, config: SantaConfig
) -> None:
    """Make teams and write them into records that nobody keeps, once per process, device and shape.

    The first regrouping of a process took 17 ms of one step, in which PyTorch loaded the kernels that write; a call
    that makes room for generated rows, mostly a prompt's, is long anyway. Where the cache has no room for as many rows
    as regrouping begins with, nothing is rehearsed: most likely the generation is short.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for n, layer in enumerate(layers):
        enough = 0 < layer.limit - layer.ahead <= layer.room - layer.grouped.stop
        if enough and layer.keys.device.type in SLOW_AT_FIRST:
            shapes = [(part.shape[:2], part.shape[3], part.dtype) for part in (layer.keys, layer.values)]
            stop = min(layer.grouped.stop, layer.get_seq_length())  # a prompt's last row may be held back
            alike.setdefault((layer.keys.device, stop, *shapes), []).append(n)
    for (device, stop, *shapes), numbers in alike.items():
        theirs, own = [layers[n] for n in numbers], [adapters[n] for n in numbers]
        taken = min(_taken(theirs[0], 0, config), stop)
        job = (device, *shapes, len(numbers), taken, config.grouping)
        if job in _rehearsed:
            continue
        making = Making(theirs, own, visible, (stop - taken, stop), config)
        making.advance(math.inf)
        assert making.teams is not None
        made, spans = agreed(making.teams, own[0], device), _parents_of(taken, config)
        records = [_with_room(coded_like(teams, None, config), spans, config) for teams in made]
        new = [coded_like(teams, old, config) for teams, old in zip(made, records, strict=True)]
        append_(records, new, taken, spans)
        _rehearsed.add(job)


def _continues(layers: Sequence[TeamLayer], visible: Tensor | None, full: bool, config: SantaConfig) -> bool:
    """Whether the layers have teams to come, which leave room in a ``full`` suffix. With a mask that one waits for the
    device."""
    coming = layers[0].coming
    if coming is None or not coming.continues(layers, config):
        return False
    if not full:
        return True
    enough = all(layer.get_seq_length() - coming.stop < layer.limit for layer in layers)
    # a draft that was rejected meanwhile may be hidden by a mask
    return enough and not Grouped(stop=coming.stop, seen=coming.seen()).hides(visible)


def _made(points: list[Tensor], rows: list[Rows], member: Tensor, config: SantaConfig) -> Work[list[Teams]]:
    """Teams of these rows of several layers, as of :func:`span_of`."""
    method, length = METHODS[config.method], member.shape[1]
    yield 0.0
    if method.parents(config) == "kmeans":
        bound = requested_parents(length, config.parent_size)
        work = kmeans_parents_in_parts(points, member, config.parent_size, config.kmeans_seed, config.kmeans_engine)
        parents = yield from share_of(work, 0.0, 0.95)
        yield 0.95
    else:
        bound = ceil_div(length, config.parent_size)
        parents = form_parents(points, rows, member, config)
        yield 0.4  # where there are two steps ahead, the second one does the rest
    # few rows, so all layers' at once
    built = method.build(points, rows, member, config, bound, parents)
    return [teams for teams in built if teams is not None]


def _come(layers: Sequence[TeamLayer], adapters: Sequence[Adapter], config: SantaConfig) -> None:
    """Write the teams into the records."""
    coming = layers[0].coming
    start, stop, seen = coming.making.start, coming.stop, coming.seen()
    spans = _parents_of(stop - start, config)
    records = [_roomy(layer, spans, config) for layer in layers]
    # processes make equally many steps, but not parts of k-means: they agree when the teams come
    made = agreed([layer.coming.teams() for layer in layers], adapters[0], layers[0].keys.device)
    new = [coded_like(teams, old, config) for teams, old in zip(made, records, strict=True)]
    append_(records, new, start, spans)
    for layer in layers:
        layer.grouped, layer.coming = replace(layer.grouped, stop=stop, seen=seen), None


def _make_room(layers: Sequence[TeamLayer], config: SantaConfig) -> bool:
    """Give records room for the teams of all rows that the cache may hold before it moves. Whether some had none."""
    copied = False
    for layer in layers:
        if layer.limit and layer.room > layer.grouped.stop:
            held = layer.grouped.teams
            copied |= _roomy(layer, _parents_of(layer.room - layer.grouped.stop, config), config) is not held
    return copied


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
        rows = max(LEAST_ROOM, teams.covered // 8)
        teams = _with_room(teams, max(spans, ceil_div(rows, config.parent_size)), config)
        layer.grouped = replace(layer.grouped, teams=teams)
    return teams


def _with_room(teams: Teams, spans: int, config: SantaConfig) -> Teams:
    method = METHODS[config.method]
    even = method.parents(config) == "contiguous"
    return with_room(teams, spans, config.parent_size, method.per_parent(config), even)
