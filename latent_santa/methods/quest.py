"""Quest (Tang et al., 2024): pages ranked by an upper bound of their rows' scores, from minimum and maximum keys.

Rule: a page's bound is the sum over dimensions d of max(q_d min_d, q_d max_d); each head attends its K = floor(S / P)
pages of largest bound. In MLA the bound is that of the absorbed query over latent and rotary key. With
``estimator="pooled"`` every head of a sharing group attends the pages of all its heads, which reads no row more.

Not reproduced: the source leaves its first two layers dense. With a ``routing_dtype`` of integer codes the two keys are
rounded, and then their scores are no exact bound.

Count: m = 2 M vectors of M pages, 0 where K >= M; u = the union of the heads' pages; e = the suffix. Equation 13:
(2 M + 2 (u + e)) / 2N; Equation 14: (2 M + u + e) / N.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..access import Unit
from ..routing_keys import PlainKeys
from ..rows import Rows, scores
from ..step import DecodeStep, Output
from ..teams import Teams
from .base import Choose
from .pages import Pages

if TYPE_CHECKING:
    from ..config import SantaConfig


class Quest(Pages):
    name = "quest"
    about = "pages of largest score bound, from each dimension's minimum and maximum"
    settings = ("parent_size", "budget", "estimator", "regroup_after", "routing_dtype", "first_token")

    def summarised(self, pages: Teams, rows: Rows) -> Teams:
        """Routing keys: the largest of every key part, then the smallest of every key part."""
        largest = tuple(PlainKeys(page_extremes(part, pages, "amax")) for part in rows.keys)
        smallest = tuple(PlainKeys(page_extremes(part, pages, "amin")) for part in rows.keys)
        return replace(pages, routing_keys=largest + smallest)

    def page_scores(self, step: DecodeStep, pages: Teams, config: SantaConfig) -> Tensor:
        # max(q_d min_d, q_d max_d) is q_d max_d where q_d is positive, and else q_d min_d
        halves = tuple(q.clamp_min(0) for q in step.query) + tuple(q.clamp_max(0) for q in step.query)
        return scores(halves, (part.float() for part in pages.routing_keys), step.scale)

    def attend(self, step: DecodeStep, config: SantaConfig, choose: Choose) -> Output:
        output = super().attend(step, config, choose)
        return replace(output, routing=2 * output.routing)

    def unit(self, rows: Rows, teams: Teams | None, config: SantaConfig) -> Unit:
        both = super().unit(rows, teams, config)  # a page's two vectors are counted as two
        return replace(both, routing_bytes=both.routing_bytes // 2)


def page_extremes(keys: Tensor, pages: Teams, which: str) -> Tensor:
    """``"amax"`` or ``"amin"`` of ``keys (B, G, N, D)`` over the rows of each page and dimension, ``(B, G, M, D)``.

    Padding pages get zeros.
    """
    place = torch.where(pages.team_of_row >= 0, pages.team_of_row.long(), pages.M)[..., None].expand_as(keys)
    found = keys.new_zeros(*keys.shape[:2], pages.M + 1, keys.shape[-1])
    return found.scatter_reduce_(2, place, keys, which, include_self=False)[:, :, :-1]
