"""SparQ (Ribar et al., 2024): rows ranked by a quarter of the query's dimensions, and a mean value for the others.

Rule: the r = d / 4 dimensions in which a group's queries are largest together (sum of |q|) are read of every key. A
head's score from them is divided by sqrt(c), c being the share of its |q| in them. The S prompt rows whose scores sum
to most over the heads are attended exactly by all of them. With a the softmax weight of attended rows by the scores
from r dimensions, the output is a times that attention plus 1 - a times the mean value of all rows. In MLA a dimension
is one of latent or rotary key, and the group is all heads.

Not reproduced: the source sets r and S apart (r = d / 4 is among its settings), stores keys a second time by dimension,
and gives a quarter of S to the most recent rows; here generated rows are the exact suffix, as in SANTA++.

Count: m = N r / d and one for the mean value (d / r parts, rounded up), 0 where S covers the prompt; u = S; e = the
suffix. Equation 13: (m + 2 (u + e)) / 2N; Equation 14: (m + u + e) / N.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..access import Unit, partial_unit
from ..integers import ceil_div
from ..rows import Rows
from ..sampling import select_top, take_all
from ..step import DecodeStep, Output
from ..teams import Teams
from .base import Choose
from .gumbel_rows import GumbelRows, attend_scanned, prompt_scores

if TYPE_CHECKING:
    from ..config import SantaConfig

SHARE = 4  # of the dimensions one in so many is read


class SparQ(GumbelRows):
    """:class:`GumbelRows` with another choice of rows, and a mean value for the others."""

    name = "sparq"
    about = "rows ranked by a quarter of the query's dimensions, and a mean value for the others"
    settings = ("budget", "first_token")

    def attend(self, step: DecodeStep, config: SantaConfig, choose: Choose) -> Output:
        phi, prompt = prompt_scores(step)
        if self.full(step, config):
            output = attend_scanned(step, phi, prompt, take_all(prompt[:, None].expand(-1, step.groups, -1)))
            return replace(output, routing=torch.zeros_like(output.routing))
        rough = rough_scores(step)
        together = rough.sum(2, keepdim=True).masked_fill(phi[:, :, :1] == -torch.inf, -torch.inf)
        picked = select_top(together, config.budget)
        output = attend_scanned(step, phi, prompt, picked)
        kept = picked.union.index_fill(2, step.suffix.index, True)
        a = rough.softmax(-1).masked_fill(~kept[:, :, None], 0.0).sum(-1).clamp(0.0, 1.0)
        out = a[..., None] * output.out + (1 - a[..., None]) * mean_value(step)[:, :, None]
        dims = sum(part.shape[-1] for part in step.rows.keys)
        scanned = step.draw.step[:, None] + ceil_div(dims, dimensions(step.rows))
        routing = torch.where(picked.routing > 0, scanned, 0)
        return replace(output, out=out, lse=output.lse - a.log(), routing=routing)

    def unit(self, rows: Rows, teams: Teams | None, config: SantaConfig) -> Unit:
        return partial_unit(rows, Fraction(dimensions(rows) * rows.keys[0].element_size()))


def dimensions(rows: Rows) -> int:
    """r, the dimensions of a key that are read."""
    return max(1, sum(part.shape[-1] for part in rows.keys) // SHARE)


def rough_scores(step: DecodeStep) -> Tensor:
    """Scores of all visible rows from the group's r largest query dimensions, ``(B, G, H, N)``, -inf elsewhere."""
    query, keys = torch.cat(step.query, -1).float(), torch.cat(step.rows.keys, -1)
    index = query.abs().sum(2).topk(dimensions(step.rows)).indices[:, :, None]
    mine = query.gather(-1, index.expand(-1, -1, step.heads, -1))
    read = keys.gather(-1, index.expand(-1, -1, keys.shape[2], -1)).float()
    covered = (mine.abs().sum(-1) / query.abs().sum(-1).clamp_min(1e-30)).clamp_min(1e-30)
    s = mine @ read.transpose(-1, -2) * step.scale / covered.sqrt()[..., None]
    return s if step.visible is None else s.masked_fill(~step.visible[:, None, None], -torch.inf)


def mean_value(step: DecodeStep) -> Tensor:
    """The mean of all visible rows' values, ``(B, G, V)`` float32."""
    values = step.rows.values.float()
    if step.visible is None:
        return values.mean(2)
    seen = step.visible[:, None, :, None]
    return values.masked_fill(~seen, 0.0).sum(2) / seen.sum(2).clamp_min(1)
