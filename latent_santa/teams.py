"""Teams of rows around actual-key representatives (Algorithm 2), for all parents, groups and sequences at once.

The same algorithm in loops is :func:`latent_santa.naive.build_teams`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from .parent_records import ParentRecords
from .partition import Partition, renumbered, wide
from .routing_keys import PlainKeys, RoutingKeys
from .rows import Rows

# numbers in one piece of rows whose distances are formed at once
PIECE, PIECE_CUDA = 1 << 22, 1 << 26


@dataclass
class Room:
    """How far records with free room behind them are filled (:mod:`latent_santa.growth`); the host's side of it.

    Attributes:
        rows: cache rows grouped so far.
        teams, parents: the most that any sequence and group has so far.
        spans: parents that the room is for, and those filled in so far.
        parent_size, per_parent: the most rows and teams of one of them on average.
        even: whether no parent has more, as contiguous ones.
        bound: :attr:`Teams.row_bound` of what was there before.
        shared: whether somebody else keeps these records, so that nothing more may be written into them.
    """

    rows: int
    teams: int
    parents: int
    spans: int
    parent_size: int
    per_parent: int
    even: bool
    bound: list[int]
    filled: int = 0
    shared: bool = False


@dataclass(frozen=True)
class Teams:
    """Team records of one layer. M is the largest team count of any sequence and group; the rest is padding.

    Attributes:
        sizes: ``(B, G, M)`` int32, n_g; 0 marks a padding team.
        count: ``(B, G)`` int32, real teams.
        team_of_row: ``(B, G, N)`` int32, the row's team; -1 for a row in no team.
        representative: ``(B, G, M)`` int32, the representative's row; -1 for padding and for centroids.
        row_bound: for n = 1, ..., M the most rows that n teams of any one sequence and group hold, on the host, so that
            decoding can make room without a synchronisation.
        routing_keys: parts ``(B, G, M, D_i)``: frozen copies of the representatives' keys, or mean keys for centroid
            routing, in the cache's dtype or in integer codes; empty until they are copied from a cache.
        parents: what two-stage routing keeps of the parents, or None.
        room: how far the records are filled, where they have room for more teams and rows; else None.
    """

    sizes: Tensor
    count: Tensor
    team_of_row: Tensor
    representative: Tensor
    row_bound: list[int]
    routing_keys: tuple[RoutingKeys, ...] = ()
    parents: ParentRecords | None = None
    room: Room | None = None

    @property
    def length(self) -> int:
        """N, cache rows covered, padding rows and room included."""
        return self.team_of_row.shape[-1]

    @property
    def covered(self) -> int:
        """Cache rows covered, without room: no team has a row from here on."""
        return self.length if self.room is None else self.room.rows

    @property
    def M(self) -> int:
        """M, padding teams and room included."""
        return self.sizes.shape[-1]

    @property
    def most_teams(self) -> int:
        """The most real teams of any sequence and group, known on the host: M without room."""
        return self.M if self.room is None else self.room.teams

    @property
    def most_parents(self) -> int:
        """The most parents of any sequence and group for two stages, known on the host; 0 without their records."""
        if self.parents is None:
            return 0
        return self.parents.C if self.room is None else self.room.parents

    def most_rows(self, teams: int) -> int:
        """An upper bound, at most N, on the rows in any ``teams`` teams of one sequence and group, room included."""
        return self.row_bound[min(teams, len(self.row_bound)) - 1] if teams > 0 else 0

    def bytes(self) -> int:
        """Memory of the records beside the cache, in bytes."""
        tensors = (self.sizes, self.count, self.team_of_row, self.representative)
        held = sum(t.numel() * t.element_size() for t in tensors) + sum(part.bytes() for part in self.routing_keys)
        return held + (0 if self.parents is None else self.parents.bytes())

    def behind(self, rows: int) -> Teams:
        """The records with as many rows in no team before their first one."""
        if not rows:
            return self
        representative = torch.where(self.representative >= 0, self.representative + rows, -1)
        return replace(self, team_of_row=pad(self.team_of_row, (rows, 0), value=-1), representative=representative)

    def split(self, parts: int) -> list[Teams]:
        """Records of ``parts`` equal stretches of the batch, as views."""
        size = self.count.shape[0] // parts
        cut: list[tuple[Tensor, ...]] = []  # every tensor, in the order of _mapped

        def keep(tensor: Tensor) -> Tensor:
            cut.append(tensor.split(size))
            return tensor

        self._mapped(keep)

        def part(stretch: tuple[Tensor, ...]) -> Teams:
            pieces = iter(stretch)
            return self._mapped(lambda _: next(pieces))

        return [part(stretch) for stretch in zip(*cut, strict=True)]

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Teams:
        """The records with ``change`` applied to every tensor's batch."""
        return Teams(
            sizes=change(self.sizes),
            count=change(self.count),
            team_of_row=change(self.team_of_row),
            representative=change(self.representative),
            row_bound=self.row_bound,
            routing_keys=tuple(part.mapped(change) for part in self.routing_keys),
            parents=None if self.parents is None else self.parents.mapped(change),
            room=None if self.room is None else replace(self.room),
        )

    def select_batch(self, index: Tensor) -> Teams:
        """Records of the sequences ``index (B',)``, for beam reordering, repetition and selection."""

        def pick(t: Tensor) -> Tensor:
            return t.index_select(0, index.to(t.device))

        return self._mapped(pick)


