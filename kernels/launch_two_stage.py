"""The launches of a step that routes in two stages: six of them, or pooled seven."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from latent_santa.ahead import PARENTS as PARENTS_NOISE
from latent_santa.integers import ceil_div
from latent_santa.parent_records import ParentRecords

from .launch import Launches
from .plan import padded_teams, power, tiles
from .route import route_kernel
from .route_listed import route_listed_kernel
from .scoring import ELEMENT, scoring
from .select import LISTED, PARENTS


class TwoStageLaunches(Launches):
    """:class:`Launches` with a first stage over parents; what comes after the selection of teams is the same."""

    two_stage = True

    @property
    def parents(self) -> ParentRecords:
        """The teams' parents."""
        assert self.teams.parents is not None, "two stages need the parents' records"
        return self.teams.parents

    def _parent_shapes(self) -> dict[str, int]:
        k1 = self.sampling.parents
        assert k1 is not None, "two stages need K1"
        return {"parents": self.parents.C, "parents_per_head": k1, "most_teams": self.parents.most_teams}

    def routing(self) -> dict[str, Callable[[], None]]:
        first = {"route parents": self.route_parents, "select parents": self.select_parents}
        return {**first, **super().routing()}

    def route_parents(self) -> None:
        """Score the parents and add noise."""
        s, p, b, parents = self.shapes, self.plan, self.buffers, self.parents
        # a summary without spread has none to point at: any tensor does
        spread = parents.spread or (parents.sizes,)
        route_kernel[(ceil_div(s.parents, p.route_teams), ceil_div(s.heads, p.route_heads), s.batch * s.groups)](
            **scoring(self, parents.keys, p.parent_stages),
            SPLIT=s.split,
            DTYPE=ELEMENT[s.dtype],
            spread0=spread[0],
            spread1=spread[-1],
            sizes=parents.sizes.contiguous(),
            count=parents.count,
            phi=b.parent_phi,
            noisy=b.parent_noisy,
            tops=b.parent_tops,
            flags=b.parent_flags,
            union=b.union,
            layer=self.step.draw.layer + PARENTS_NOISE,
            spread0_strides=spread[0].stride()[:3],
            spread1_strides=spread[-1].stride()[:3],
            M=s.parents,
            MP=padded_teams(s.parents),
            BLOCK=p.parent_block,
            PHI=self.keeps_phi,
            PARENTS=True,
            SPREAD=parents.summary,
            **self.options(p.route_warps, first=True),
        )

    def select_parents(self) -> None:
        """Find every head's threshold, flag its parents and write their corrections; also make ready what the second
        stage needs."""
        s, p, b = self.shapes, self.plan, self.buffers
        nothing = b.union
        self._select(
            **self._selecting(s.parents, s.parents_per_head, p.parent_block, p.parent_coarse),
            tops=b.parent_tops,
            noisy=b.parent_noisy,
            flags=b.parent_flags,
            union=b.union,
            corrections=b.parent_corrections,
            count=self.parents.count,
            listed_teams=nothing,
            listed_parents=nothing,
            parent_log_c=nothing,
            of_team=self._of_team,
            first_team=b.first_team,
            team_flags=b.flags,
            blocks=b.parent_blocks,
            found=b.parent_found,
            tau=b.parent_tau,
            kth=b.parent_kth,
            layer=self.step.draw.layer + PARENTS_NOISE,
            MP=padded_teams(s.parents),
            CP=0,
            TEAMS=s.teams,
            TEAMS_PADDED=padded_teams(s.teams),
            OF=PARENTS,
        )

    def route(self) -> None:
        """Score the representatives of the sampled parents and add noise."""
        s, p, b = self.shapes, self.plan, self.buffers
        route_listed_kernel[(tiles(s, p), ceil_div(s.heads, p.route_heads), s.batch * s.groups)](
            **scoring(self, self.teams.routing_keys),
            SPLIT=s.split,
            DTYPE=ELEMENT[s.dtype],
            sizes=self.teams.sizes,
            of_team=self._of_team,
            parent_count=self.parents.count,
            parent_phi=b.parent_phi if self.keeps_phi else b.parent_noisy,
            parent_layer=self.step.draw.layer + PARENTS_NOISE,
            parent_tau=b.parent_tau,
            parent_kth=b.parent_kth,
            parent_flags=b.parent_flags,
            parent_log_c=b.parent_corrections,
            union=b.union,
            first_team=b.first_team,
            phi=b.phi,
            noisy=b.noisy,
            tops=b.tops,
            places=b.places,
            teams_scored=b.teams_scored,
            listed_teams=b.listed_teams,
            listed_parents=b.listed_parents,
            listed_log_c=b.listed_log_c,
            layer=self.step.draw.layer,
            M=s.teams,
            PLACES=padded_teams(s.places),
            PARENTS=padded_teams(s.parents),
            POOL_HB=min(power(s.heads), 32) if self.keeps_phi else power(s.heads),
            REDRAW=not self.keeps_phi,
            SPARSE=p.many,
            BLOCK=p.block,
            POOLED=self.sampling.pooled,
            EACH=power(s.most_teams),
            LANES=min(power(padded_teams(s.parents) // 32), 256),
            **self.options(p.route_warps),
        )

    def select(self) -> None:
        """Find every head's threshold, flag its teams and write the corrections of both stages."""
        s, p, b = self.shapes, self.plan, self.buffers
        nothing = b.union
        self._select(
            **self._selecting(s.places, s.teams_per_head, p.block, p.coarse),
            tops=b.tops,
            noisy=b.noisy,
            flags=b.flags,
            union=b.union,
            corrections=b.corrections,
            count=b.places,
            listed_teams=b.listed_teams,
            listed_parents=b.listed_parents,
            parent_log_c=b.parent_corrections,
            of_team=nothing,
            first_team=nothing,
            team_flags=nothing,
            blocks=b.blocks,
            found=b.found,
            tau=b.tau,
            kth=b.kth,
            layer=self.step.draw.layer,
            MP=padded_teams(s.teams),
            CP=padded_teams(s.parents),
            TEAMS=0,
            TEAMS_PADDED=0,
            OF=LISTED,
        )

    @property
    def _of_team(self) -> Tensor:
        return self.parents.of_team.contiguous()

    def _counting(self) -> dict[str, object]:
        return {
            "count": self.parents.count,
            "K": self.shapes.parents_per_head,
            "VECTORS": self.parents.vectors,
            "teams_scored": self.buffers.teams_scored,
            "TILES": tiles(self.shapes, self.plan),
            "K2": self.sampling.k,
        }
