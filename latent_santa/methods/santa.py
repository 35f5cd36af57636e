"""SANTA (Lee et al., 2026): S draws with replacement from the exact attention weights, values averaged.

Every key is scored on every call, which Equation 13's counter books as N keys; the distinct rows that any head of the
group drew are read once more for their values. In MLA a scanned latent is the value as well, so it is counted once:
SANTA reads 100 % there. The draws cover all visible rows, generated ones included, so there is no exact suffix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..access import Unit, scanned_unit
from ..noise import uniform_noise
from ..rows import Rows, scores
from ..step import DecodeStep, Output
from ..teams import Teams
from .base import Choose, Method

if TYPE_CHECKING:
    from ..config import SantaConfig


class Santa(Method):
    name = "santa"
    about = "S rows drawn with replacement after a scan of every key"
    settings = ("budget", "draws", "noise", "seed", "first_token")

    def attend(self, step: DecodeStep, config: SantaConfig, choose: Choose) -> Output:
        count = 1 if config.draws == "systematic" else config.budget
        keyed = (step.draw.key, step.draw.step, step.draw.layer)
        shared = config.noise == "shared"
        uniforms = uniform_noise(*keyed, step.groups, step.heads, count, shared, step.draw.first)
        if config.draws == "systematic":
            strata = torch.arange(config.budget, dtype=torch.float64, device=uniforms.device)
            uniforms = (strata + uniforms) / config.budget
        return drawn_rows(step, uniforms)

    def full(self, step: DecodeStep, config: SantaConfig) -> bool:
        return False  # draws with replacement never cover every row

    def unit(self, rows: Rows, teams: Teams | None, config: SantaConfig) -> Unit:
        return scanned_unit(rows)


def drawn_rows(step: DecodeStep, uniforms: Tensor) -> Output:
    """The plain average of the values of the drawn rows (:func:`latent_santa.naive.santa` in loops).

    Args:
        step: the step; its teams and suffix are not used.
        uniforms: ``(B, G, H, S)`` float64 in (0, 1), each turned into a row by the cumulated attention weights.
    """
    logits = scores(step.query, step.rows.keys, step.scale)
    seen = step.visible
    if seen is not None:
        logits = logits.masked_fill(~seen[:, None, None], -torch.inf)
    lse = logits.logsumexp(-1)
    shift = lse.clamp_min(torch.finfo(lse.dtype).min)
    mass = (logits - shift[..., None]).double().exp().cumsum(-1)
    # the right-hand search never ends on a row without mass
    index = torch.searchsorted(mass, uniforms * mass[..., -1:], right=True).clamp_max(mass.shape[-1] - 1)
    weights = torch.zeros_like(logits).scatter_add_(-1, index, torch.ones_like(uniforms, dtype=logits.dtype))
    out = (weights / uniforms.shape[-1]) @ step.rows.values.to(logits.dtype)
    union = (weights > 0).any(2).sum(-1)
    scanned = step.draw.step[:, None].expand_as(union)
    return Output(out, lse, scanned, union, torch.zeros_like(union))
