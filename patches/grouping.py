"""Grouping of cached rows: parents, teams and frozen representatives for every layer of a cache at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from latent_santa.config import SantaConfig
from latent_santa.methods import METHODS
from latent_santa.parent_records import ParentRecords
from latent_santa.probes import fingerprints
from latent_santa.prompt_queries import PromptQueries
from latent_santa.routing_keys import RoutingKeys, quantise_parts
from latent_santa.rows import Rows
from latent_santa.teams import Teams, join_teams

from .cache_layer import TeamLayer
from .families import Adapter
from .layer_state import Grouped, mask_of

T = TypeVar("T")


def group_waiting(
    layers: Sequence[TeamLayer], adapters: Sequence[Adapter], visible: Tensor | None, config: SantaConfig
) -> None:
    """Group the rows that wait in each layer, and drop teams that other settings made.

    Layers of one device are clustered together, so that the k-means engine sees large batches. Layers without rows (an
    early exit leaves them out) have nothing to group. Rows that the settings keep exact stay out of the teams; the
    first grouping of a cache covers one row at least.

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
    first, last = (getattr(config, name) if name in method.settings else 0 for name in ("exact_first", "exact_last"))
    for (_, (start, end)), numbers in jobs.items():
        waiting, theirs = [layers[n] for n in numbers], [adapters[n] for n in numbers]
        stop = end - last
        if stop <= start:
            if waiting[0].grouped.teams is not None:  # a short turn stays in the suffix
                for layer in waiting:
                    layer.waiting = None
                continue
            stop = start + 1
        seen = mask_of(visible, stop)
        new = Grouped(None, stop, (), grouping, seen)
        if method.window:
            _, rows, member = span_of(waiting, theirs, visible, 0, stop)
            member = member & (torch.arange(stop, device=member.device) >= start)
            asked = (_queries(layers[n], adapters[n], start, stop, visible, config) for n in numbers)
            records: Iterable[Teams | None] = method.build_by_queries(asked, rows, member, config)
        else:
            points, rows, member = span_of(waiting, theirs, visible, start, stop)
            early = member & _early(visible, member, start, first)
            member = member & ~early
            spans, mixed = _apart(early, member, start)
            new = replace(new, exact=spans, mixed=mixed)
            if method.parents(config) == "probes":
                # the prompt's last queries, also where its last rows stay out of the teams
                queries = [_queries(layers[n], adapters[n], start, end, visible, config) for n in numbers]
                pairs = zip(queries, rows, strict=True)
                rows = [replace(own, fingerprints=fingerprints(last, own, member)) for last, own in pairs]
            records = method.build(points, rows, member, config)
        for n, teams in zip(numbers, records, strict=True):
            if teams is not None:
                teams = agreed(teams, adapters[n], teams.sizes.device)
            layers[n].grouped = _extended(layers[n].grouped, new, teams, start, config)
            layers[n].waiting = layers[n].coming = None


@torch.no_grad()
def _queries(
    layer: TeamLayer, adapter: Adapter, start: int, stop: int, visible: Tensor | None, config: SantaConfig
) -> PromptQueries:
    """The queries of the last tokens of the span, in the rows' own coordinates.

    Raises:
        NotImplementedError: the cache does not hold them.
    """
    held, wanted = layer.observed, min(METHODS[config.method].queries(config), stop - start)
    if held is None or held.stop != stop or held.states.shape[2] < wanted:
        clusters = METHODS[config.method].parents(config) == "probes"
        what = 'parents="probes" clusters' if clusters else f"method {config.method!r} chooses"
        raise NotImplementedError(
            f"{what} rows by the queries of the prompt's last tokens, and this cache came without those of rows "
            f"{stop - wanted} to {stop}: it was filled under other settings or no patch, or has an answer behind the "
            "prompt. Fill a new cache under these settings, or use santa.prefill, which keeps them"
        )
    states = held.states[:, :, -wanted:]
    parts = adapter.query(states.transpose(1, 2).flatten(0, 1)[:, :, None])
    batch = states.shape[0]
    if visible is None:
        visible = torch.ones(batch, stop, dtype=torch.bool, device=states.device)
    folded = tuple(part.unflatten(0, (batch, wanted)).movedim(1, 3) for part in parts)
    others = adapter.peers if adapter.groups_apart else None
    if adapter.peers is not None and others is None:
        folded = tuple(adapter.peers.joined(part, 2) for part in folded)
    return PromptQueries(folded, held.scale, visible[:, :stop].to(states.device), others)


