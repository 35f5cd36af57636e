"""H2O (Zhang et al., 2023): the rows that all prompt tokens together attended most ("heavy hitters"), and the last.

Rule: the attention weights of all of the prompt's tokens are summed per row and head; each head keeps the prompt's
floor(S / 2) last rows and, of the others, those of largest sum, S rows in all. Rows of a further turn have the sums of
that turn's own tokens. With ``estimator="pooled"`` every head of a sharing group attends the rows that its heads keep.

Not reproduced: the source keeps S rows from the start, so that a prompt's later tokens attend kept rows only, and it
goes on to sum weights and to drop a row at every decoding step. Here the sums are those of the prompt's full attention,
rows are chosen once, and generated rows are the exact suffix. It drops the other rows, where this patch keeps the whole
cache.

The queries of all prompt tokens stay with the cache: heads times the head's dimension numbers per row and layer.

Count: m = 0; u = the union of the heads' rows, at least floor(S / 2); e = the suffix. Equation 13: 2 (u + e) / 2N;
Equation 14: (u + e) / N, N being rows of the whole history. The sums belong to the prefill, which is not counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..prompt_queries import EVERY, PromptQueries
from ..rows import Rows
from ..teams import Teams
from .base import Method
from .snapkv import SnapKV

if TYPE_CHECKING:
    from ..config import SantaConfig

PIECE = 1 << 24  # weights that are formed at once


class H2O(SnapKV):
    """:class:`SnapKV` with other votes, and with last rows that follow the end of the latest turn."""

    name = "h2o"
    about = "rows kept at prefill by the attention of all prompt tokens, and the last rows"
    window = EVERY
    grouped_by = Method.grouped_by

    def votes(self, queries: PromptQueries, rows: Rows, member: Tensor, config: SantaConfig) -> Tensor:
        of_one = queries.parts[0][..., 0, 0].numel() * rows.length
        sums = queries.weights(rows, EVERY, max(1, PIECE // of_one))
        return sums.masked_fill(~member[:, None, None], 0.0)

    def ranks(self, teams: Teams, config: SantaConfig) -> Tensor:
        real = teams.sizes > 0
        late = real & (real.cumsum(-1) > teams.count[..., None] - config.budget // 2)
        return super().ranks(teams, config).masked_fill(late[:, :, None], float("inf"))
