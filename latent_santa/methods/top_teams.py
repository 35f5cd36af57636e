"""SANTA++'s teams without its sampling: the K teams of largest phi (Equation 3) per head, attended without correction.

A baseline of our own: the choice that Algorithm 1 makes with all noise at zero and every c_g = 1. Its difference from
SANTA++ is what noise and correction do together. A team that ranks low is never read, which no correction can mend.

Count: as SANTA++. m = M representatives, 0 where K >= M; u = the union of the heads' teams; e = the suffix.
Equation 13: (m + 2 (u + e)) / 2N; Equation 14: (m + u + e) / N.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..estimator import attend_teams
from ..sampling import Selection, routing_scores, select_top, take_all
from ..step import DecodeStep, Output
from .base import Choose
from .santapp import SantaPlusPlus

if TYPE_CHECKING:
    from ..config import SantaConfig


class TopTeams(SantaPlusPlus):
    """SANTA++ with another selection."""

    name = "top_teams"
    about = "teams of largest representative score: no noise, no correction"
    apart = False
    settings: tuple[str, ...] = (
        "parents",
        "parent_size",
        "representatives",
        "budget",
        "estimator",
        "kmeans_seed",
        "kmeans_engine",
        "regroup_after",
        "routing_dtype",
        "first_token",
    )

    def attend(self, step: DecodeStep, config: SantaConfig, choose: Choose) -> Output:
        return attend_teams(step, self.selected(step, config), self.teams_per_head(config))

    def selected(self, step: DecodeStep, config: SantaConfig) -> Selection:
        """The K teams of largest score per head, or all teams."""
        teams, k = step.teams, self.teams_per_head(config)
        assert teams is not None, "this method selects teams"
        if teams.M <= k:
            return take_all(teams.sizes > 0)
        return select_top(self.team_scores(step), k, config.estimator == "pooled")

    def team_scores(self, step: DecodeStep) -> Tensor:
        """What teams are ranked by, ``(B, G, H, M)``, -inf for padding teams."""
        assert step.teams is not None
        return routing_scores(step.query, step.teams, step.scale)
