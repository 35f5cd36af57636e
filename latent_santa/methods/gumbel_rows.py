"""Rows sampled without replacement from the exact attention weights: SANTA++ with one team per row.

This is the limit that Section 5 names: every key its own team and its own representative. It is not the paper's SANTA,
which draws with replacement (:mod:`latent_santa.methods.santa`); it is the best that sampling single rows can do after
a scan of every key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..access import Unit, scanned_unit
from ..estimator import suffix_rows, weighted_sums
from ..rows import Rows, scores
from ..sampling import Selection, select, take_all
from ..step import DecodeStep, Output, Sampling
from ..teams import Teams
from .base import Choose, Method

if TYPE_CHECKING:
    from ..config import SantaConfig


class GumbelRows(Method):
    name = "gumbel_rows"
    about = "single rows without replacement, after a scan of every key"
    settings: tuple[str, ...] = ("budget", "estimator", "noise", "seed", "first_token")

    def attend(self, step: DecodeStep, config: SantaConfig, choose: Choose) -> Output:
        return sampled_rows(step, Sampling(config.budget, config.estimator, config.noise))

    def full(self, step: DecodeStep, config: SantaConfig) -> bool:
        return step.rows.length - step.suffix.index.numel() <= config.budget

    def unit(self, rows: Rows, teams: Teams | None, config: SantaConfig) -> Unit:
        return scanned_unit(rows)


def sampled_rows(step: DecodeStep, sampling: Sampling) -> Output:
    """Algorithm 1 with one team per row, its own representative (:func:`latent_santa.naive.gumbel_rows` in loops).

    Rows outside of the suffix are sampled, K of them per head. ``routing`` counts every visible row once.
    """
    phi, prompt = prompt_scores(step)
    _, groups, heads, length = phi.shape
    if length <= sampling.k:
        picked = take_all(prompt[:, None].expand(-1, groups, -1))
    else:
        # a row's draw belongs to its place among real rows, so that padding does not move it
        rank = (prompt.long().cumsum(-1) - 1).clamp_min(0)[:, None, None].expand(-1, groups, heads, -1)
        gumbels = step.draw.gumbels(groups, heads, length, sampling.shared).gather(3, rank)
        picked = select(phi, gumbels, sampling.k, sampling.estimator, sampling.shared)
    return attend_scanned(step, phi, prompt, picked)


def prompt_scores(step: DecodeStep) -> tuple[Tensor, Tensor]:
    """Exact scores ``(B, G, H, N)`` of visible rows outside of the suffix, -inf elsewhere; their mask ``(B, N)``."""
    prompt = step.visible
    if prompt is None:
        prompt = torch.ones(step.batch, step.rows.length, dtype=torch.bool, device=step.rows.values.device)
    prompt = prompt.index_fill(1, step.suffix.index, False)
    phi = scores(step.query, step.rows.keys, step.scale)
    return phi.masked_fill(~prompt[:, None, None], -torch.inf), prompt


def attend_scanned(step: DecodeStep, phi: Tensor, prompt: Tensor, picked: Selection) -> Output:
    """Attention over the suffix and the picked rows of :func:`prompt_scores`; all visible keys count as scored."""
    suffix_scores, suffix_values = suffix_rows(step)
    s = torch.cat((phi - picked.log_correction, suffix_scores), -1)
    out, lse = weighted_sums(s, step.rows.values.to(suffix_values.dtype), suffix_values)
    exact = step.suffix.counts(step.batch)[:, None].expand(-1, step.groups)
    return Output(out, lse, prompt.sum(-1)[:, None] + exact, picked.union.sum(-1), exact)
