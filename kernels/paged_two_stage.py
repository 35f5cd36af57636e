"""The launches of a paged step that routes in two stages; those after the selection of teams are the same."""

from __future__ import annotations

from collections.abc import Callable

from latent_santa.ahead import PARENTS as PARENTS_NOISE
from latent_santa.integers import ceil_div

from .paged_launch import PagedLaunches
from .paged_route import paged_route_kernel
from .paged_route_listed import paged_route_listed_kernel
from .paged_select import paged_select_kernel
from .plan import mask_words, padded_teams, power, tiles
from .pool import pool_kernel
from .select import LISTED, PARENTS


class TwoStages:
    """Routing in two stages for a step's :class:`PagedLaunches`."""

    def __init__(self, step: PagedLaunches) -> None:
        self.step, self.shapes, self.plan, self.buffers = step, step.shapes, step.plan, step.buffers

    def routing(self) -> dict[str, Callable[[], None]]:
        """The launches before the attention, by name and in order."""
        pool = {"pool": self.pool} if self.step.pooled else {}
        first = {"route parents": self.route_parents, "select parents": self.select_parents}
        return {**first, "route": self.route, "select": self.select, **pool}

    def route_parents(self) -> None:
        """Score the parents of full blocks and add noise; also clear what the second stage writes to."""
        s, p, b, step = self.shapes, self.plan, self.buffers, self.step
        mean, heads = step.records.mean, ceil_div(s.heads, p.route_heads)
        assert mean is not None, "two stages need the parents' means"
        arguments = step.scoring((mean[..., : s.dims[0]], mean[..., s.dims[0] :]))
        paged_route_kernel[(step.programs(s.parents, p.route_teams, heads), heads)](
            **{**arguments, "layer": step.sampling.layer + PARENTS_NOISE},
            size=step.records.parent_size,
            phi=b["parent_phi"] if step.pooled else b["parent_noisy"],
            noisy=b["parent_noisy"],
            tops=b["parent_tops"],
            flags=b["parent_flags"],
            union=b["union"],
            team_flags=b["flags"],
            MP=padded_teams(s.parents),
            TEAMS_PADDED=padded_teams(s.teams),
            B=s.batch,
            BATCH=power(s.batch),
            BLOCK=p.parent_block,
            PHI=step.pooled,
            EACH=s.most_teams,
            **step.options(p.route_warps, first=True),
        )

    def select_parents(self) -> None:
        """Find every head's threshold, flag its parents and write their corrections."""
        s, p, b, step = self.shapes, self.plan, self.buffers, self.step
        nothing = b["union"]
        arguments = step.selecting(s.parents, s.parents_per_head, p.parent_block, p.parent_coarse)
        paged_select_kernel[(s.heads, s.batch)](
            **{**arguments, "layer": step.sampling.layer + PARENTS_NOISE},
            tops=b["parent_tops"],
            noisy=b["parent_noisy"],
            flags=b["parent_flags"],
            union=b["union"],
            corrections=b["parent_corrections"],
            places=nothing,
            listed_teams=nothing,
            listed_parents=nothing,
            parent_log_c=nothing,
            blocks=b["parent_blocks"],
            found=b["parent_found"],
            tau=b["parent_tau"],
            kth=b["parent_kth"],
            MP=padded_teams(s.parents),
            CP=0,
            OF=PARENTS,
            EACH=s.most_teams,
        )

    def route(self) -> None:
        """Score the representatives of the sampled parents and add noise."""
        s, p, b, step = self.shapes, self.plan, self.buffers, self.step
        paged_route_listed_kernel[(tiles(s, p), ceil_div(s.heads, p.route_heads), s.batch)](
            **step.scoring(step.parts),
            size=step.records.size,
            parent_phi=b["parent_phi"] if step.pooled else b["parent_noisy"],
            parent_tau=b["parent_tau"],
            parent_kth=b["parent_kth"],
            parent_flags=b["parent_flags"],
            parent_log_c=b["parent_corrections"],
            union=b["union"],
            phi=b["phi"] if step.pooled else b["noisy"],
            noisy=b["noisy"],
            tops=b["tops"],
            places=b["places"],
            teams_scored=b["teams_scored"],
            listed_teams=b["listed_teams"],
            listed_parents=b["listed_parents"],
            listed_log_c=b["listed_log_c"],
            PLACES=padded_teams(s.places),
            PARENTS=padded_teams(s.parents),
            POOL_HB=min(power(s.heads), 32),
            BLOCK=p.block,
            POOLED=step.pooled,
            EACH=s.most_teams,
            LANES=min(power(padded_teams(s.parents) // 32), 256),
            **step.options(p.route_warps),
        )

    def select(self) -> None:
        """Find every head's threshold, flag its teams and write the corrections of both stages."""
        s, p, b, step = self.shapes, self.plan, self.buffers, self.step
        paged_select_kernel[(s.heads, s.batch)](
            **step.selecting(s.places, s.teams_per_head, p.block, p.coarse),
            tops=b["tops"],
            noisy=b["noisy"],
            flags=b["flags"],
            union=b["union"],
            corrections=b["corrections"],
            places=b["places"],
            listed_teams=b["listed_teams"],
            listed_parents=b["listed_parents"],
            parent_log_c=b["parent_corrections"],
            blocks=b["blocks"],
            found=b["found"],
            tau=b["tau"],
            kth=b["kth"],
            MP=padded_teams(s.teams),
            CP=padded_teams(s.parents),
            OF=LISTED,
            EACH=s.most_teams,
        )

    def pool(self) -> None:
        """One correction per listed team for all heads (pooled only)."""
        s, p, b, step = self.shapes, self.plan, self.buffers, self.step
        pool_kernel[(ceil_div(s.places, p.pool_teams), s.batch)](
            phi=b["phi"],
            tau=b["tau"],
            kth=b["kth"],
            flags=b["flags"],
            count=b["places"],
            listed_teams=b["listed_teams"],
            listed_log_c=b["listed_log_c"],
            pooled=b["pooled"],
            PLACES=padded_teams(s.places),
            MP=padded_teams(s.teams),
            H=s.heads,
            WORDS=mask_words(s.heads),
            T=p.pool_teams,
            HB=min(power(s.heads), 32),
            LISTED=True,
            SHARED=step.sampling.noise == "shared",
            PDL=step.early,
            **step.options(4),
        )
