"""InfLLM (Xiao et al., 2024): blocks ranked by a few representative rows, beside the first block and the last ones.

Rule: a row's local score is its mean score with the queries of the 4,096 tokens behind it, as far as the prompt has
them. The four rows of largest local score represent their block of P rows, and a block is ranked by its
representatives' mean score with the query. Of K = floor(S / P) blocks one is the first, floor(K / 2) are the last, and
the others are those of largest rank. Heads choose together: both scores are those of the heads' mean query.

Not reproduced: the source also prefills this way, gives all rows behind the local window one position, and moves blocks
between CPU and GPU. Its blocks have 128 rows, and its 128 first, 4,096 last and 2,048 retrieved rows depend on no S.
All heads of a layer choose together there; in GQA each KV head chooses blocks of its own here. Its program sums local
attention weights where the paper has local scores.

The queries of all prompt tokens stay with the cache: heads times the head's dimension numbers per row and layer.

Count: m = M blocks, 0 where K >= M: a mean score is the score of the mean key, so a block costs one vector; u = the
rows of the chosen blocks, at most S; e = the suffix. Equation 13: (m + 2 (u + e)) / 2N; Equation 14: (m + u + e) / N.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..parents import contiguous_parents
from ..partition import Partition
from ..prompt_queries import EVERY, PromptQueries
from ..rows import Rows
from ..step import DecodeStep
from ..teams import Teams, build_centroids
from .page_mean import PageMean

if TYPE_CHECKING:
    from ..config import SantaConfig

LOCAL = 4096  # tokens behind a row whose queries score it
REPRESENTATIVES = 4


class InfLLM(PageMean):
    """:class:`PageMean` with the mean of representatives alone, and with blocks that are always read."""

    name = "infllm"
    about = "blocks ranked by the rows that the tokens behind them scored most, with the first block and the last ones"
    settings = ("parent_size", "budget", "routing_dtype", "first_token")
    window = EVERY

    def check(self, config: SantaConfig) -> None:
        if config.budget < 2 * config.parent_size:
            raise ValueError(
                f"budget={config.budget}: infllm reads the first block, the last ones and others, so S must be at "
                f"least 2 P = {2 * config.parent_size}: use a larger S or smaller blocks"
            )

    def build_by_queries(
        self, queries: Iterable[PromptQueries], rows: Sequence[Rows], member: Tensor, config: SantaConfig
    ) -> Iterable[Teams]:
        spans = contiguous_parents(member, config.parent_size)
        for asked, layer in zip(queries, rows, strict=True):
            blocks = build_centroids(layer, spans.to(layer.values.device).expand(-1, layer.values.shape[1], -1))
            stand_in = strongest(local_scores(asked, layer), blocks)
            yield replace(blocks, routing_keys=build_centroids(layer, stand_in).routing_keys)

    def page_scores(self, step: DecodeStep, pages: Teams, config: SantaConfig) -> Tensor:
        real = pages.sizes > 0
        rank, last = real.cumsum(-1), self.teams_per_head(config) // 2
        always = real & ((rank == 1) | (rank > pages.count[..., None] - last))
        return super().page_scores(step, pages, config).masked_fill(always[:, :, None], float("inf"))


def local_scores(queries: PromptQueries, rows: Rows) -> Tensor:
    """Each row's mean score with the heads' mean queries of the tokens behind it, ``(B, G, N)`` float64.

    It is 0 where no token follows, and for rows of earlier turns.
    """
    held = queries.parts[0].shape[3]
    first, place = rows.length - held, torch.arange(held, device=rows.values.device)
    begin, end = place + 1, (place + 1 + LOCAL).clamp_max(held)

    def behind(values: Tensor) -> Tensor:
        """Sums over the tokens behind each of the ``held`` ones, of ``(B, G, W, D)``."""
        sums = pad(values.cumsum(2), (0, 0, 1, 0))
        return sums[:, :, end] - sums[:, :, begin]

    seen = queries.visible[:, None, first:, None].double()
    count = behind(seen).clamp_min(1)
    found = torch.zeros(*rows.values.shape[:2], held, dtype=torch.float64, device=rows.values.device)
    for part, key in zip(queries.parts, rows.keys, strict=True):
        mean = behind(part.double().mean(2) * seen) / count
        found += (mean * key[:, :, first:].double()).sum(-1)
    return pad(found * queries.scale, (first, 0))


def strongest(values: Tensor, blocks: Teams) -> Tensor:
    """The block of each row that stands for it, ``(B, G, N)`` int64, -1 elsewhere: its rows of largest value.

    Args:
        values: ``(B, G, N)``; of equal ones the earlier row is taken.
    """
    block = blocks.team_of_row.long().flatten(0, 1)
    groups, values = Partition(block), values.flatten(0, 1)
    left = groups.member
    for _ in range(REPRESENTATIVES):
        best = groups.first_extreme(values, left, True)[:-1].view(len(block), -1)  # N where a block has no more rows
        left = pad(left, (0, 1)).scatter(1, best, False)[:, :-1]
    return torch.where(groups.member & ~left, block, -1).view(blocks.team_of_row.shape)
