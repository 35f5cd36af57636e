"""Grouping of cached rows: parents, teams and frozen representatives for every layer of a cache at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from latent_santa.config import SantaConfig
from latent_santa.methods import METHODS, Method
from latent_santa.parent_records import ParentRecords
from latent_santa.prompt_queries import PromptQueries
from latent_santa.routing_keys import RoutingKeys, quantise_parts
from latent_santa.teams import Teams, join_teams

from .cache_layer import Grouped, TeamLayer
from .families import Adapter


def group_waiting(
    layers: Sequence[TeamLayer], adapters: Sequence[Adapter], visible: Tensor | None, config: SantaConfig
) -> None:
    """Group the rows that wait in each layer, and drop teams that other settings made.

    Layers of one device are clustered together, so that the k-means engine sees large batches. Layers without rows (an
    early exit leaves them out) have nothing to group.

    Args:
        layers, adapters: of every attention layer, in order.
        visible: ``(B, L)`` bool, False for padding rows, or None when all rows are real.
        config: the settings in force.
    """
    jobs: dict[tuple[torch.device, tuple[int, int]], list[int]] = {}
    grouping = config.grouping
    for number, layer in enumerate(layers):
        if layer.grouped.grouping not in (None, grouping):
            layer.regroup()
        if layer.waiting is not None and layer.get_seq_length():
            jobs.setdefault((layer.keys.device, layer.waiting), []).append(number)
    method = METHODS[config.method]
    for (device, (start, stop)), numbers in jobs.items():
        member = _member(visible, layers[numbers[0]].keys.shape[0], start, stop, device)
        points = [adapters[n].points(layers[n].keys)[:, :, :stop] for n in numbers]
        rows = [adapters[n].rows(layers[n].keys[:, :, :stop], layers[n].values[:, :, :stop]) for n in numbers]
        seen = None if visible is None else visible[:, :stop]
        if method.window:
            queries = [_queries(layers[n], adapters[n], start, stop, visible, method) for n in numbers]
            records: Iterable[Teams | None] = method.build_by_queries(queries, rows, member, config)
        else:
            records = method.build(points, rows, member, config)
        for n, teams in zip(numbers, records, strict=True):
            peers = adapters[n].peers
            if teams is not None and peers is not None and not adapters[n].groups_apart:
                # the processes hold the same rows, but one rounding otherwise could make other teams of them
                teams = peers.firsts(teams, device)
            layers[n].grouped = _extended(layers[n].grouped, teams, start, stop, seen, config)
            layers[n].waiting = None


def _queries(
    layer: TeamLayer, adapter: Adapter, start: int, stop: int, visible: Tensor | None, method: Method
) -> PromptQueries:
    """The queries of the last tokens of the span, in the rows' own coordinates.

    Raises:
        NotImplementedError: the cache does not hold them.
    """
    held, wanted = layer.observed, min(method.window, stop - start)
    if held is None or held.stop != stop or held.states.shape[2] < wanted:
        raise NotImplementedError(
            f"method {method.name!r} chooses rows by the queries of the prompt's last tokens, and this cache came "
            f"without those of rows {stop - wanted} to {stop}: it was filled under another method or no patch, or has "
            "an answer behind the prompt. Fill a new cache under this method, or use santa.prefill, which keeps them"
        )
    states = held.states[:, :, -wanted:]
    parts = adapter.query(states.transpose(1, 2).flatten(0, 1)[:, :, None])
    batch = states.shape[0]
    if visible is None:
        visible = torch.ones(batch, stop, dtype=torch.bool, device=states.device)
    folded = tuple(part.unflatten(0, (batch, wanted)).movedim(1, 3) for part in parts)
    if adapter.peers is not None and not adapter.groups_apart:
        folded = tuple(adapter.peers.joined(part, 2) for part in folded)
    return PromptQueries(folded, held.scale, visible[:, :stop].to(states.device))


def _member(visible: Tensor | None, batch: int, start: int, stop: int, device: torch.device) -> Tensor:
    """``(B, stop)`` bool: rows of the span that are no padding."""
    inside = torch.arange(stop, device=device) >= start
    if visible is None:
        return inside.expand(batch, -1)
    return inside & visible[:, :stop].to(device)


def _extended(
    old: Grouped, teams: Teams | None, start: int, stop: int, seen: Tensor | None, config: SantaConfig
) -> Grouped:
    """The old records with one more grouped span; rows between the two stay an exact span."""
    between = ((old.stop, start),) if start > old.stop else ()
    if teams is not None:
        teams = _coded(teams, old.teams, config)
        if old.teams is not None:
            teams = join_teams(old.teams, teams)
    return Grouped(teams, stop, (*old.exact, *between), config.grouping, seen)


def _coded(teams: Teams, earlier: Teams | None, config: SantaConfig) -> Teams:
    """The teams with what routing reads in the configured representation, like ``earlier`` teams of the layer."""

    # what other methods keep in place of routing keys may be no keys at all
    routing_dtype = config.used().get("routing_dtype", "model")

    def coded(new: Teams | ParentRecords, old: Teams | ParentRecords | None, keys: str) -> tuple[RoutingKeys, ...]:
        held = None if old is None else getattr(old, keys)
        return quantise_parts(getattr(new, keys), routing_dtype, new.sizes > 0, held)

    parents = teams.parents
    if parents is not None:
        parents = replace(parents, keys=coded(parents, None if earlier is None else earlier.parents, "keys"))
    return replace(teams, routing_keys=coded(teams, earlier, "routing_keys"), parents=parents)
