"""Cache rows in one shape for both layouts, so that one estimator serves MLA and GQA."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Rows of one attention layer's cache.

    Attributes:
        keys: key parts, each ``(B, G, N, D_i)``. GQA has one part, the rotated key. MLA has two, the normalised
            content latent and the shared rotary key; a score is the sum of the parts' products.
        values: ``(B, G, N, V)``. In MLA this is the content latent itself, the same tensor as ``keys[0]``.
        fingerprints: ``(B, G, N, F)``, what rows are clustered by with ``parents="probes"``; else None.
    """

    keys: tuple[Tensor, ...]
    values: Tensor
    fingerprints: Tensor | None = None

    @property
    def length(self) -> int:
        """N, rows held, padding rows included."""
        return self.values.shape[2]

    def take(self, index: Tensor) -> Rows:
        """Rows ``index (B, G, C)`` in float32; an index is clamped at 0, so -1 may mark an unused slot."""
        index = index.clamp_min(0)[..., None].long()

        def pick(part: Tensor) -> Tensor:
            return part.gather(2, index.expand(-1, -1, -1, part.shape[-1])).float()

        keys = tuple(pick(part) for part in self.keys)
        values = keys[0] if self.values is self.keys[0] else pick(self.values)
        return Rows(keys, values)


def scores(query: tuple[Tensor, ...], keys: Iterable[Tensor], scale: float) -> Tensor:
    """Scaled query-key scores in float32 (Equation 1), or in float64 where the query is.

    Args:
        query: parts ``(B, G, H, D_i)``, matching ``keys``.
        keys: parts ``(B, G, N, D_i)``.
        scale: the attention module's own scaling, YaRN factors included.

    Returns:
        ``(B, G, H, N)``.
    """
    total = None
    for q, k in zip(query, keys, strict=True):
        q = q if q.dtype == torch.float64 else q.float()
        part = q @ k.to(q.dtype).transpose(-1, -2)
        total = part if total is None else total + part
    assert total is not None, "a query has at least one part"
    return total * scale
