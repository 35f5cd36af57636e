"""Queries of a prompt's last tokens, which some methods choose rows by once, when the prompt is grouped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .peers import Peers
from .rows import Rows, scores


@dataclass(frozen=True)
class PromptQueries:
    """Queries of one layer's last W prompt tokens, as its prefill computed them.

    Attributes:
        parts: ``(B, G, H, W, D_i)`` float32, one per key part of the rows; the last one is that of row N - 1.
        scale: the attention module's own scaling.
        visible: ``(B, N)`` bool, False for padding tokens and their rows.
        others: the processes that have the layer's other sharing groups, or None where all groups are here.
    """

    parts: tuple[Tensor, ...]
    scale: float
    visible: Tensor
    others: Peers | None = None

    def weights(self, rows: Rows, last: int) -> Tensor:
        """Attention weights of the prompt's ``last`` tokens (W or fewer), summed over them.

        Each sees the rows up to its own. Tokens that are padding add nothing.

        Args:
            rows: the prefill cache, N rows.

        Returns:
            ``(B, G, H, N)`` float32, at most ``last``.
        """
        length, held = rows.length, self.parts[0].shape[3]
        place = torch.arange(length, device=rows.values.device)
        total = torch.zeros(*self.parts[0].shape[:3], length, dtype=torch.float32, device=rows.values.device)
        for back in range(min(last, held), 0, -1):
            own = length - back
            s = scores(tuple(part[..., held - back, :] for part in self.parts), rows.keys, self.scale)
            seen = (self.visible & (place <= own) & self.visible[:, own, None])[:, None, None]
            # of padding tokens every row is hidden, and a softmax over none is NaN
            total += s.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0.0)
        return total

    def over_heads(self, weights: Tensor) -> Tensor:
        """The mean of ``weights (B, G, H, N)`` over all heads of the layer, ``(B, 1, 1, N)``, whoever has them."""
        mean = weights.mean((1, 2), keepdim=True)
        return mean if self.others is None else self.others.sum(mean) / self.others.world
