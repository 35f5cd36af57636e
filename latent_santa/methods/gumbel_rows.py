"""Rows sampled without replacement from the exact attention weights: SANTA++ with one team per row.

This is the limit that Section 5 names: every key its own team and its own representative. It is not the paper's SANTA,
which draws with replacement (:mod:`latent_santa.methods.santa`); it is the best that sampling single rows can do after
a scan of every key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..access import Unit, scanned_unit
from ..estimator import santa_attention
from ..rows import Rows
from ..step import DecodeStep, Output, Sampling
from ..teams import Teams
from .base import Choose, Method

if TYPE_CHECKING:
    from ..config import SantaConfig


class GumbelRows(Method):
    name = "gumbel_rows"
    about = "single rows without replacement, after a scan of every key"
    settings = ("budget", "estimator", "noise", "seed", "first_token")

    def attend(self, step: DecodeStep, config: SantaConfig, choose: Choose) -> Output:
        return santa_attention(step, Sampling(config.budget, config.estimator, config.noise))

    def full(self, step: DecodeStep, config: SantaConfig) -> bool:
        return step.rows.length - step.suffix.index.numel() <= config.budget

    def unit(self, rows: Rows, teams: Teams | None) -> Unit:
        return scanned_unit(rows)