def build_teams(points: Tensor, parents: Tensor, representatives: int, bound: int | None = None) -> Teams:
    """Algorithm 2: teams of a parent partition, numbered parent after parent in the order of their representatives.

    Sequences of several layers may stand in one batch. The teams' l_g are rows here; :func:`freeze_representatives`
    copies the keys.

    Args:
        points: ``(B, G, N, D)``, what distances are measured on: content latents in MLA, rotated keys in GQA, as
            cached, without normalisation.
        parents: ``(B, G, N)`` int64, -1 for padding rows.
        representatives: R.
        bound: a number that no parent reaches, where the host knows one: M is then what so many parents can have, and
            nothing here waits for the device.
    """
    batch, groups, length = parents.shape
    flat = parents.flatten(0, 1)
    b, is_representative = assign_rows(points.flatten(0, 1), flat, representatives, bound)
    # lines 15-17: team u of parent C holds the rows of C with b_i = u; parent after parent, empty ones have no rows
    r = min(representatives, points.shape[2])
    known = None if bound is None else bound * r
    team, count = renumbered(torch.where(flat >= 0, flat * r + b, -1), known)
    team, count = team.view(batch, groups, length), count.view(batch, groups)
    most = _most(count) if known is None else known
    place = torch.where(is_representative.view(batch, groups, length), team, most)
    spare = torch.full((batch, groups, most + 1), -1, dtype=torch.int64, device=parents.device)
    index = torch.arange(length, device=parents.device).expand(batch, groups, length)
    return _records(team, count, most, spare.scatter_(2, place, index)[..., :-1].int(), waits=known is None)


def assign_rows(
    points: Tensor, parents: Tensor, representatives: int, bound: int | None = None
) -> tuple[Tensor, Tensor]:
    """Algorithm 2, lines 4-14, on every parent C of every partition at once.

    The loops of lines 7 and 11 are one here: as soon as j_u is chosen, every row compares it with the nearest of
    j_1, ..., j_{u-1}. Line 8 needs that distance anyway, and it is line 12's minimum so far.

    Args:
        points: ``(Q, N, D)``, k^pre.
        parents: ``(Q, N)`` int64, -1 for rows that take no part.
        representatives: R.
        bound: a number that no parent reaches, where the host knows one.

    Returns:
        ``b (Q, N)`` int64, the place u - 1 of the representative that owns a row (-1 without a parent), and
        ``(Q, N)`` bool, rows that are representatives.
    """
    groups = Partition(parents, bound)
    rows = points.shape[1]
    most = min(representatives, rows)  # r = min(R, |C|) can be no larger
    mu = groups.mean(points)  # line 5
    from_mu = _squared_distances(points, mu, groups.slot.clamp_max(max(groups.slots - 1, 0)))
    # two rows are equally far from their mean; rounding must not break that tie
    from_mu = from_mu.masked_fill(groups.sizes[groups.slot] == 2, 0.0)
    j_u = groups.first_extreme(from_mu, groups.member, largest=False)  # line 6
    in_L = torch.zeros_like(groups.member)
    b = torch.where(groups.member, 0, -1)
    nearest = torch.full_like(from_mu, torch.inf)  # a row's distance to the nearest of L
    for u in range(most):
        found = (j_u < rows)[groups.slot] & groups.member  # false once u exceeds r = min(R, |C|)
        row = j_u[groups.slot].clamp_max(rows - 1)
        distance = _squared_distances(points, points, row)
        # lines 11-13; a strict comparison leaves ties with the representative chosen earlier
        closer = found & (distance < nearest)
        b = torch.where(closer, u, b)
        nearest = torch.where(closer, distance, nearest)
        is_j_u = found & (row == torch.arange(rows, device=row.device))
        in_L = in_L | is_j_u
        b = torch.where(is_j_u, u, b)  # line 14: a representative owns its row, whatever duplicates it has
        if u + 1 < most:
            j_u = groups.first_extreme(nearest, groups.member & ~in_L, largest=True)  # line 8
    return b, in_L


