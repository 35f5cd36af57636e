"""The estimators over selected rows and the exact suffix: Algorithm 1 lines 13-19, for both row layouts."""

from __future__ import annotations

import torch
from torch import Tensor

from .integers import ceil_div
from .rows import Rows, scores
from .sampling import Selection, routing_scores, select
from .step import DecodeStep, Output, Sampling, Suffix
from .teams import Teams

# more rows of the union than these are copied in float32 in two halves: decoding's memory peaks there
ROWS_AT_ONCE = 2048


def _combine(logits: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised sum of values ``(B, G, C, V)`` under ``logits (B, G, H, C)``, and the logits' log-sum-exp.

    Several ``values`` follow one another along C; joined, they would be copied.
    """
    lse = logits.logsumexp(-1)
    # a sequence without any visible row (a chunk of a prompt that is all padding) gets zeros, not NaN
    shift = lse.clamp_min(torch.finfo(lse.dtype).min)
    weights = (logits - shift[..., None]).exp().split([part.shape[2] for part in values], -1)
    first, *others = (weight @ part for weight, part in zip(weights, values, strict=True))
    return sum(others, first), lse


def _merged(pieces: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One result of :func:`_combine` from those of separate columns."""
    if len(pieces) == 1:
        return pieces[0]
    outs, lses = (torch.stack(parts) for parts in zip(*pieces, strict=True))
    lse = lses.logsumexp(0)
    weights = (lses - lse.clamp_min(torch.finfo(lse.dtype).min)).exp()
    return (weights[..., None] * outs).sum(0), lse


def _suffix_logits(query: tuple[Tensor, ...], rows: Rows, suffix: Suffix, scale: float) -> tuple[Tensor, Tensor]:
    """Scores ``(B, G, H, E)`` and float32 values ``(B, G, E, V)`` of the exact suffix."""
    part = Rows(tuple(k.index_select(2, suffix.index) for k in rows.keys), rows.values.index_select(2, suffix.index))
    logits = scores(query, part.keys, scale)
    if suffix.visible is not None:
        logits = logits.masked_fill(~suffix.visible[:, None, None], -torch.inf)
    return logits, part.values.to(logits.dtype)


def union_rows(union: Tensor, teams: Teams, capacity: int) -> Tensor:
    """Row list of the selected teams, read once for all heads: ``(B, G, capacity)`` int64, rising, -1 unused."""
    team = teams.team_of_row.long()
    wanted = union.gather(2, team.clamp_min(0)) & (team >= 0)
    place = torch.where(wanted, wanted.cumsum(-1) - 1, capacity)
    index = torch.arange(team.shape[-1], device=team.device).expand_as(team)
    rows = torch.full((*team.shape[:2], capacity + 1), -1, dtype=torch.int64, device=team.device)
    return rows.scatter_(2, place, index)[..., :capacity]


def sampled_attention(step: DecodeStep, sampling: Sampling) -> Output:
    """SANTA++ for one decoding step of one layer (Algorithm 1), or its pooled form."""
    teams = step.teams
    assert teams is not None, "this estimator samples teams"
    phi = routing_scores(step.query, teams, step.scale)
    gumbels = step.draw.gumbels(step.groups, step.heads, teams.M, sampling.shared)
    picked = select(phi, gumbels, sampling.k, sampling.estimator, sampling.shared)
    out, lse, union = attend_selected(
        step.query, step.rows, teams, step.suffix, picked, step.scale, step.heads * sampling.k
    )
    return Output(out, lse, picked.routing, union, step.suffix.counts(step.batch)[:, None].expand(-1, step.groups))


def attend_selected(
    query: tuple[Tensor, ...],
    rows: Rows,
    teams: Teams,
    suffix: Suffix,
    picked: Selection,
    scale: float,
    most_teams: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Exact attention over the union's rows and the suffix, each team's rows weighted by 1 / c_g.

    Subtracting log c_g from a row's score divides its mass and its weighted value alike (Equation 4).

    Args:
        most_teams: an upper bound on the union's size, known without looking at it.

    Returns:
        ``out (B, G, H, V)``, ``lse (B, G, H)`` and the union's row counts ``(B, G)``.
    """
    index = union_rows(picked.union, teams, teams.most_rows(most_teams))
    team = teams.team_of_row.long().gather(2, index.clamp_min(0)).clamp_min(0)
    log_c = picked.log_correction.gather(3, team[:, :, None].expand(-1, -1, picked.log_correction.shape[2], -1))
    log_c = log_c.masked_fill((index < 0)[:, :, None], torch.inf)
    exact, values = _suffix_logits(query, rows, suffix, scale)

    def piece(numbers: Tensor, less: Tensor, with_suffix: bool) -> tuple[Tensor, Tensor]:
        part = rows.take(numbers)  # gone before the next piece is taken
        logits = scores(query, part.keys, scale) - less
        if with_suffix:
            return _combine(torch.cat((logits, exact), -1), part.values, values)
        return _combine(logits, part.values)

    at_once = max(ROWS_AT_ONCE, ceil_div(index.shape[-1], 2))
    halves = zip(index.split(at_once, -1), log_c.split(at_once, -1), strict=True)
    out, lse = _merged([piece(*half, with_suffix=number == 0) for number, half in enumerate(halves)])
    return out, lse, (index >= 0).sum(-1)


def santa_attention(step: DecodeStep, sampling: Sampling) -> Output:
    """SANTA (Lee et al., 2026): every key is scored, single rows are sampled from the exact attention weights.

    It is SANTA++ with one team per row whose representative is the row itself, under the same correction. Rows outside
    of the suffix are sampled, K of them per head. ``routing`` counts every visible row once.
    """
    query, rows, suffix, scale = step.query, step.rows, step.suffix, step.scale
    prompt = step.visible
    if prompt is None:
        prompt = torch.ones(step.batch, rows.length, dtype=torch.bool, device=rows.values.device)
    prompt = prompt.index_fill(1, suffix.index, False)
    phi = scores(query, rows.keys, scale).masked_fill(~prompt[:, None, None], -torch.inf)
    batch, groups, heads, length = phi.shape
    # a row's draw belongs to its place among real rows, so that padding does not move it
    rank = (prompt.long().cumsum(-1) - 1).clamp_min(0)[:, None, None].expand(-1, groups, heads, -1)
    gumbels = step.draw.gumbels(groups, heads, length, sampling.shared).gather(3, rank)
    picked = select(phi, gumbels, sampling.k, sampling.estimator, sampling.shared)
    exact, values = _suffix_logits(query, rows, suffix, scale)
    logits = torch.cat((phi - picked.log_correction, exact), -1)
    out, lse = _combine(logits, rows.values.to(values.dtype), values)
    exact_rows = suffix.counts(batch)[:, None].expand(-1, groups)
    scanned = prompt.sum(-1)[:, None] + exact_rows
    return Output(out, lse, scanned, picked.union.sum(-1), exact_rows)


def dense_attention(
    query: tuple[Tensor, ...], rows: Rows, visible: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Exact attention over all visible rows (Equation 1), in the same layout and precision as the estimators.

    Args:
        visible: ``(B, N)`` bool, or None when every row is real.

    Returns:
        ``out (B, G, H, V)`` and ``lse (B, G, H)``.
    """
    logits = scores(query, rows.keys, scale)
    if visible is not None:
        logits = logits.masked_fill(~visible[:, None, None], -torch.inf)
    return _combine(logits, rows.values.to(logits.dtype))
