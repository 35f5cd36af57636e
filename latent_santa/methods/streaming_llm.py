"""StreamingLLM (Xiao et al., 2024): the first rows of a sequence and its most recent ones, whatever the query.

Rule: of the budget S, four rows are the sequence's first ("attention sinks") and S - 4 its last, the row of the query's
own token included. Generated rows move the window on: they too are left out once they are older.

Not reproduced: the source numbers positions within its cache, so that a stream may grow without end; here rows keep the
rotary positions that they were written with. It also drops rows, where this patch keeps the whole cache.

Count: m = 0; u + e = min(S, N), u of them prompt rows and e generated ones. Equation 13: 2 (u + e) / 2N; Equation 14:
(u + e) / N, N being rows of the whole history.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..estimator import weighted_sums
from ..rows import scores
from ..sampling import listed
from ..step import DecodeStep, Output
from .base import Choose, Method

if TYPE_CHECKING:
    from ..config import SantaConfig

SINKS = 4


class StreamingLLM(Method):
    name = "streaming_llm"
    about = "the first four rows and the most recent ones"
    settings = ("budget", "first_token")
    apart = True

    def check(self, config: SantaConfig) -> None:
        if config.budget <= SINKS:
            raise ValueError(
                f"budget={config.budget}: streaming_llm reads the first {SINKS} rows and the S - {SINKS} most recent "
                f"ones, so S must be more than {SINKS}"
            )

    def attend(self, step: DecodeStep, config: SantaConfig, choose: Choose) -> Output:
        rows, device = step.rows, step.rows.values.device
        seen = step.visible
        if seen is None:
            seen = torch.ones(step.batch, rows.length, dtype=torch.bool, device=device)
        place = seen.cumsum(-1) - 1
        recent = seen.sum(-1, keepdim=True) - (config.budget - SINKS)
        kept = seen & ((place < SINKS) | (place >= recent))
        every = torch.arange(rows.length, device=device).expand(step.batch, 1, -1)
        index = listed(kept[:, None], every, min(config.budget, rows.length)).expand(-1, step.groups, -1)
        read = rows.take(index)
        s = scores(step.query, read.keys, step.scale).masked_fill((index < 0)[:, :, None], -torch.inf)
        out, lse = weighted_sums(s, read.values)
        generated = torch.zeros_like(kept[:1]).index_fill(1, step.suffix.index, True)
        union, exact = ((kept & part).sum(-1)[:, None].expand(-1, step.groups) for part in (~generated, generated))
        return Output(out, lse, torch.zeros_like(union), union, exact)

    def full(self, step: DecodeStep, config: SantaConfig) -> bool:
        return step.rows.length <= config.budget