def span_of(
    layers: Sequence[TeamLayer],
    adapters: Sequence[Adapter],
    visible: Tensor | None,
    start: int,
    stop: int,
    copied: bool = False,
) -> tuple[list[Tensor], list[Rows], Tensor]:
    """A span of rows of several layers on one device: points, rows, and ``(B, n)`` bool, which are no padding.

    They are views of the cache, or, to be held while it moves on, ``copied``.
    """
    points, rows = [], []
    for adapter, layer in zip(adapters, layers, strict=True):
        keys, values = layer.keys[:, :, start:stop], layer.values[:, :, start:stop]
        if copied:
            keys, values = keys.clone(), values.clone()
        points.append(adapter.points(keys))
        rows.append(adapter.rows(keys, values))
    first = layers[0].keys
    if visible is None:
        member = torch.ones(first.shape[0], stop - start, dtype=torch.bool, device=first.device)
    else:
        member = visible[:, start:stop].to(first.device)
    return points, rows, member


def agreed(records: T, adapter: Adapter, device: torch.device) -> T:
    """The same records in all processes that hold the same rows: rounding could make other teams of them."""
    if adapter.peers is None or adapter.groups_apart:
        return records
    return adapter.peers.firsts(records, device)


def _early(visible: Tensor | None, member: Tensor, start: int, first: int) -> Tensor:
    """Which rows of the span of ``member (B, n)`` are no later than the ``first`` real ones of their sequences."""
    if visible is None:
        return torch.arange(start, start + member.shape[1], device=member.device) < first
    stop = start + member.shape[1]
    return visible[:, :stop].to(member.device).cumsum(1)[:, start:] <= first


def _apart(exact: Tensor, member: Tensor, start: int) -> tuple[tuple[tuple[int, int], ...], bool]:
    """Spans of the rows ``exact (B, n)`` of any sequence, from ``start`` on; whether another has members there."""
    any_exact = exact.any(0)
    edges = torch.nn.functional.pad(any_exact.int(), (1, 1)).diff().nonzero()[:, 0] + start
    places = edges.tolist()
    return tuple(zip(places[::2], places[1::2], strict=True)), bool((member & any_exact).any())


def _extended(old: Grouped, new: Grouped, teams: Teams | None, start: int, config: SantaConfig) -> Grouped:
    """The old records with a new span, which ``teams`` were made of; rows between the two stay an exact span."""
    between = ((old.stop, start),) if start > old.stop else ()
    if teams is not None:
        teams = coded_like(teams, old.teams, config).behind(new.stop - teams.length)
        if old.teams is not None:
            teams = join_teams(old.teams, teams)
    return replace(new, teams=teams, exact=(*old.exact, *between, *new.exact), mixed=old.mixed or new.mixed)


def coded_like(teams: Teams, earlier: Teams | None, config: SantaConfig) -> Teams:
    """The teams with what routing reads in the configured representation, like ``earlier`` teams of the layer."""
    # what other methods keep instead of routing keys may be no keys at all
    routing_dtype = config.used().get("routing_dtype", "model")
    if routing_dtype == "model":
        return teams

    def coded(new: Teams | ParentRecords, old: Teams | ParentRecords | None, keys: str) -> tuple[RoutingKeys, ...]:
        held = None if old is None else getattr(old, keys)
        return quantise_parts(getattr(new, keys), routing_dtype, new.sizes > 0, held)

    parents = teams.parents
    if parents is not None:
        parents = replace(parents, keys=coded(parents, None if earlier is None else earlier.parents, "keys"))
    return replace(teams, routing_keys=coded(teams, earlier, "routing_keys"), parents=parents)
