"""Algorithm 1 in PyTorch, and exact attention: what a step attends, for both row layouts.

Z-hat and U-hat are never numbers of their own, since e^s overflows. Functions here return ``out`` = U / Z and ``lse`` =
log Z instead, so that Z = exp(lse) and U = out * exp(lse). In loops they are ``attention_group``, ``weighted_sums`` and
``dense`` of :mod:`latent_santa.naive`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .integers import ceil_div
from .rows import Rows, scores
from .sampling import Selection, listed
from .step import DecodeStep, Output, Sampling
from .teams import Teams
from .two_stage import select_teams

# more rows of the union than these are copied in float32 in two halves: decoding's memory peaks there
ROWS_AT_ONCE = 2048


def sampled_attention(step: DecodeStep, sampling: Sampling) -> Output:
    """SANTA++ for one decoding step of one layer (Algorithm 1), or its pooled form."""
    return attend_teams(step, select_teams(step, sampling), sampling.k)


def attend_teams(step: DecodeStep, picked: Selection, k: int) -> Output:
    """Attention over the suffix and the picked teams, at most K of them per head, with its counts."""
    assert step.teams is not None
    heads = step.all_heads if picked.whole is None else step.heads
    out, lse, union = attend_selected(step, step.teams, picked, heads * k)
    if picked.whole is not None:
        union = (step.teams.sizes * picked.whole).sum(-1)
    return Output(out, lse, picked.routing, union, step.suffix.counts(step.batch)[:, None].expand(-1, step.groups))


def attend_selected(
    step: DecodeStep, teams: Teams, picked: Selection, most_teams: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Lines 13-19: exact attention over the suffix E and the rows of selected teams, these weighted by 1 / c_g.

    All heads of a group read the union of their rows. A row's 1 / c_g moves into its score, e^s / c = e^(s - log c), in
    U and Z alike; a head that did not select the row's team has log c = +inf there.

    Args:
        most_teams: an upper bound on the union's size, known without looking at it.

    Returns:
        ``out (B, G, H, V)``, ``lse (B, G, H)`` and the union's row counts ``(B, G)``.
    """
    index = listed(picked.union, teams.team_of_row, teams.most_rows(most_teams))  # line 13, without E
    team = teams.team_of_row.long().gather(2, index.clamp_min(0)).clamp_min(0)
    log_c = picked.log_correction.gather(3, team[:, :, None].expand(-1, -1, picked.log_correction.shape[2], -1))
    log_c = log_c.masked_fill((index < 0)[:, :, None], torch.inf)
    suffix_scores, suffix_values = suffix_rows(step)

    def sums(index: Tensor, log_c: Tensor, with_suffix: bool) -> tuple[Tensor, Tensor]:
        """Lines 14-18 over some rows of the union, and over E."""
        rows = step.rows.take(index)  # freed before the next half is taken
        s = scores(step.query, rows.keys, step.scale) - log_c
        if with_suffix:
            return weighted_sums(torch.cat((s, suffix_scores), -1), rows.values, suffix_values)
        return weighted_sums(s, rows.values)

    at_once = max(ROWS_AT_ONCE, ceil_div(index.shape[-1], 2))
    halves = zip(index.split(at_once, -1), log_c.split(at_once, -1), strict=True)
    out, lse = _added([sums(*half, with_suffix=number == 0) for number, half in enumerate(halves)])
    return out, lse, (index >= 0).sum(-1)


def dense_attention(
    query: tuple[Tensor, ...], rows: Rows, visible: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Exact attention over all visible rows (Equation 1), in the same layout and precision as the estimators.

    Args:
        visible: ``(B, N)`` bool, or None when every row is real.

    Returns:
        ``out (B, G, H, V)`` and ``lse (B, G, H)``.
    """
    s = scores(query, rows.keys, scale)
    if visible is not None:
        s = s.masked_fill(~visible[:, None, None], -torch.inf)
    return weighted_sums(s, rows.values.to(s.dtype))


def suffix_rows(step: DecodeStep) -> tuple[Tensor, Tensor]:
    """Scores ``(B, G, H, E)`` and values ``(B, G, E, V)`` of the exact suffix, in the scores' precision."""
    index, visible = step.suffix.index, step.suffix.visible
    s = scores(step.query, (part.index_select(2, index) for part in step.rows.keys), step.scale)
    if visible is not None:
        s = s.masked_fill(~visible[:, None, None], -torch.inf)
    return s, step.rows.values.index_select(2, index).to(s.dtype)


def weighted_sums(s: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
    """U / Z and log Z of rows with scores ``s (B, G, H, C)`` and values ``(B, G, C, V)``.

    Several ``values`` follow one another along C; joined, they would be copied.
    """
    lse = s.logsumexp(-1)
    # a sequence without any visible row (a chunk of a prompt that is all padding) gets zeros, not NaN
    shift = lse.clamp_min(torch.finfo(lse.dtype).min)
    weights = (s - shift[..., None]).exp().split([part.shape[2] for part in values], -1)
    first, *others = (weight @ part for weight, part in zip(weights, values, strict=True))
    return sum(others, first), lse


def _added(sums: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """U / Z and log Z of all rows, from those of separate rows."""
    if len(sums) == 1:
        return sums[0]
    outs, lses = (torch.stack(parts) for parts in zip(*sums, strict=True))
    lse = lses.logsumexp(0)
    weights = (lses - lse.clamp_min(torch.finfo(lse.dtype).min)).exp()
    return (weights[..., None] * outs).sum(0), lse
