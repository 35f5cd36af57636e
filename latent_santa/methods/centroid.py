"""Centroid routing (Appendix B.2): whole parents, sampled by their mean key instead of an actual key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..parents import form_parents
from ..rows import Rows
from ..teams import Teams, build_centroids
from .santapp import SantaPlusPlus

if TYPE_CHECKING:
    from ..config import SantaConfig


class Centroid(SantaPlusPlus):
    """SANTA++ with another ``build``: every parent is one team and its routing key is a mean."""

    name = "centroid"
    about = "clusters of B rows sampled by their mean key (Appendix B.2)"
    settings: tuple[str, ...] = tuple(
        name
        for name in SantaPlusPlus.settings
        if name not in ("representatives", "routing", "parents_per_head", "parent_summary")
    )

    def check(self, config: SantaConfig) -> None:
        if config.budget < config.parent_size:
            raise ValueError(
                f"budget={config.budget}: centroid selects floor(S / B) clusters, so S must be at least "
                f"B = parent_size = {config.parent_size}: use a larger S or a smaller B"
            )

    def teams_per_head(self, config: SantaConfig) -> int:
        """Clusters per head, floor(S / B)."""
        return config.budget // config.parent_size

    def build(
        self,
        points: Sequence[Tensor],
        rows: Sequence[Rows],
        member: Tensor,
        config: SantaConfig,
        bound: int | None = None,
        parents: list[Tensor] | None = None,
    ) -> Iterable[Teams | None]:
        if parents is None:
            parents = form_parents(list(points), rows, member, config)
        return (build_centroids(layer, formed, bound) for layer, formed in zip(rows, parents, strict=True))
