"""What a cache layer knows beside its rows: how they were grouped, and its prompt's last queries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from latent_santa.teams import Teams


@dataclass(frozen=True)
class Grouped:
    """What is known about the grouped rows of a cache layer.

    Attributes:
        teams: records of all grouped rows, or None when nothing is grouped.
        stop: rows below it are grouped, padding or listed in ``exact``; rows from it on are the open suffix.
        exact: spans of rows in no team: between the prompts of several turns, and a sequence's first ones.
        grouping: the settings that the teams were built under (:attr:`SantaConfig.grouping`).
        seen: ``(B, stop)`` bool, the padding mask that the rows were grouped under, or None when all were real.
        mixed: whether some sequence has a row of ``exact`` in a team: padding moves first rows apart.
    """

    teams: Teams | None = None
    stop: int = 0
    exact: tuple[tuple[int, int], ...] = ()
    grouping: tuple[Any, ...] | None = None
    seen: Tensor | None = None
    mixed: bool = False

    def attended(self, index: Tensor, visible: Tensor | None) -> Tensor | None:
        """Which of the suffix rows ``index (E,)`` each sequence attends exactly: ``(B, E)`` bool, or None for all.

        Args:
            visible: ``(B, L)`` bool over all rows, False for padding, or None when all are real.
        """
        if visible is None:
            return None
        if not self.mixed:
            return visible[:, index]
        assert self.teams is not None
        owner = self.teams.team_of_row[:, 0]
        teamless = owner[:, index.clamp_max(owner.shape[1] - 1)] < 0
        return visible[:, index] & (teamless | (index >= owner.shape[1]))

    def hides(self, visible: Tensor | None) -> bool:
        """Whether ``visible (B, L)``, a later call's mask, shows grouped rows otherwise than when they were grouped.

        With a mask this waits for the device, once per call.
        """
        if visible is None and self.seen is None:
            return False
        if visible is None or self.seen is None:
            mask = self.seen if visible is None else visible[:, : self.stop]
            assert mask is not None
            return not bool(mask.all())
        return not torch.equal(visible[:, : self.stop].to(self.seen.device), self.seen)

    def followed(self, index: Tensor) -> Grouped:
        """The records of the sequences ``index (B',)``."""
        teams = None if self.teams is None else self.teams.select_batch(index)
        seen = None if self.seen is None else self.seen.index_select(0, index.to(self.seen.device))
        return replace(self, teams=teams, seen=seen)


def mask_of(visible: Tensor | None, stop: int) -> Tensor | None:
    """The mask ``visible (B, L)`` of the rows below ``stop``: a copy, since a caller may write into its own tensor."""
    return None if visible is None else visible[:, :stop].clone()


class Observed(NamedTuple):
    """Query states of a prompt's last tokens.

    Attributes:
        states: ``(B, heads, W, D)``, as the attention function gets them.
        scale: the attention module's own scaling.
        stop: rows up to and including the last token's.
    """

    states: Tensor
    scale: float
    stop: int

    def followed(self, index: Tensor) -> Observed:
        """Those of the sequences ``index (B',)``."""
        return self._replace(states=self.states.index_select(0, index.to(self.states.device)))


class Snapshot(NamedTuple):
    """A layer's rows and what was known about them at one moment."""

    keys: Tensor
    values: Tensor
    buffers: tuple[Tensor, Tensor] | None
    grouped: Grouped
    waiting: tuple[int, int] | None
    observed: Observed | None
