"""SANTA++ (Section 2, Algorithm 1): teams sampled by one representative each, read whole, and corrected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..parent_records import summarised
from ..parents import form_parents
from ..rows import Rows
from ..step import DecodeStep, Output, Sampling
from ..teams import Teams, build_teams, freeze_representatives
from .base import Choose, Method

if TYPE_CHECKING:
    from ..config import SantaConfig

# numbers in the stack of several layers' points: half a gigabyte in bfloat16
STACKED_NUMBERS = 1 << 28


class SantaPlusPlus(Method):
    name = "santa++"
    about = "teams sampled by their representatives (Algorithm 1)"
    fixed_shapes = True
    apart = True
    settings: tuple[str, ...] = (
        "parents",
        "parent_size",
        "representatives",
        "budget",
        "estimator",
        "noise",
        "routing",
        "parents_per_head",
        "parent_summary",
        "exact_first",
        "exact_last",
        "seed",
        "kmeans_seed",
        "kmeans_engine",
        "regroup_after",
        "routing_dtype",
        "backend",
        "first_token",
    )

    def check(self, config: SantaConfig) -> None:
        """The divisibility rules of Equation 5."""
        if config.parent_size % config.representatives:
            raise ValueError(
                f"representatives={config.representatives}: P must be divisible by R, and "
                f"parent_size={config.parent_size} is not"
            )
        rows = config.parent_size // config.representatives
        if config.budget % rows:
            raise ValueError(f"budget={config.budget}: S must be divisible by P/R = {rows} (Equation 5)")

    def teams_per_head(self, config: SantaConfig) -> int:
        """K = S / (P / R) (Equation 5)."""
        return config.budget // (config.parent_size // config.representatives)

    def sampling(self, config: SantaConfig) -> Sampling:
        """How a step samples teams under these settings."""
        k1 = config.parents_per_head if self._in_two_stages(config) else None
        return Sampling(self.teams_per_head(config), config.estimator, config.noise, k1)

    def grouped_by(self, config: SantaConfig) -> tuple[str, ...]:
        own = ["parents", "parent_size", "representatives", *kmeans_fields(config), "routing_dtype", "routing"]
        own += ["exact_first", "exact_last"]
        if self._in_two_stages(config):
            own.append("parent_summary")
        return tuple(name for name in own if name in self.settings)

    def _in_two_stages(self, config: SantaConfig) -> bool:
        return "routing" in self.settings and config.routing == "two_stage"

    def build(
        self,
        points: Sequence[Tensor],
        rows: Sequence[Rows],
        member: Tensor,
        config: SantaConfig,
        bound: int | None = None,
        parents: list[Tensor] | None = None,
    ) -> Iterable[Teams | None]:
        """Algorithm 3 or 4, then Algorithm 2; for two stages also what is kept of the parents."""
        if parents is None:
            parents = form_parents(list(points), rows, member, config)
        for part in _stackable(points):
            # one pass over many layers: a pass per layer would be too short to fill a GPU
            formed, layers = parents[part], rows[part]
            stacked = build_teams(torch.cat(list(points[part])), torch.cat(formed), config.representatives, bound)
            if bound is not None:
                # a span of generated rows is short, so its keys are no burden, and passes per layer would be slow
                yield from self._frozen(stacked, torch.cat(formed), _joined(layers), config, bound).split(len(layers))
                continue
            for one, teams, layer in zip(formed, stacked.split(len(layers)), layers, strict=True):
                # one layer at a time, so that plain keys of all layers need not stand beside their codes
                yield self._frozen(teams, one, layer, config)

    def _frozen(
        self, teams: Teams, parents: Tensor, rows: Rows, config: SantaConfig, bound: int | None = None
    ) -> Teams:
        """The teams with their routing keys and, for two stages, with what is kept of the parents."""
        teams = freeze_representatives(teams, rows)
        if not self._in_two_stages(config):
            return teams
        kept = summarised(teams, parents, rows, config.parent_summary, bound, config.representatives)
        return replace(teams, parents=kept)

    def attend(self, step: DecodeStep, config: SantaConfig, choose: Choose) -> Output:
        sampling = self.sampling(config)
        return choose(step, sampling).sampled_attention(step, sampling)

    def every_team(self, teams: Teams, config: SantaConfig) -> bool:
        return super().every_team(teams, config) and teams.most_parents <= config.parents_per_head


def kmeans_fields(config: SantaConfig) -> tuple[str, ...]:
    """Fields of the settings that k-means parents depend on; contiguous parents depend on none."""
    return ("kmeans_seed", "kmeans_engine") if config.parents != "contiguous" else ()


def _joined(layers: Sequence[Rows]) -> Rows:
    """The rows of several layers as one batch."""
    keys = tuple(torch.cat(parts) for parts in zip(*(layer.keys for layer in layers), strict=True))
    return Rows(keys, keys[0])


def _stackable(points: Sequence[Tensor]) -> Iterator[slice]:
    """Runs of layers of one shape that fit in the memory set aside for a stack of them."""
    start = 0
    while start < len(points):
        most = max(1, STACKED_NUMBERS // max(points[start].numel(), 1))
        stop = start + 1
        while stop < len(points) and stop - start < most and points[stop].shape == points[start].shape:
            stop += 1
        yield slice(start, stop)
        start = stop