def freeze_representatives(teams: Teams, rows: Rows) -> Teams:
    """The teams with l_g, the representatives' keys, copied out of the prefill cache; padding teams get row 0's."""
    index = teams.representative.long().clamp_min(0)[..., None]
    keys = tuple(PlainKeys(part.gather(2, index.expand(-1, -1, -1, part.shape[-1]))) for part in rows.keys)
    return replace(teams, routing_keys=keys)


def build_centroids(rows: Rows, parents: Tensor, bound: int | None = None) -> Teams:
    """Clusters routed by their mean key (Appendix B.2): every parent is one group, all of its rows members.

    ``bound`` as in :func:`build_teams`.
    """
    batch, groups, length = parents.shape
    team, count = renumbered(parents.flatten(0, 1), bound)
    cluster = Partition(team, bound)
    means = []
    for part in rows.keys:
        mean = cluster.mean(part.flatten(0, 1).float())[: cluster.slots]
        means.append(PlainKeys(mean.nan_to_num().view(batch, groups, -1, part.shape[-1]).to(part.dtype)))
    team, count = team.view(batch, groups, length), count.view(batch, groups)
    most = _most(count) if bound is None else bound
    none = torch.full((batch, groups, most), -1, dtype=torch.int32, device=team.device)
    return _records(team, count, most, none, tuple(means), waits=bound is None)


def join_teams(first: Teams, second: Teams) -> Teams:
    """Records of two disjoint sets of rows as one; ``second`` covers at least the rows that ``first`` covers.

    Its teams are numbered after the first ones without a gap, whatever padding teams either carries; room that
    ``first`` has is cut off.
    """
    old = pad(first.team_of_row, (0, second.length - first.length), value=-1).long()
    new = second.team_of_row.long()
    offset, count = first.count.long()[..., None], first.count + second.count
    most = _most(count)
    place = torch.where(second.sizes > 0, torch.arange(second.M, device=new.device) + offset, most)

    def merge(a: Tensor, b: Tensor, unused: int = 0) -> Tensor:
        out = pad(a, (0, 0, 0, most + 1 - a.shape[2]), value=unused)
        return out.scatter_(2, place[..., None].expand_as(b), b)[:, :, :-1]

    team = torch.where(old >= 0, old, torch.where(new >= 0, new + offset, -1))
    representative = merge(first.representative[..., None], second.representative[..., None], -1)[..., 0]
    pairs = zip(first.routing_keys, second.routing_keys, strict=True)
    joined = _records(team, count, most, representative, tuple(one.merged(two, merge) for one, two in pairs))
    if first.parents is None or second.parents is None:
        return joined
    return replace(joined, parents=first.parents.joined(second.parents, offset, most))


def _most(count: Tensor) -> int:
    """M of records with ``count (B, G)`` teams."""
    return max(int(count.max()), 1)


def _records(
    team: Tensor,
    count: Tensor,
    most: int,
    representative: Tensor,
    keys: tuple[RoutingKeys, ...] = (),
    waits: bool = True,
) -> Teams:
    """Records of the numbered teams ``(B, G, N)`` int64, of which a sequence and group has at most ``most``.

    ``waits`` for the device, to find the tightest ``row_bound``; else any team might hold all rows.
    """
    sizes = torch.zeros(*count.shape, most + 1, dtype=torch.int64, device=team.device)
    sizes.scatter_add_(2, torch.where(team >= 0, team, most), torch.ones_like(team))
    sizes = sizes[..., :most]
    row_bound = [team.shape[-1]] * most
    if waits:
        row_bound = sizes.sort(-1, descending=True).values.cumsum(-1).flatten(0, 1).amax(0).tolist()
    return Teams(sizes.int(), count.int(), team.int(), representative, row_bound, keys)


def _squared_distances(points: Tensor, centers: Tensor, index: Tensor) -> Tensor:
    """Squared Euclidean distance of each row to one center, ``(Q, N)`` in the precision of ``wide``.

    Direct differences, which lose nothing to cancellation, in pieces that bound the memory.

    Args:
        points: ``(Q, N, D)``.
        centers: ``(Q, C, D)``, or ``(C, D)`` shared by all partitions.
        index: ``(Q, N)`` int64, each row's center.
    """
    numbers = PIECE_CUDA if points.is_cuda else PIECE
    step = max(1, numbers // (points.shape[0] * points.shape[2]))
    pieces = []
    for start in range(0, points.shape[1], step):
        rows, wanted = points[:, start : start + step], index[:, start : start + step]
        if centers.dim() == 2:
            own = centers[wanted]
        else:
            own = centers.gather(1, wanted[..., None].expand(-1, -1, centers.shape[-1]))
        pieces.append((wide(rows) - wide(own)).square_().sum(-1))
    return torch.cat(pieces, 1)
