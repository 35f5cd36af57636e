"""TOVA (Oren et al., 2024): rows kept by the attention of the newest token, the same ones for all heads of a layer.

Rule: the S rows of largest weight of the prompt's last token, averaged over all heads. Rows of a further turn are
ranked by that turn's last token, and the S largest of all turns stay.

Not reproduced: the source goes on to drop a row at every decoding step, by the new token's weights, so that its cache
never grows beyond S. Here rows are chosen once per prompt, and generated rows are the exact suffix, as in SANTA++.

Count: m = 0; u = S; e = the suffix. Equation 13: 2 (u + e) / 2N; Equation 14: (u + e) / N, N being rows of the whole
history.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..prompt_queries import PromptQueries
from ..rows import Rows
from .base import Method
from .snapkv import SnapKV

if TYPE_CHECKING:
    from ..config import SantaConfig


class Tova(SnapKV):
    """:class:`SnapKV` with other votes."""

    name = "tova"
    about = "rows kept at prefill by the attention of the prompt's last token, averaged over heads"
    settings = ("budget", "first_token")
    window = 1
    check = Method.check
    grouped_by = Method.grouped_by

    def votes(self, queries: PromptQueries, rows: Rows, member: Tensor, config: SantaConfig) -> Tensor:
        weights = queries.weights(rows, 1)
        return queries.over_heads(weights).expand_as(weights)
