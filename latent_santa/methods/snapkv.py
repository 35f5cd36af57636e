"""SnapKV (Li et al., 2024): rows kept once, at the end of the prefill, by the attention of the prompt's last tokens.

Rule: the last W tokens' attention weights are summed per row and averaged over five neighbouring rows; each head keeps
the S - W rows of largest sum and the W last rows, W = 32 (half of S where that is less). Rows of a further turn are
voted for by that turn's own last tokens, and the S largest votes of all turns stay. With ``estimator="pooled"`` every
head of a sharing group attends the rows that all its heads keep, which reads no row more.

Not reproduced: the source drops the other rows, where this patch keeps the whole cache; its W is 32 whatever S.

Count: m = 0, since nothing is scored while decoding; u = the union of the heads' rows, which in MLA may be most rows;
e = the suffix. Equation 13: 2 (u + e) / 2N; Equation 14: (u + e) / N, N being rows of the whole history.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from ..estimator import attend_teams
from ..prompt_queries import PromptQueries
from ..routing_keys import PlainKeys
from ..rows import Rows
from ..sampling import select_top, take_all
from ..step import DecodeStep, Output
from ..teams import Teams
from .base import Choose, Method
from .row_records import of_rows, row_teams

if TYPE_CHECKING:
    from ..config import SantaConfig

NEIGHBOURS = 5


class SnapKV(Method):
    name = "snapkv"
    about = "rows kept at prefill by the attention of the prompt's last tokens"
    settings: tuple[str, ...] = ("budget", "estimator", "first_token")
    window = 32

    def check(self, config: SantaConfig) -> None:
        if config.budget < 2:
            raise ValueError(f"budget={config.budget}: {self.name} keeps last rows and others, so S is at least 2")

    def grouped_by(self, config: SantaConfig) -> tuple[str, ...]:
        return ("budget",)  # W depends on it

    def build_by_queries(
        self, queries: Iterable[PromptQueries], rows: Sequence[Rows], member: Tensor, config: SantaConfig
    ) -> Iterable[Teams]:
        """One record per row, with the heads' votes ``(B, G, M, H)`` instead of a routing key."""
        for own, layer in zip(queries, rows, strict=True):
            mine = member.to(layer.values.device)
            teams = row_teams(mine, layer.values.shape[1])
            votes = of_rows(self.votes(own, layer, mine, config), teams)
            yield replace(teams, routing_keys=(PlainKeys(votes.transpose(2, 3).contiguous()),))

    def votes(self, queries: PromptQueries, rows: Rows, member: Tensor, config: SantaConfig) -> Tensor:
        """What each head ranks the rows ``member (B, N)`` by, ``(B, G, H, N)``."""
        window = min(self.window, config.budget // 2)
        weights = queries.weights(rows, window)
        place = torch.arange(rows.length, device=member.device)
        late = place >= rows.length - window
        weights = weights.masked_fill(~(member & ~late)[:, None, None], 0.0)
        pooled = avg_pool1d(weights.flatten(0, 1), NEIGHBOURS, stride=1, padding=NEIGHBOURS // 2).view_as(weights)
        # no sum of weights exceeds W; the latest of all turns' last rows come first
        return torch.where(late, window + place.to(pooled.dtype), pooled)

    def ranks(self, teams: Teams, config: SantaConfig) -> Tensor:
        """What each head ranks the rows of all turns by, ``(B, G, H, M)``."""
        return teams.routing_keys[0].float().transpose(2, 3)

    def attend(self, step: DecodeStep, config: SantaConfig, choose: Choose) -> Output:
        teams, k = step.teams, config.budget
        assert teams is not None, "this method keeps rows"
        if teams.M <= k:
            picked = take_all(teams.sizes > 0)
        else:
            votes = self.ranks(teams, config).masked_fill((teams.sizes == 0)[:, :, None], float("-inf"))
            picked = select_top(votes, k, "estimator" in self.settings and config.estimator == "pooled")
        output = attend_teams(step, picked, k)
        return replace(output, routing=torch.zeros_like(output.routing))
