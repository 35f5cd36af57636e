"""What two-stage routing keeps of a prompt's parents: one vector each, and which teams are theirs.

A summary stands for a parent the way a representative stands for a team: routing scores it, and any function of it that
is fixed before the draw leaves the estimator unbiased (:mod:`latent_santa.two_stage`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from .partition import Partition, renumbered
from .routing_keys import PlainKeys, RoutingKeys, key_scores
from .rows import Rows, scores

if TYPE_CHECKING:
    from .teams import Teams


@dataclass(frozen=True)
class ParentRecords:
    """Parents of one layer. C is the largest number of any sequence and group; the rest is padding.

    Attributes:
        summary: what stands for a parent: ``"mean"``, ``"isotropic"`` or ``"diagonal"``.
        sizes: ``(B, G, C)`` int32, n_p; 0 marks a padding parent.
        count: ``(B, G)`` int32, real parents.
        of_team: ``(B, G, M)`` int32, the team's parent; -1 for padding teams.
        most_teams: the most teams that any one parent has, on the host.
        keys: parts ``(B, G, C, D_i)``, the mean mu_p of the parent's keys, in the cache's dtype or in integer codes.
        spread: per key part how the parent's keys lie around mu_p: nothing for ``"mean"``, the mean squared distance
            ``(B, G, C)`` float32 for ``"isotropic"``, the variances ``(B, G, C, D_i)`` in the cache's dtype for
            ``"diagonal"``.
    """

    summary: str
    sizes: Tensor
    count: Tensor
    of_team: Tensor
    most_teams: int
    keys: tuple[RoutingKeys, ...]
    spread: tuple[Tensor, ...] = ()

    @property
    def C(self) -> int:
        """C, padding parents included."""
        return self.sizes.shape[-1]

    @property
    def vectors(self) -> int:
        """Vectors that scoring one parent reads; the single number of ``"isotropic"`` is not counted as one."""
        return 2 if self.summary == "diagonal" else 1

    def bytes(self) -> int:
        """Memory of the records, in bytes."""
        tensors = (self.sizes, self.count, self.of_team, *self.spread)
        return sum(t.numel() * t.element_size() for t in tensors) + sum(part.bytes() for part in self.keys)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> ParentRecords:
        """The records with ``change`` applied to every tensor's batch."""
        return replace(
            self,
            sizes=change(self.sizes),
            count=change(self.count),
            of_team=change(self.of_team),
            keys=tuple(part.mapped(change) for part in self.keys),
            spread=tuple(map(change, self.spread)),
        )

    def joined(self, later: ParentRecords, team_offset: Tensor, teams: int) -> ParentRecords:
        """These parents and a later turn's as one record, numbered without a gap.

        Args:
            team_offset: ``(B, G, 1)`` int64, what is added to the number of a later team.
            teams: M of all teams together.
        """
        offset, count = self.count.long()[..., None], self.count + later.count
        most = max(int(count.max()), 1)
        place = torch.where(later.sizes > 0, torch.arange(later.C, device=offset.device) + offset, most)

        def merge(a: Tensor, b: Tensor) -> Tensor:
            out = pad(a, (0, 0, 0, most + 1 - a.shape[2]))
            return out.scatter_(2, place[..., None].expand_as(b), b)[:, :, :-1]

        def merge_flat(a: Tensor, b: Tensor) -> Tensor:
            return merge(a[..., None], b[..., None])[..., 0]

        of_team = pad(self.of_team, (0, teams + 1 - self.of_team.shape[2]), value=-1)
        owned = torch.arange(later.of_team.shape[2], device=offset.device) + team_offset
        owned = torch.where(later.of_team >= 0, owned, teams)
        of_team = of_team.scatter_(2, owned, (later.of_team + offset).int())[..., :-1]
        return replace(
            self,
            sizes=merge_flat(self.sizes, later.sizes),
            count=count,
            of_team=of_team,
            most_teams=max(self.most_teams, later.most_teams),
            keys=tuple(one.merged(two, merge) for one, two in zip(self.keys, later.keys, strict=True)),
            spread=tuple(
                (merge if a.dim() == 4 else merge_flat)(a, b) for a, b in zip(self.spread, later.spread, strict=True)
            ),
        )

    def routing_scores(self, query: tuple[Tensor, ...], scale: float) -> Tensor:
        """phi_p = log n_p + s(q, mu_p) + delta_p, -inf for padding parents: an estimate of the parent's log mass.

        A Gaussian around mu_p would have the log mean of e^s at s(q, mu_p) plus half the variance of s; delta is that
        half, with equal variances in all dimensions (``"isotropic"``) or each dimension's own (``"diagonal"``).

        Returns:
            ``(B, G, H, C)`` float32, or float64 where the query is.
        """
        phi = key_scores(query, self.keys, scale)
        squares = tuple(part * part for part in query)
        if self.summary == "isotropic":
            for square, spread in zip(squares, self.spread, strict=True):
                norm = square.sum(-1, keepdim=True).to(phi.dtype)
                phi = phi + scale**2 / (2 * square.shape[-1]) * norm * spread[:, :, None].to(phi.dtype)
        elif self.summary == "diagonal":
            phi = phi + scores(squares, (part.float() for part in self.spread), scale**2 / 2)
        phi = phi + self.sizes.clamp_min(1).to(phi.dtype).log()[:, :, None]
        return phi.masked_fill((self.sizes == 0)[:, :, None], -torch.inf)


