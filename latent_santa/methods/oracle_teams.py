"""The K teams of largest exact mass per head, log of the sum of e^s over their rows, attended without correction.

A baseline of our own, for what a choice of whole teams can keep without correction. Beside ``top_teams`` it shows what
is lost because one representative stands for a team (Equation 3).

Count: m = N keys of the scan, u = the union of the heads' teams, e = the suffix. Equation 13: (N + u + e) / 2N, since
the scan read the keys; Equation 14: N / N, since it read the latents. The bound of an oracle that need not scan is
(u + e) / N in both layouts; tables show it beside the count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..access import Unit, scanned_unit
from ..rows import Rows, scores
from ..step import DecodeStep, Output
from ..teams import Teams
from .base import Choose
from .top_teams import TopTeams

if TYPE_CHECKING:
    from ..config import SantaConfig


class OracleTeams(TopTeams):
    """:class:`TopTeams` ranked by exact mass."""

    name = "oracle_teams"
    about = "teams of largest exact mass, after a scan of every key"
    settings = tuple(name for name in TopTeams.settings if name != "routing_dtype")

    def build(
        self,
        points: Sequence[Tensor],
        rows: Sequence[Rows],
        member: Tensor,
        config: SantaConfig,
        bound: int | None = None,
        parents: list[Tensor] | None = None,
    ) -> Iterable[Teams | None]:
        """SANTA++'s teams, without the routing keys that this method never reads."""
        for teams in super().build(points, rows, member, config, bound, parents):
            assert teams is not None
            yield replace(teams, routing_keys=())

    def attend(self, step: DecodeStep, config: SantaConfig, choose: Choose) -> Output:
        output = super().attend(step, config, choose)
        return replace(output, routing=step.draw.step[:, None].expand_as(output.union))

    def team_scores(self, step: DecodeStep) -> Tensor:
        teams = step.teams
        assert teams is not None
        keys = [part[:, :, : teams.covered] for part in step.rows.keys]
        return log_masses(scores(step.query, keys, step.scale), teams)

    def unit(self, rows: Rows, teams: Teams | None, config: SantaConfig) -> Unit:
        return scanned_unit(rows)


def log_masses(s: Tensor, teams: Teams) -> Tensor:
    """log of the sum of e^s over each team's rows, ``(B, G, H, M)``, from all rows' scores ``s (B, G, H, N)``."""
    own = teams.team_of_row[..., : s.shape[-1]].long()
    place = torch.where(own >= 0, own, teams.M)[:, :, None].expand_as(s)
    most = s.new_full((*s.shape[:-1], teams.M + 1), -torch.inf).scatter_reduce_(-1, place, s, "amax")
    mass = torch.zeros_like(most).scatter_add_(-1, place, (s - most.gather(-1, place)).exp())
    return (most + mass.log())[..., :-1]
