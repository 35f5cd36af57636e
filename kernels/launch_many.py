"""The launch that a group of many heads has for itself (:attr:`.plan.Plan.many`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latent_santa.integers import ceil_div

from .list_many import list_many_kernel
from .plan import PIECES, padded_teams, power

if TYPE_CHECKING:
    from .launch import Launches


def list_rows(launches: Launches) -> None:
    """Line 13: the rows of every piece of every share, as lists; pooled, also :meth:`.launch.Launches.pool`."""
    s, p, b, draw = launches.shapes, launches.plan, launches.buffers, launches.step.draw
    pooled, pieces = launches.sampling.pooled, p.shares * PIECES
    blocks = 1 if pooled else ceil_div(s.heads, p.attend_heads)
    programs = pieces * blocks + (ceil_div(s.places, p.pool_teams) if pooled else 0)
    list_many_kernel[(programs, s.batch * s.groups)](
        **launches.listing(),
        noisy=b.noisy,
        tau=b.tau,
        kth=b.kth,
        count=b.places if launches.two_stage else launches.teams.count,
        key=draw.key,
        step=draw.step,
        listed_teams=b.listed_teams,
        listed_log_c=b.listed_log_c,
        pooled=b.pooled,
        layer=draw.layer,
        quad=launches.quad,
        pieces=pieces,
        blocks=blocks,
        CAPACITY=b.piece_rows.shape[-1],
        PLACES=padded_teams(s.places),
        H=s.heads,
        HB=p.attend_heads,
        POOL_HB=power(s.heads),
        T=p.pool_teams,
        LISTED=launches.two_stage,
        SHARED=launches.sampling.shared,
        LANES=p.list_lanes,
        **launches.options(p.list_warps),
    )
