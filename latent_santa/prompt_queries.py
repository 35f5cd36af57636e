"""Queries of a prompt's last tokens, which some methods choose rows by once, when the prompt is grouped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .peers import Peers
from .rows import Rows, scores

EVERY = 1 << 40  # as a number of last tokens: all that there are


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

    def weights(self, rows: Rows, last: int, at_once: int = 1) -> Tensor:
        """Attention weights of the prompt's ``last`` tokens (W or fewer), summed over them.

        Each sees the rows up to its own. Tokens that are padding add nothing.

        Args:
            rows: the prefill cache, N rows.
            at_once: tokens whose weights are formed together.

        Returns:
            ``(B, G, H, N)`` float32, at most ``last``.
        """
        length, held = rows.length, self.parts[0].shape[3]
        place = torch.arange(length, device=rows.values.device)
        total = torch.zeros(*self.parts[0].shape[:3], length, dtype=torch.float32, device=rows.values.device)
        for own in place[length - min(last, held) :].split(at_once):  # the tokens' own rows
            asked = tuple(part.index_select(3, own - (length - held)).flatten(2, 3) for part in self.parts)
            s = scores(asked, rows.keys, self.scale).unflatten(2, (-1, len(own)))
            seen = self.visible[:, None] & (place <= own[:, None]) & self.visible[:, own, None]
            seen = seen[:, None, None]
            # of padding tokens every row is hidden, and a softmax over none is NaN
            total += s.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0.0).sum(3)
        return total

    def over_heads(self, weights: Tensor) -> Tensor:
        """The mean of ``weights (B, G, H, N)`` over all heads of the layer, ``(B, 1, 1, N)``, whoever has them."""
        mean = weights.mean((1, 2), keepdim=True)
        return mean if self.others is None else self.others.sum(mean) / self.others.world
