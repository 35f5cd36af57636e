"""The S prompt rows of largest exact score per head, attended without correction: exact top-k attention (Gupta et al.,
2021), which no method that picks rows by cheaper scores should be expected to beat at an equal S.

The source computes all queries of a block in chunks to save memory in training and prefill; that is not reproduced.

Count: m = N keys of the scan, u = the union of the heads' rows, e = the suffix. Equation 13: (N + u + e) / 2N, since
the scan read the keys; Equation 14: N / N, since it read the latents. The bound of an oracle that need not scan is
(u + e) / N in both layouts; tables show it beside the count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..sampling import select_top, take_all
from ..step import DecodeStep, Output
from .base import Choose
from .gumbel_rows import GumbelRows, attend_scanned, prompt_scores

if TYPE_CHECKING:
    from ..config import SantaConfig


class OracleRows(GumbelRows):
    """:class:`GumbelRows` with another choice of rows."""

    name = "oracle_rows"
    about = "the rows of largest exact score, after a scan of every key"
    settings = ("budget", "estimator", "first_token")

    def attend(self, step: DecodeStep, config: SantaConfig, choose: Choose) -> Output:
        phi, prompt = prompt_scores(step)
        if phi.shape[-1] <= config.budget:
            picked = take_all(prompt[:, None].expand(-1, step.groups, -1))
        else:
            picked = select_top(phi, config.budget, config.estimator == "pooled")
        return attend_scanned(step, phi, prompt, picked)