def summarised(
    teams: Teams, parents: Tensor, rows: Rows, summary: str, bound: int | None = None, most_teams: int = 0
) -> ParentRecords:
    """Records of the parents that ``teams`` were formed in.

    Args:
        teams: the team records.
        parents: ``(B, G, N)`` int64, each row's parent, -1 for rows that take no part.
        rows: the prefill cache, N rows.
        summary: ``"mean"``, ``"isotropic"`` or ``"diagonal"``.
        bound, most_teams: numbers of parents, and of one parent's teams, that the host knows not to be exceeded: then
            nothing here waits for the device.
    """
    batch, groups, length = parents.shape
    flat, count = renumbered(parents.flatten(0, 1), bound)  # k-means leaves some numbers out
    part = Partition(flat, bound)
    most = part.slots // flat.shape[0]
    place = torch.where(teams.team_of_row >= 0, teams.team_of_row.long(), teams.M)
    of_team = torch.full((batch, groups, teams.M + 1), -1, dtype=torch.int64, device=parents.device)
    of_team = of_team.scatter_(2, place, flat.view(batch, groups, length))[..., :-1]
    if bound is None:
        owners = torch.where(of_team >= 0, of_team, most)
        teams_of = torch.zeros(batch, groups, most + 1, dtype=torch.int64, device=parents.device)
        most_teams = int(teams_of.scatter_add_(2, owners, torch.ones_like(owners))[..., :most].max())

    def per_parent(values: Tensor) -> Tensor:
        return part.mean(values)[: part.slots].nan_to_num()

    keys, spread = [], []
    for key in rows.keys:
        points = key.flatten(0, 1)
        mean = per_parent(points)
        shape = (batch, groups, most)
        keys.append(PlainKeys(mean.view(*shape, -1).to(key.dtype)))
        if summary != "mean":
            centre = mean[part.slot.clamp_max(part.slots - 1)]
            square = (points.to(mean.dtype) - centre).square_()
            if summary == "isotropic":
                spread.append(per_parent(square.sum(-1, keepdim=True)).view(shape).float())
            else:
                spread.append(per_parent(square).view(*shape, -1).to(key.dtype))
    return ParentRecords(
        summary,
        sizes=part.sizes[: part.slots].view(batch, groups, most).int(),
        count=count.view(batch, groups).int(),
        of_team=of_team.int(),
        most_teams=most_teams,
        keys=tuple(keys),
        spread=tuple(spread),
    )
