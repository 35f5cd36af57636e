"""Greedy k-means++: the centers that the torch engine starts from, for many problems at once.

Symbols: Q problems, N rows (padded), D dimensions, k clusters (padded), T trials of greedy k-means++.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..in_parts import Work
from ..integers import ceil_div
from .cuda_graph import GraphedStep
from .distances import opposite_factors, products
from .draws import INIT_STREAM, SEEDING_STREAM, draw, generator
from .rules import BATCH_SIZE

# Centers that one step adds: a graph's launch, and the reading of its draws, serves several.
CENTERS_PER_STEP = {"cuda": 8, "cpu": 1}
# Sampling weights are whole multiples of about (largest first distance) * 2^-38, or of more where their sum over all
# problems would not fit in float64's 53 bits: sums have no rounding, so the scan gives the same answer in any order.
WEIGHT_BITS = 38


def trials(k: int) -> int:
    """T, candidates per center: scikit-learn's default."""
    return 2 + int(math.log(k))


def init_size(length: int, k: int) -> int:
    """Rows that greedy k-means++ sees: scikit-learn's default ``init_size``."""
    size = 3 * min(BATCH_SIZE, length)
    return min(size if size >= k else 3 * k, length)


def _host_draws(
    lengths: list[int], sizes: list[int], clusters: list[int], places: int, seed: int
) -> tuple[Tensor, Tensor]:
    """The init subset (Q, n) int64, and uniforms (Q, places, T) float64 by which candidates are drawn."""
    problems = list(zip(lengths, sizes, clusters, strict=True))
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(problems))}  # alike ones have the same draws
    subset = torch.zeros(len(kinds), max(sizes), dtype=torch.int64)
    draws = torch.zeros(len(kinds), places, trials(max(clusters)), dtype=torch.float64)
    for (length, size, cluster), q in kinds.items():
        if size == length:
            subset[q, :size] = torch.arange(size)
        else:
            subset[q, :size] = (draw((size,), generator(seed, INIT_STREAM)) * length).long()
        shape = (cluster, trials(cluster))
        draws[q, :cluster, : shape[1]] = draw(shape, generator(seed, SEEDING_STREAM))
    own = torch.tensor([kinds[problem] for problem in problems])
    return subset[own], draws[own]


def seed_centers(table: Tensor, width: int, lengths: list[int], clusters: list[int], seed: int) -> Work[Tensor]:
    """Greedy k-means++ on the init subset: centers (Q, k, D) float32. Nothing in the loop waits for the device.

    Args:
        table: (Q, N, W) as of :func:`row_factors`.
        width: D.
        lengths, clusters: N and k of each problem.
        seed: the seed xi.
    """
    problems, rows, _ = table.shape
    device = table.device
    sizes = [init_size(n, k) for n, k in zip(lengths, clusters, strict=True)]
    n, k = max(sizes), max(clusters)
    at_once = CENTERS_PER_STEP[device.type]
    places = 1 + ceil_div(k - 1, at_once) * at_once  # places from k on are never read
    subset, draws = _host_draws(lengths, sizes, clusters, places, seed)
    ragged_trials = len({trials(cluster) for cluster in clusters}) > 1
    unused = torch.arange(trials(k)) >= torch.tensor([trials(cluster) for cluster in clusters])[:, None]
    unused, draws = unused.to(device), draws.transpose(0, 1).contiguous().to(device)

    pick = (subset + torch.arange(problems)[:, None] * rows).to(device).view(-1)
    right = table.view(problems * rows, -1).index_select(0, pick)
    left = opposite_factors(right, width)
    wide = right.view(problems, n, -1).transpose(1, 2)
    # rows are numbered through all problems: one long scan and search is faster than many short ones
    base = torch.arange(problems, device=device)[:, None] * n
    last = base + torch.tensor(sizes, device=device)[:, None] - 1
    zero = torch.zeros((), dtype=torch.float32, device=device)
    # A padding row is at distance 0 from the start, so it is never drawn.
    nearest = torch.full((problems, n), torch.inf, dtype=torch.float32, device=device)
    nearest.masked_fill_(torch.arange(n, device=device) + base > last, 0.0)

    def distances(candidates: Tensor) -> Tensor:
        """(Q, T, n): what ``nearest`` (Q, n), squared distances to the centers, becomes with each candidate (Q, T)."""
        chosen_rows = left.index_select(0, candidates.view(-1)).view(problems, -1, left.shape[1])
        return products(chosen_rows, wide).clamp_(zero, nearest[:, None])

    chosen = torch.zeros(problems, places, dtype=torch.int64, device=device)
    chosen[:, :1] = base + (draws[0, :, :1] * (last - base + 1)).long()
    nearest.copy_(distances(chosen[:, :1].contiguous())[:, 0])
    # a power of two, so that float32 weights stay exact; frexp(max) = (m, e) means max < 2^e
    bits = min(WEIGHT_BITS, 53 - (problems * n).bit_length())
    exponent = (torch.frexp(nearest.amax(1, keepdim=True))[1] - bits).clamp_(min=-126)
    quantum = torch.ldexp(torch.ones_like(nearest[:, :1]), exponent)
    weights = torch.zeros(problems, n, dtype=torch.float64, device=device)
    scan = torch.zeros(problems * n + 1, dtype=torch.float64, device=device)
    sums, starts, ends = scan[1:], scan[:-1:n, None], scan[n::n, None]
    place = torch.arange(1, 1 + at_once, device=device)

    def add_centers() -> None:
        added = []
        for uniforms in draws.index_select(0, place):
            torch.div(nearest, quantum, rounding_mode="trunc", out=weights)
            torch.cumsum(weights.view(-1), 0, out=sums)
            target = torch.lerp(starts, ends, uniforms)
            candidates = torch.minimum(torch.searchsorted(sums, target, right=True), last)
            after = distances(candidates)
            potential = after.sum(-1)
            if ragged_trials:
                potential.masked_fill_(unused, torch.inf)
            best = potential.argmin(1, keepdim=True)
            torch.gather(after, 1, best[:, :, None].expand(-1, 1, n), out=nearest[:, None])
            added.append(candidates.gather(1, best))
        chosen.index_copy_(1, place, torch.cat(added, dim=1))
        place.add_(at_once)

    calls = ceil_div(k - 1, at_once)
    add = GraphedStep(add_centers, device, calls)
    yield 0.0
    for call in range(calls):
        add()
        yield (call + 1) / calls
    return right.index_select(0, chosen[:, :k].flatten())[:, :width].reshape(problems, k, width).float()
