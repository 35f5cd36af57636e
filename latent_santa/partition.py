"""Reductions over the groups of many partitions at once, and their numbering."""

from __future__ import annotations

import torch
from torch import Tensor


class Partition:
    """Reductions over the groups (parents or teams) of Q partitions, whose numbers run through the batch.

    Args:
        parents: ``(Q, N)`` int64, each row's group, -1 for rows in none.
        bound: a number that no group reaches, where the host knows one: then nothing here waits for the device.
    """

    def __init__(self, parents: Tensor, bound: int | None = None) -> None:
        self.member, self._waits = parents >= 0, bound is None
        # where no row has a group, one stands in
        width = bound if bound is not None else max(int(parents.max()) + 1, 1) if parents.numel() else 0
        offset = torch.arange(parents.shape[0], device=parents.device)[:, None] * width
        self.slots = parents.shape[0] * width
        self.slot = torch.where(self.member, parents + offset, self.slots)  # one dump slot for rows without a parent
        self.sizes = torch.zeros(self.slots + 1, dtype=torch.int64, device=parents.device)
        self.sizes.scatter_add_(0, self.slot.flatten(), self.member.flatten().long())

    def mean(self, points: Tensor) -> Tensor:
        """Each group's mean point, ``(slots + 1, D)``, summed in token order so that no batch changes it."""
        order = torch.argsort(self.slot.flatten(), stable=True)
        sizes = self.sizes.clone()
        if self._waits:
            order = order[: int(sizes.sum())]
        else:
            sizes[-1] = order.numel() - sizes.sum()  # rows in no group are summed too, in the last slot
        return torch.segment_reduce(wide(points.flatten(0, 1)[order]), "mean", lengths=sizes, axis=0, unsafe=True)

    def first_extreme(self, value: Tensor, allowed: Tensor, largest: bool) -> Tensor:
        """Each group's row of extreme value among the allowed, the lowest index on ties; N where none is allowed."""
        rows = value.shape[1]
        worst = torch.full_like(value, -torch.inf if largest else torch.inf)
        value = torch.where(allowed, value, worst)
        best = value.new_full((self.slots + 1,), -torch.inf if largest else torch.inf)
        best.scatter_reduce_(0, self.slot.flatten(), value.flatten(), "amax" if largest else "amin")
        index = torch.arange(rows, device=value.device).expand_as(value)
        index = torch.where(allowed & (value == best[self.slot]), index, rows)
        first = index.new_full((self.slots + 1,), rows)
        return first.scatter_reduce_(0, self.slot.flatten(), index.flatten(), "amin")


def renumbered(label: Tensor, bound: int | None = None) -> tuple[Tensor, Tensor]:
    """Replace each partition's labels ``(Q, N)`` by 0, 1, ... in rising order; also return how many, ``(Q,)``.

    ``bound`` is a number that no label reaches, where the host knows one.
    """
    width = int(label.max()) + 1 if bound is None else bound
    used = torch.zeros(label.shape[0], width + 1, dtype=torch.int64, device=label.device)
    used.scatter_(1, torch.where(label >= 0, label, width), 1)
    used[:, width] = 0
    number = used.cumsum(1) - 1
    return torch.where(label >= 0, number.gather(1, label.clamp_min(0)), -1), used.sum(1)


def wide(points: Tensor) -> Tensor:
    """Points in the precision of distances: float64 if they have it, else float32."""
    return points if points.dtype == torch.float64 else points.float()
