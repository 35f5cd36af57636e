"""What the launches that score routing keys have in common, and the launch for keys in codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from torch import Tensor

from latent_santa.integers import ceil_div
from latent_santa.routing_keys import RoutingKeys

from .plan import mask_words, padded_teams, power
from .route_coded import route_coded_kernel

if TYPE_CHECKING:
    from .launch import Launches

ELEMENT = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def scoring(launches: Launches, keys: tuple[RoutingKeys, ...], stages: int | None = None) -> dict[str, Any]:
    """Arguments of the kernels that score routing keys, in so many ``stages`` in place of the plan's."""
    s, p, query, (first, second) = launches.shapes, launches.plan, launches.query, (keys[0], keys[-1])
    return {
        "query0": query[0],
        "query1": query[-1],
        "keys0": first.codes,
        "keys1": second.codes,
        "scales0": _scales(first),
        "scales1": _scales(second),
        "key": launches.step.draw.key,
        "step": launches.step.draw.step,
        "scale": launches.step.scale,
        "quad": launches.quad,
        "query0_strides": query[0].stride()[:3],
        "query1_strides": query[-1].stride()[:3],
        "keys0_strides": first.codes.stride()[:3],
        "keys1_strides": second.codes.stride()[:3],
        "G": s.groups,
        "H": s.heads,
        "WORDS": mask_words(s.heads),
        "D0": s.dims[0],
        "D1": s.dims[-1],
        "DC0": _dims_at_once(launches, first),
        "DC1": _dims_at_once(launches, second),
        "T": p.route_teams,
        "HB": p.route_heads,
        "LATENT": s.latent,
        "SHARED": launches.sampling.shared,
        "BITS": 16 if first.scales is None else first.bits,
        "STAGES": stages or p.route_stages,
        "PDL": launches.early,
        "num_stages": stages or p.route_stages,
    }


def route_coded(launches: Launches) -> None:
    """:meth:`.launch.Launches.route` where the routing keys are codes."""
    s, p, b, teams = launches.shapes, launches.plan, launches.buffers, launches.teams
    route_coded_kernel[(p.route_programs, ceil_div(s.heads, p.route_heads), s.batch * s.groups)](
        **scoring(launches, teams.routing_keys),
        sizes=teams.sizes,
        count=teams.count,
        phi=b.phi,
        noisy=b.noisy,
        tops=b.tops,
        flags=b.flags,
        layer=launches.step.draw.layer,
        M=s.teams,
        MP=padded_teams(s.teams),
        BLOCK=p.block,
        PHI=launches.keeps_phi,
        **({"maxnreg": p.route_registers} if p.route_registers else {}),
        **launches.options(p.route_warps, first=True),
    )


def _dims_at_once(launches: Launches, keys: RoutingKeys) -> int:
    """Dimensions of one product: a group of 4-bit codes; else what divides them all, but for :mod:`.route`."""
    dims, plan = keys.shape[-1], launches.plan
    if keys.bits == 4:
        return keys.group
    if keys.scales is not None:
        return min(dims & -dims, 128)
    return min(plan.route_dims, power(dims, 16))


def _scales(keys: RoutingKeys) -> Tensor:
    """Scales as 32-bit words: those of two 4-bit groups in one. Plain keys have none; any tensor stands for them."""
    if keys.scales is None:
        return keys.codes
    return keys.scales.contiguous().view(torch.int32) if keys.bits == 4 else keys.scales.contiguous()
