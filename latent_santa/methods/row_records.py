"""Records for methods that choose single rows by something kept beside them: every prompt row is a team of its own.

Teams already follow a cache's sequences and further turns, and so do the rows' records instead of routing keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..teams import Teams


def row_teams(member: Tensor, groups: int) -> Teams:
    """One team per row of ``member (B, N)`` bool, in order, for each of ``groups``; without routing keys."""
    batch, length = member.shape
    count = member.sum(-1)
    most = max(int(count.max()), 1)
    team = torch.where(member, member.long().cumsum(-1) - 1, -1)
    row = torch.full((batch, most + 1), -1, dtype=torch.int64, device=member.device)
    every = torch.arange(length, device=member.device).expand(batch, -1)
    row = row.scatter_(1, torch.where(member, team, most), every)[:, :-1]

    def shared(part: Tensor) -> Tensor:
        return part.int()[:, None].expand(-1, groups, *part.shape[1:])

    return Teams(shared(row >= 0), shared(count), shared(team), shared(row), list(range(1, most + 1)))


def of_rows(values: Tensor, teams: Teams) -> Tensor:
    """Each team's entry of its rows' ``values (B, G, H, N)``, as ``(B, G, H, M)``; padding teams get row 0's."""
    row = teams.representative.long().clamp_min(0)[:, :, None]
    return values.gather(-1, row.expand(-1, -1, values.shape[2], -1))
