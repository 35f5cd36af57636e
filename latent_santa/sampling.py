"""Which teams a decoding call reads, and how likely that was: Algorithm 1 lines 3-12, and the pooled correction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .rows import scores
from .teams import Teams


@dataclass
class Selection:
    """The outcome of one sampled selection.

    Attributes:
        selected: ``(B, G, H, M)`` bool, the set S of each head.
        union: ``(B, G, M)`` bool, teams that any head of the group selected.
        log_correction: ``(B, G, H, M)`` per head or ``(B, G, 1, M)`` pooled, float32: log c_g where a head uses the
            team, +inf where it does not, so that subtracting it from a score drops the row.
        routing: ``(B, G)`` int64, representatives scored; 0 where K >= M, since Algorithm 1 then scores none.
    """

    selected: Tensor
    union: Tensor
    log_correction: Tensor
    routing: Tensor


def routing_scores(query: tuple[Tensor, ...], teams: Teams, scale: float) -> Tensor:
    """phi_g = log n_g + scaled query-representative score (Equation 3), ``(B, G, H, M)`` float32; -inf for padding."""
    log_size = teams.sizes.clamp_min(1).log()
    phi = scores(query, (part.float() for part in teams.routing_keys), scale) + log_size[:, :, None]
    return phi.masked_fill((teams.sizes == 0)[:, :, None], -torch.inf)


def log_inclusion(x: Tensor) -> Tensor:
    """log(1 - exp(-exp(x))), Equation 7's correction in the log domain, without cancellation for tiny corrections."""
    small = x < -10.0
    series = x - x.exp() / 2
    direct = torch.log(-torch.expm1(-torch.where(small, torch.zeros_like(x), x).exp()))
    return torch.where(small, series, direct)


def select(phi: Tensor, noise: Tensor, teams_per_head: int, estimator: str, shared: bool) -> Selection:
    """Gumbel-top-K selection with its conditional inclusion corrections.

    Args:
        phi: ``(B, G, H, M)`` routing scores, -inf for padding teams.
        noise: standard Gumbel draws of the same shape.
        teams_per_head: K before the cap by the number of teams.
        estimator: ``"per_head"`` or ``"pooled"``.
        shared: whether the heads of a group share their draws, which changes the pooled correction.
    """
    real = phi > -torch.inf
    count = real[:, :, 0].sum(-1)
    if phi.shape[-1] <= teams_per_head:
        tau = kth = phi.new_full((*phi.shape[:-1], 1), -torch.inf)
        selected = real
    else:
        top = (phi + noise).topk(teams_per_head + 1)
        kth, tau = top.values[..., -2:-1], top.values[..., -1:]
        selected = torch.zeros_like(real).scatter_(-1, top.indices[..., :-1], True) & real
    union = selected.any(2)
    if estimator == "per_head":
        # where M <= K the threshold is -inf, and the correction comes out as exactly 1
        log_c = log_inclusion((phi - tau).masked_fill(~selected, 0.0)).masked_fill(~selected, torch.inf)
    else:
        log_c = _pooled_correction(phi, selected, union, tau, kth, shared)
    return Selection(selected, union, log_c, torch.where(count > teams_per_head, count, 0))


def _pooled_correction(phi: Tensor, selected: Tensor, union: Tensor, tau: Tensor, kth: Tensor, shared: bool) -> Tensor:
    """log of the union's conditional inclusion probability, ``(B, G, 1, M)``.

    T_{h,-g}, the K-th largest score of head h without team g, is its (K+1)-st score if it selected g and its K-th if
    not. No head takes g with probability prod_h exp(-exp(phi - T)); heads that share one draw miss it together, when
    the draw stays below the easiest head's threshold.
    """
    threshold = torch.where(selected, tau, kth)
    margin = (phi - threshold).masked_fill(phi == -torch.inf, -torch.inf)
    joint = margin.amax(2, keepdim=True) if shared else margin.logsumexp(2, keepdim=True)
    unused = ~union[:, :, None]
    return log_inclusion(joint.masked_fill(unused, 0.0)).masked_fill(unused, torch.inf)
