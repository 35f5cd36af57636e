"""SANTA++'s sampled teams with c_g = 1: what the inclusion correction of Equation 7 is worth.

A baseline of our own. The draws are those of SANTA++ under the same settings and seed, so a step on equal rows reads
the same teams. A team that is rarely drawn weighs too little on average: nothing makes up for the steps without it.

Count: as SANTA++. m = M representatives, 0 where K >= M (in two stages the summaries and representatives that both
score); u = the union of the heads' teams; e = the suffix. Equation 13: (m + 2 (u + e)) / 2N; Equation 14:
(m + u + e) / N.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..estimator import attend_teams
from ..step import DecodeStep, Output
from ..two_stage import select_teams
from .base import Choose
from .santapp import SantaPlusPlus

if TYPE_CHECKING:
    from ..config import SantaConfig


class Uncorrected(SantaPlusPlus):
    """SANTA++ with every correction at 1."""

    name = "uncorrected"
    about = "SANTA++'s sampled teams, weighted as if they had been certain"
    settings = tuple(name for name in SantaPlusPlus.settings if name != "backend")

    def attend(self, step: DecodeStep, config: SantaConfig, choose: Choose) -> Output:
        sampling = self.sampling(config)
        picked = select_teams(step, sampling)
        used = picked.log_correction.isfinite()
        picked = replace(picked, log_correction=picked.log_correction.masked_fill(used, 0.0))
        return attend_teams(step, picked, sampling.k)
