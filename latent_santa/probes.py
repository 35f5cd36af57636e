"""Probe fingerprints (Appendix B.5): rows clustered by how a prompt's last queries score them, not by their keys.

A row's fingerprint holds its products with the last 64 queries of all heads that share it. Each dimension is
standardised over the rows that are grouped, so that neither the scale nor a query's length matters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .prompt_queries import PromptQueries
from .rows import Rows, scores

PROBES = 64  # queries


def fingerprints(queries: PromptQueries, rows: Rows, member: Tensor) -> Tensor:
    """What the k-means of ``parents="probes"`` clusters, ``(B, G, N, H W)`` float32, 0 for rows that take no part.

    A dimension on which all rows agree, or whose query is that of a padding token, is 0 for all of them.

    Args:
        queries: those of the rows' last W tokens.
        rows: N rows.
        member: ``(B, N)`` bool, rows to group.
    """
    batch, groups, heads, probes = queries.parts[0].shape[:4]
    real = queries.visible[:, -probes:]
    shape = (batch, groups, rows.length, heads * probes)
    found = torch.zeros(shape, dtype=torch.float32, device=rows.values.device)
    for b in range(batch):
        # real rows and real queries alone, so that a padded sequence is the same clustering problem as alone
        own = member[b].nonzero().flatten()
        asked = tuple(part[b : b + 1, :, :, real[b]].flatten(2, 3) for part in queries.parts)
        products = scores(asked, (part[b : b + 1, :, own] for part in rows.keys), 1.0)[0].transpose(1, 2)
        spread = products.std(1, correction=0, keepdim=True)
        standard = (products - products.mean(1, keepdim=True)) / spread
        found[b, :, own, : standard.shape[-1]] = torch.where(spread > 0, standard, 0.0)
    return found
