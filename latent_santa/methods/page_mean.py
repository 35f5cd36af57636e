"""Pages ranked by their mean key, the same ones for all heads of a sharing group: Vortex' rule for MLA.

Rule: a page's score is that of its mean key averaged over the heads, which is the score of the heads' mean query. Every
head of the group attends the K = floor(S / P) pages of largest score. In MLA the group is all heads, and the mean key
is the mean latent beside the mean rotary key; in GQA each KV head chooses pages of its own.

Not reproduced: Vortex always reads some pages at both ends of the context, refreshes means as rows arrive, and serves
from a paged cache.

Count: m = M pages, 0 where K >= M; u = the rows of the chosen pages, at most S; e = the suffix. Equation 13:
(m + 2 (u + e)) / 2N; Equation 14: (m + u + e) / N.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..rows import scores
from ..step import DecodeStep
from ..teams import Teams
from .pages import Pages

if TYPE_CHECKING:
    from ..config import SantaConfig


class PageMean(Pages):
    name = "page_mean"
    about = "pages of largest mean-key score, chosen by the heads of a group together"
    settings: tuple[str, ...] = ("parent_size", "budget", "regroup_after", "routing_dtype", "first_token")

    def page_scores(self, step: DecodeStep, pages: Teams, config: SantaConfig) -> Tensor:
        keys = (part.float() for part in pages.routing_keys)
        return scores(step.query, keys, step.scale).mean(2, keepdim=True)
