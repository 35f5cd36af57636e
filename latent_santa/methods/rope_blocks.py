"""Pages ranked by the rotary part of their mean key alone: the idea of RoBSA (Shi et al., 2026).

Rule: a page's score is that of its mean rotary key with the heads' mean rotary query; every head of a sharing group
attends the K = floor(S / P) pages of largest score. In MLA the rotary key stands apart from the latent, and no latent
is read to choose. In GQA the whole key is rotated, so the pages are those of ``page_mean``.

Not reproduced: the source is known here by its abstract alone ("token selection in a blockwise manner" by the decoupled
rotary part, "layer-aware"). How it summarises a block, whether heads choose together, and what it does by layer are not
in it: the first two are as in ``page_mean`` here, so that the two differ in what they score alone, and all layers are
alike.

Count: a page costs the rotary part of a vector, r of its d numbers (64 of 576 in DeepSeek's models): m = M r / d, 0
where K >= M; u = the rows of the chosen pages, at most S; e = the suffix. Equation 13, where r = d:
(m + 2 (u + e)) / 2N; Equation 14: (m + u + e) / N.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from torch import Tensor

from ..access import Unit
from ..rows import Rows, scores
from ..step import DecodeStep
from ..teams import Teams
from .page_mean import PageMean

if TYPE_CHECKING:
    from ..config import SantaConfig


class RopeBlocks(PageMean):
    """:class:`PageMean` on the last part of a key, which the model rotates."""

    name = "rope_blocks"
    about = "pages of largest mean rotary-key score, chosen by the heads of a group together"

    def summarised(self, pages: Teams, rows: Rows) -> Teams:
        return replace(pages, routing_keys=pages.routing_keys[-1:])

    def page_scores(self, step: DecodeStep, pages: Teams, config: SantaConfig) -> Tensor:
        return scores(step.query[-1:], [pages.routing_keys[-1].float()], step.scale).mean(2, keepdim=True)

    def unit(self, rows: Rows, teams: Teams | None, config: SantaConfig) -> Unit:
        dims = [part.shape[-1] for part in rows.keys]
        return replace(super().unit(rows, teams, config), routing=Fraction(dims[-1], sum(dims)))
