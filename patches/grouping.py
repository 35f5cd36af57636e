"""Grouping of cached rows: parents, teams and frozen representatives for every layer of a cache at once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from latent_santa.config import SantaConfig
from latent_santa.parents import form_parents
from latent_santa.routing_keys import quantise_parts
from latent_santa.teams import Teams, build_centroids, build_teams, freeze_representatives, join_teams

from .cache_layer import Grouped, TeamLayer
from .families import Adapter
from .team_store import TeamStore

# numbers in the stack of several layers' points: half a gigabyte in bfloat16
STACKED_NUMBERS = 1 << 28


def group_waiting(
    layers: Sequence[TeamLayer],
    adapters: Sequence[Adapter],
    visible: Tensor | None,
    config: SantaConfig,
    store: TeamStore | None = None,
    batch: Hashable | None = None,
) -> None:
    """Group the rows that wait in each layer, and drop teams that other settings made.

    Layers of one device are clustered together, so that the k-means engine sees large batches.

    Args:
        layers, adapters: of every attention layer, in order.
        visible: ``(B, L)`` bool, False for padding rows, or None when all rows are real.
        config: the settings in force.
        store: where records of prompts that come again are kept, or None.
        batch: the batch's name in the store, or None to keep and to find nothing.
    """
    if store is not None:
        store.begin(config.grouping)
    jobs: dict[tuple[torch.device, tuple[int, int]], list[int]] = {}
    for number, layer in enumerate(layers):
        if layer.grouped.grouping not in (None, config.grouping):
            layer.regroup()
        if layer.waiting is not None:
            jobs.setdefault((layer.keys.device, layer.waiting), []).append(number)
    for (device, (start, stop)), numbers in jobs.items():
        member = _member(visible, layers[numbers[0]].keys.shape[0], start, stop, device)
        if config.method in ("santa", "dense"):
            built: list[Teams | None] = [None] * len(numbers)
        else:
            # only rows from the cache's beginning are a prompt that its name in the store tells apart
            named = start == 0 and config.method == "santa++" and batch is not None
            built = list(_build(layers, adapters, numbers, member, config, store if named else None, batch))
        for number, teams in zip(numbers, built, strict=True):
            layers[number].grouped = _extended(layers[number].grouped, teams, start, stop, config)
            layers[number].waiting = None


def _member(visible: Tensor | None, batch: int, start: int, stop: int, device: torch.device) -> Tensor:
    """``(B, stop)`` bool: rows of the span that are no padding."""
    inside = torch.arange(stop, device=device) >= start
    if visible is None:
        return inside.expand(batch, -1)
    return inside & visible[:, :stop].to(device)


def _build(
    layers: Sequence[TeamLayer],
    adapters: Sequence[Adapter],
    numbers: list[int],
    member: Tensor,
    config: SantaConfig,
    store: TeamStore | None,
    batch: Hashable | None,
) -> Iterator[Teams]:
    """Teams of several layers, in the order of ``numbers``."""
    stop = member.shape[-1]
    points = [adapters[n].points(layers[n].keys)[:, :, :stop] for n in numbers]
    rows = [adapters[n].rows(layers[n].keys[:, :, :stop], layers[n].values[:, :, :stop]) for n in numbers]
    if config.method == "centroid":
        parents = form_parents(points, member, config)
        for n, layer_rows, formed in zip(numbers, rows, parents, strict=True):
            yield _quantised(build_centroids(layer_rows, formed), layers[n].grouped.teams, config)
        return
    shapes = [tuple(part.shape[:3]) for part in points]
    records = store.find(batch, numbers, member, shapes) if store is not None else None
    if records is None:
        records = _form(points, member, config)
        if store is not None:
            store.keep(batch, numbers, member, records)
    for n, teams, layer_rows in zip(numbers, records, rows, strict=True):
        yield _quantised(freeze_representatives(teams, layer_rows), layers[n].grouped.teams, config)


def _form(points: list[Tensor], member: Tensor, config: SantaConfig) -> list[Teams]:
    """Records of several layers without routing keys."""
    parents = form_parents(points, member, config)
    records: list[Teams] = []
    for part in _stackable(points):
        # one pass over many layers: their own passes would be too short to fill a GPU
        stacked = build_teams(torch.cat(points[part]), torch.cat(parents[part]), config.representatives)
        records += stacked.split(len(points[part]))
    return records


def _quantised(teams: Teams, earlier: Teams | None, config: SantaConfig) -> Teams:
    """The teams with their routing keys in the configured representation, like ``earlier`` teams of the layer."""
    held = None if earlier is None else earlier.routing_keys
    return replace(teams, routing_keys=quantise_parts(teams.routing_keys, config.routing_dtype, teams.sizes > 0, held))


def _stackable(points: list[Tensor]) -> Iterator[slice]:
    """Runs of layers of one shape that fit in the memory set aside for a stack of them."""
    start = 0
    while start < len(points):
        most = max(1, STACKED_NUMBERS // max(points[start].numel(), 1))
        stop = start + 1
        while stop < len(points) and stop - start < most and points[stop].shape == points[start].shape:
            stop += 1
        yield slice(start, stop)
        start = stop


def _extended(old: Grouped, teams: Teams | None, start: int, stop: int, config: SantaConfig) -> Grouped:
    """The old records with one more grouped span; rows between the two stay an exact span."""
    between = ((old.stop, start),) if start > old.stop else ()
    if old.teams is not None and teams is not None:
        teams = join_teams(old.teams, teams)
    return Grouped(teams, stop, (*old.exact, *between), config.grouping)
