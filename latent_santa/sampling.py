"""Which teams a decoding step reads, and how likely that was: Algorithm 1, lines 3-12, and the pooled correction.

In loops these are :func:`latent_santa.naive.routing_scores`, :func:`latent_santa.naive.select`,
:func:`latent_santa.naive.log_correction` and :func:`latent_santa.naive.pooled_corrections`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .peers import Peers
from .routing_keys import key_scores
from .teams import Teams


@dataclass(frozen=True)
class Selection:
    """The teams that a step reads.

    Attributes:
        union: ``(B, G, M)`` bool, teams that this process reads: those that any head of the group selected, or per
            head, where processes share the group's heads, any head of this process.
        log_correction: ``(B, G, H, M)``, or ``(B, G, 1, M)`` where the heads have one in common, float32: log c_g where
            a head uses the team, +inf where it does not, so that subtracting it from a score drops the row.
        routing: ``(B, G)`` int64, representatives scored; 0 where K >= M, since Algorithm 1 then scores none.
        whole: ``(B, G, M)`` bool, the union over all processes, or None where ``union`` is that.
    """

    union: Tensor
    log_correction: Tensor
    routing: Tensor
    whole: Tensor | None = None


def routing_scores(query: tuple[Tensor, ...], teams: Teams, scale: float) -> Tensor:
    """Line 7: phi_g = log n_g + scaled query-representative score (Equation 3), -inf for padding teams.

    Returns:
        ``(B, G, H, M)`` float32, or float64 where the query is.
    """
    s = key_scores(query, teams.routing_keys, scale)
    phi = s + teams.sizes.clamp_min(1).to(s.dtype).log()[:, :, None]
    return phi.masked_fill((teams.sizes == 0)[:, :, None], -torch.inf)


def log_inclusion(x: Tensor) -> Tensor:
    """log(1 - exp(-exp(x))), Equation 7's correction in the log domain, without cancellation for tiny corrections."""
    small = x < -10.0
    series = x - x.exp() / 2
    direct = torch.log(-torch.expm1(-torch.where(small, torch.zeros_like(x), x).exp()))
    return torch.where(small, series, direct)


def take_all(real: Tensor) -> Selection:
    """Lines 4-5, K = M: every team of ``real (B, G, M)`` bool with c_g = 1, nothing scored and nothing drawn."""
    log_c = torch.where(real, 0.0, torch.inf).float()[:, :, None]
    return Selection(real, log_c, torch.zeros(real.shape[:2], dtype=torch.int64, device=real.device))


def select(phi: Tensor, gumbels: Tensor, k: int, estimator: str, shared: bool, peers: Peers | None = None) -> Selection:
    """Lines 8-11: Gumbel-top-K selection with its conditional inclusion corrections.

    A sequence with K teams or fewer has padding teams, so its tau is -inf and its corrections come out as exactly 1.

    Args:
        phi: ``(B, G, H, M)`` routing scores, -inf for padding teams.
        gumbels: standard Gumbel draws of the same shape.
        k: K, less than M.
        estimator: ``"per_head"`` or ``"pooled"``.
        shared: whether the heads of a group share their draws, which changes the pooled correction.
        peers: the processes that have the other heads of the groups.
    """
    real = phi > -torch.inf
    count = real[:, :, 0].sum(-1)
    top = (phi + gumbels).topk(k + 1)
    kth, tau = top.values[..., -2:-1], top.values[..., -1:]
    selected = torch.zeros_like(real).scatter_(-1, top.indices[..., :-1], True) & real
    routing = torch.where(count > k, count, 0)
    if estimator == "per_head":
        union = selected.any(2)
        log_c = log_inclusion((phi - tau).masked_fill(~selected, 0.0)).masked_fill(~selected, torch.inf)
        return Selection(union, log_c, routing, None if peers is None else peers.any(union))
    return Selection(*pooled_correction(phi, selected, tau, kth, shared, peers), routing)


def select_top(phi: Tensor, k: int, pooled: bool = False) -> Selection:
    """The K largest scores of each head, with neither noise nor correction: c_g = 1, and what is left out is lost.

    Args:
        phi: ``(B, G, H, M)`` routing scores, -inf for padding.
        k: K, less than M.
        pooled: every head of a group uses the union of the heads' choices.
    """
    real = phi > -torch.inf
    count = real[:, :, 0].sum(-1)
    selected = torch.zeros_like(real).scatter_(-1, phi.topk(k).indices, True) & real
    union = selected.any(2)
    used = union[:, :, None] if pooled else selected
    return Selection(union, torch.where(used, 0.0, torch.inf).float(), torch.where(count > k, count, 0))


def pooled_correction(
    phi: Tensor, selected: Tensor, tau: Tensor, kth: Tensor, shared: bool, peers: Peers | None
) -> tuple[Tensor, Tensor]:
    """The union ``(B, G, M)`` of the heads' teams, and the log of its conditional inclusion probability
    ``(B, G, 1, M)``.

    T_{h,-g}, the K-th largest score of head h without team g, is its (K+1)-st score if it selected g and its K-th if
    not. No head takes g with probability prod_h exp(-exp(phi - T)). Heads that share one draw miss g together, when the
    draw stays below the easiest head's threshold.
    """
    threshold = torch.where(selected, tau, kth)
    margin = (phi - threshold).masked_fill(phi == -torch.inf, -torch.inf)
    joint = margin.amax(2, keepdim=True) if shared else margin.logsumexp(2, keepdim=True)
    unused = ~selected.any(2, keepdim=True)
    if peers is not None:
        # a selected team's draw lifted it over the threshold, and no draw exceeds 23: e^margin does not vanish
        mine = torch.stack((joint if shared else joint.exp(), (~unused).to(joint.dtype)))
        joint, used = (peers.largest(mine) if shared else peers.sum(mine)).unbind()
        joint, unused = joint if shared else joint.log(), used == 0
    log_c = log_inclusion(joint.masked_fill(unused, 0.0)).masked_fill(unused, torch.inf)
    return ~unused[:, :, 0], log_c


def listed(chosen: Tensor, owner: Tensor, capacity: int) -> Tensor:
    """What belongs to chosen owners, as a list: rows of teams, or teams of parents.

    Args:
        chosen: ``(B, G, M)`` bool, owners that are read.
        owner: ``(B, G, N)`` integers, the owner of each item; -1 for none.
        capacity: length of the list, at least the number of items.

    Returns:
        ``(B, G, capacity)`` int64 places of items, rising, then -1.
    """
    owner = owner.long()
    wanted = chosen.gather(2, owner.clamp_min(0)) & (owner >= 0)
    place = torch.where(wanted, wanted.cumsum(-1) - 1, capacity)
    index = torch.arange(owner.shape[-1], device=owner.device).expand_as(owner)
    items = torch.full((*owner.shape[:2], capacity + 1), -1, dtype=torch.int64, device=owner.device)
    return items.scatter_(2, place, index)[..., :capacity]
