"""What page methods have in common: pages of P consecutive prompt rows, ranked by a summary, attended whole.

A page is a team: a contiguous parent (Algorithm 4) that is not split. Generated rows are paged too, under the same
``regroup_after`` as SANTA++'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..estimator import attend_teams
from ..parents import contiguous_parents
from ..rows import Rows
from ..sampling import select_top, take_all
from ..step import DecodeStep, Output
from ..teams import Teams, build_centroids
from .base import Choose, Method

if TYPE_CHECKING:
    from ..config import SantaConfig


class Pages(Method):
    """A method that says how pages are ranked by their mean keys, or by what it puts in their place."""

    def check(self, config: SantaConfig) -> None:
        if config.budget < config.parent_size:
            raise ValueError(
                f"budget={config.budget}: {self.name} selects floor(S / P) pages, so S must be at least "
                f"P = parent_size = {config.parent_size}: use a larger S or smaller pages"
            )

    def teams_per_head(self, config: SantaConfig) -> int:
        """Pages per head, floor(S / P)."""
        return config.budget // config.parent_size

    def grouped_by(self, config: SantaConfig) -> tuple[str, ...]:
        return ("parent_size", "routing_dtype")

    def build(
        self,
        points: Sequence[Tensor],
        rows: Sequence[Rows],
        member: Tensor,
        config: SantaConfig,
        bound: int | None = None,
        parents: list[Tensor] | None = None,
    ) -> Iterable[Teams | None]:
        spans = contiguous_parents(member, config.parent_size)
        for part, layer in zip(points, rows, strict=True):
            pages = build_centroids(layer, spans.to(part.device).expand(-1, part.shape[1], -1), bound)
            yield self.summarised(pages, layer)

    def summarised(self, pages: Teams, rows: Rows) -> Teams:
        """The pages, which come with their mean keys, with the routing keys that this method scores."""
        return pages

    def page_scores(self, step: DecodeStep, pages: Teams, config: SantaConfig) -> Tensor:
        """What pages are ranked by, ``(B, G, H, M)``, or ``(B, G, 1, M)`` where a group's heads choose together."""
        raise NotImplementedError

    def attend(self, step: DecodeStep, config: SantaConfig, choose: Choose) -> Output:
        pages, k = step.teams, self.teams_per_head(config)
        assert pages is not None, "this method selects pages"
        if pages.M <= k:
            picked = take_all(pages.sizes > 0)
        else:
            phi = self.page_scores(step, pages, config).masked_fill((pages.sizes == 0)[:, :, None], float("-inf"))
            picked = select_top(phi, k, "estimator" in self.settings and config.estimator == "pooled")
        return attend_teams(step, picked, k)
