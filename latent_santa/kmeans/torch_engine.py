"""The torch engine of minibatch k-means: greedy k-means++ and minibatch updates over many problems at once.

Symbols: Q problems, N rows (padded), D dimensions, k clusters (padded).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..in_parts import Work, share_of
from .distances import HALF_TYPES, center_factors, copies_of, nearest_centers, row_factors
from .fitting import fit_centers
from .rules import BATCH_SIZE, refuse_nonfinite
from .seeding import init_size, seed_centers, trials

# Bytes of everything that is proportional to the problems of one group, except a block of distances.
GROUP_BYTES = 2560 * 2**20
LARGEST_HALF_NORM = 2.0**23
# numbers whose squares are formed at once
SQUARED_NUMBERS = 2**26


def torch_labels(points: Tensor, lengths: list[int], clusters: list[int], seed: int) -> Work[Tensor]:
    """Labels ``(Q, N)`` int64 of ``points (Q, N, D)``, -1 from ``lengths[q]`` on; arguments as in ``minibatch_kmeans``.

    Raises:
        ValueError: a real row is not finite.
    """
    labels = torch.full(points.shape[:2], -1, dtype=torch.int64, device=points.device)
    group, problems = group_size(points, lengths, clusters), points.shape[0]
    for first in range(0, problems, group):
        part = slice(first, first + group)
        longest = max(lengths[part])
        rows = _working_copy(points[part, :longest])
        work = cluster_group(rows, lengths[part], clusters[part], seed, first)
        labels[part, :longest] = yield from share_of(work, first / problems, min(first + group, problems) / problems)
    return labels


def group_size(points: Tensor, lengths: list[int], clusters: list[int]) -> int:
    """Problems clustered together: on CUDA as many as fit in the memory limit, were each as large as the largest."""
    if not points.is_cuda:
        return 1  # a matrix product of another shape may round differently: alone, a result depends on nothing else
    width, item = points.shape[2], 2 if points.dtype in HALF_TYPES else 4
    k, seeding = max(clusters, default=1), max(map(init_size, lengths, clusters), default=1)
    table = item * width * max(lengths, default=1)
    seeding_bytes = seeding * (3 * item * width + 12 * trials(k))
    step_bytes = item * BATCH_SIZE * (2 * width + k) + 20 * k * width
    return max(1, GROUP_BYTES // (table + max(seeding_bytes, step_bytes)))


def _working_copy(points: Tensor) -> Tensor:
    """``points`` contiguous, in a half type if CUDA can multiply it exactly, else in float32."""
    if points.is_cuda and "dtype" in torch.ops.aten.bmm.overloads():
        if points.dtype in HALF_TYPES:
            return points.contiguous()
        half = points.to(torch.bfloat16, memory_format=torch.contiguous_format)
        if bool((half == points).all()):
            return half
    return points.to(torch.float32, memory_format=torch.contiguous_format)


def cluster_group(points: Tensor, lengths: list[int], clusters: list[int], seed: int, first: int = 0) -> Work[Tensor]:
    """Labels (Q, N) of one group: seed, fit, assign. ``first`` is the group's first problem, for the error text."""
    length = torch.tensor(lengths, device=points.device)
    k = torch.tensor(clusters, device=points.device)
    padding = torch.arange(points.shape[1], device=points.device) >= length[:, None]
    at_once = max(1, SQUARED_NUMBERS // max(points[0].numel(), 1))
    norms = torch.cat([part.float().square().sum(-1) for part in points.split(at_once)]).masked_fill_(padding, 0.0)
    finite = norms.isfinite().all(1)
    sound = finite.all()
    yield 0.1  # what the host reads behind a part, the device has had the time to compute
    if not sound:
        refuse_nonfinite(first + int(finite.long().argmin()))

    if points.dtype == torch.float16 and not 1.0 <= float(norms.max()) <= LARGEST_HALF_NORM:
        points = points.float()  # float16 could not hold the norms, or not precisely
    table = row_factors(points, norms)
    centers = yield from share_of(seed_centers(table, points.shape[2], lengths, clusters, seed), 0.1, 0.2)
    real = torch.arange(centers.shape[1], device=points.device) < k[:, None]
    centers = yield from share_of(fit_centers(table, centers, real, length, k, seed), 0.2, 1.0)
    facing = center_factors(centers, real, table)
    copies = copies_of(table)
    parts = (torch.cat([part] * copies, dim=-1) for part in table.split(BATCH_SIZE, dim=1))
    labels = torch.cat([nearest_centers(part, facing)[1] for part in parts], dim=1)
    return labels.masked_fill_(padding, -1)
