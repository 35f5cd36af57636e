"""Team records with room behind them, into which teams of generated rows are written in place.

A join of records makes new tensors, which is right for a further turn. While a model generates, a parent of P rows
fills up every P steps, and what was captured with the records' addresses and shapes would have to be captured again.
So records get room for many parents at once, whose shapes are then the records' shapes; the room is padding, of size 0,
that no draw can select. A team keeps its number, and with it its noise, whether or not there is room behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .teams import Room, Teams

Write = Callable[[Tensor, Tensor], Any]


def with_room(teams: Teams, spans: int, parent_size: int, per_parent: int, even: bool = True) -> Teams:
    """A copy of the records with room for so many more parents; room that they had is filled or given up.

    Args:
        teams: the records; they stay as they are.
        spans: parents that there is to be room for.
        parent_size: P, rows of one on average.
        per_parent: the most teams of one, R.
        even: whether P is also the most rows of one: true of contiguous parents.
    """
    old = teams.room
    count = 0 if teams.parents is None else teams.parents.C if old is None else old.parents
    bound = teams.row_bound
    if old is not None:
        bound = joined_bound(old.bound, old.filled, old.parent_size, old.per_parent, old.even)
    room = Room(teams.covered, teams.most_teams, count, spans, parent_size, per_parent, even, bound)
    rows, M = room.rows + spans * parent_size, room.teams + spans * per_parent

    def flat(tensor: Tensor, size: int, unused: int) -> Tensor:
        # a negative amount cuts old room off; contiguous, because pad then returns a view
        return pad(tensor, (0, size - tensor.shape[2]), value=unused).contiguous()

    def along(size: int) -> Callable[[Tensor], Tensor]:
        return lambda tensor: pad(tensor, (0, 0, 0, size - tensor.shape[2])).contiguous()

    parents = teams.parents
    if parents is not None:
        C = count + spans
        parents = replace(
            parents,
            sizes=flat(parents.sizes, C, 0),
            count=parents.count.clone(),
            of_team=flat(parents.of_team, M, -1),
            most_teams=max(parents.most_teams, per_parent),
            keys=tuple(part.resized(along(C)) for part in parents.keys),
            spread=tuple((along(C) if part.dim() == 4 else lambda t: flat(t, C, 0))(part) for part in parents.spread),
        )
    return Teams(
        sizes=flat(teams.sizes, M, 0),
        count=teams.count.clone(),
        team_of_row=flat(teams.team_of_row, rows, -1),
        representative=flat(teams.representative, M, -1),
        row_bound=joined_bound(bound, spans, parent_size, per_parent, even),
        routing_keys=tuple(part.resized(along(M)) for part in teams.routing_keys),
        parents=parents,
        room=room,
    )


def has_room(teams: Teams, spans: int) -> bool:
    """Whether teams of so many more parents may be written into the records."""
    room = teams.room
    return room is not None and not room.shared and room.filled + spans <= room.spans


@torch.inference_mode()
def append_(records: Sequence[Teams], new: Sequence[Teams], start: int, spans: int) -> None:
    """Write the teams of ``spans`` parents into the room of several layers' records, without waiting for the device.

    They are numbered after the teams that each sequence and group has, which padding may make fewer in one than in
    another; so where they go is found on the device, for all layers at once, because launches are what it costs.

    Args:
        records: of each layer, ``(B, G)`` alike; :func:`has_room` for the teams in each.
        new: each layer's teams of the cache rows from ``start`` on, M no more than so many parents can have.
        start: the first of these rows, which is behind every row grouped so far.
    """
    count, width, length = torch.stack([teams.count for teams in records]), new[0].M, new[0].length
    place = count.long()[..., None] + torch.arange(width, device=count.device)
    own = torch.stack([teams.team_of_row for teams in new])
    teams_of_rows = torch.where(own >= 0, own + count[..., None], -1)
    representative = torch.stack([teams.representative for teams in new])
    representative = torch.where(representative >= 0, representative + start, -1)
    writers = _writers(place)
    parts = zip(records, new, writers, teams_of_rows.unbind(), representative.unbind(), strict=True)
    for teams, later, write, owners, rows in parts:
        room = teams.room
        assert room is not None and has_room(teams, spans) and start >= room.rows
        assert later.M == width <= spans * room.per_parent and start + length <= teams.length
        teams.team_of_row[..., start : start + length] = owners
        write(teams.sizes, later.sizes)
        write(teams.representative, rows)
        for part, more in zip(teams.routing_keys, later.routing_keys, strict=True):
            part.write_(more, write)
        room.rows, room.teams, room.filled = start + length, room.teams + width, room.filled + spans
    if records[0].parents is not None:
        _append_parents(records, new, writers)
    torch._foreach_add_([teams.count for teams in records], [teams.count for teams in new])


def _append_parents(records: Sequence[Teams], new: Sequence[Teams], write_teams: list[Write]) -> None:
    pairs = [(old.parents, later.parents) for old, later in zip(records, new, strict=True)]
    known = [(old, later) for old, later in pairs if old is not None and later is not None]
    assert len(known) == len(pairs)
    count, width = torch.stack([old.count for old, _ in known]), known[0][1].C
    place = count.long()[..., None] + torch.arange(width, device=count.device)
    of_team = torch.stack([later.of_team for _, later in known])
    of_team = torch.where(of_team >= 0, of_team + count[..., None], -1)
    parts = zip(records, known, _writers(place), write_teams, of_team.unbind(), strict=True)
    for teams, (old, later), write, write_team, owners in parts:
        write_team(old.of_team, owners)
        write(old.sizes, later.sizes)
        for part, more in zip(old.keys, later.keys, strict=True):
            part.write_(more, write)
        for spread, other in zip(old.spread, later.spread, strict=True):
            write(spread, other)
        room = teams.room
        assert room is not None
        room.parents += width
    torch._foreach_add_([old.count for old, _ in known], [later.count for _, later in known])


def _writers(places: Tensor) -> list[Write]:
    """What writes a layer's teams at its ``places (layers, B, G, M)``; padding teams land behind, where room is."""

    def writer(place: Tensor, wide: Tensor) -> Write:
        return lambda into, new: into.scatter_(2, place if new.dim() == 3 else wide.expand_as(new), new)

    return [writer(*both) for both in zip(places.unbind(), places[..., None].unbind(), strict=True)]


# the last one made: layers that were built together share their list, which is long
_made: tuple[list[int], tuple[int, int, int, bool], list[int]] = ([], (0, 0, 0, True), [])


def joined_bound(bound: list[int], parents: int, parent_size: int, per_parent: int, even: bool = True) -> list[int]:
    """The most rows that n = 1, 2, ... teams hold, of teams bounded by ``bound`` and of the parents' teams.

    One team of an even parent holds at most P - R + 1 of its P rows, since the other R - 1 have a row each, and every
    further one then a row more; one team of other parents may hold all of their rows. The largest increments of both
    bounds come first; a bound that grew in another order is not exceeded by them.
    """
    global _made
    if not parents:
        return bound
    asked, kept = (parents, parent_size, per_parent, even), _made
    if kept[0] is bound and kept[1] == asked:
        return kept[2]
    more = [b - a for a, b in zip([0, *bound], bound, strict=False)]
    if even:
        more += [parent_size - per_parent + 1] * parents + [1] * (parents * (per_parent - 1))
    else:
        more += [parents * parent_size] + [0] * (parents * per_parent - 1)
    total, found = 0, []
    for rows in sorted(more, reverse=True):
        total += rows
        found.append(total)
    _made = (bound, asked, found)
    return found
