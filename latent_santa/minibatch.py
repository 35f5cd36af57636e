"""The batched PyTorch engine of minibatch k-means: greedy k-means++ and minibatch updates over many problems at once.

Symbols: Q problems, N rows (padded), D dimensions, k clusters (padded), T trials of greedy k-means++.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .distances import (
    HALF_TYPES,
    center_factors,
    copies_of,
    nearest_centers,
    opposite_factors,
    products,
    row_factors,
    write_centers,
)
from .integers import ceil_div
from .replay import Replayed

BATCH_SIZE = 4096
MAX_EPOCHS = 100
MAX_NO_IMPROVEMENT = 10
REASSIGNMENT_RATIO = 0.01

# Minibatches between two looks at the stopping rule by the host.
_STEPS_PER_CHECK = 4
# Centers that one step of the seeding adds: a graph's launch, and the reading of its draws, serves several.
_CENTERS_PER_STEP = {"cuda": 8, "cpu": 1}
# Bytes of everything that is proportional to the problems of one group, except a block of distances.
_GROUP_BYTES = 2560 * 2**20
# Sampling weights of k-means++ are whole multiples of about (largest first distance) * 2^-38, or of more where their
# sum over all problems would not fit in float64's 53 bits: sums have no rounding, so the scan gives the same answer in
# any order.
_WEIGHT_BITS = 38
_LARGEST_HALF_NORM = 2.0**23
_INIT_STREAM, _SEEDING_STREAM, _MINIBATCH_STREAM = range(3)


def refuse_nonfinite(problem: int) -> None:
    """Raise the error that names the first problem with a row that cannot be clustered."""
    raise ValueError(
        f"points[{problem}] has a real row that is not finite or whose squared norm overflows float32: "
        "give finite rows, and set lengths so that padding is not counted"
    )


def torch_labels(
    points: Tensor, lengths: list[int], clusters: list[int], seed: int, group: int | None = None
) -> Tensor:
    """The batched engine, ``group`` problems at a time (default: one on the CPU, as memory allows on CUDA)."""
    problems, _, width = points.shape
    labels = torch.full(points.shape[:2], -1, dtype=torch.int64, device=points.device)
    if group is None:
        # A matrix product of another shape may round differently: one by one, a CPU result depends on nothing else.
        item = 2 if points.dtype in HALF_TYPES else 4
        group = _group_size(lengths, clusters, width, item) if points.is_cuda else 1
    for first in range(0, problems, group):
        part = slice(first, first + group)
        longest = max(lengths[part])
        rows = _working_copy(points[part, :longest])
        labels[part, :longest] = _cluster(rows, lengths[part], clusters[part], seed, first)
    return labels


def _group_size(lengths: list[int], clusters: list[int], width: int, item: int) -> int:
    """Problems that fit in the memory limit together, were each as large as the largest; ``item`` bytes a number."""
    k, seeding = max(clusters, default=1), max(map(_init_size, lengths, clusters), default=1)
    table = item * width * max(lengths, default=1)
    seeding_bytes = seeding * (3 * item * width + 12 * _trials(k))
    step_bytes = item * BATCH_SIZE * (2 * width + k) + 20 * k * width
    return max(1, _GROUP_BYTES // (table + max(seeding_bytes, step_bytes)))


def _working_copy(points: Tensor) -> Tensor:
    """``points`` contiguous, in a half type if CUDA can multiply it exactly, else in float32."""
    if points.is_cuda and "dtype" in torch.ops.aten.bmm.overloads():
        if points.dtype in HALF_TYPES:
            return points.contiguous()
        half = points.to(torch.bfloat16, memory_format=torch.contiguous_format)
        if bool((half == points).all()):
            return half
    return points.to(torch.float32, memory_format=torch.contiguous_format)


def _cluster(points: Tensor, lengths: list[int], clusters: list[int], seed: int, first: int = 0) -> Tensor:
    """Labels (Q, N) of one group: seed, fit, assign. ``first`` is the group's first problem, for the error text."""
    length = torch.tensor(lengths, device=points.device)
    k = torch.tensor(clusters, device=points.device)
    norms = torch.zeros(points.shape[:2], device=points.device)
    for q, n in enumerate(lengths):
        norms[q, :n] = points[q, :n].float().square().sum(-1)
    finite = norms.isfinite().all(1)
    if not finite.all():
        refuse_nonfinite(first + int(finite.long().argmin()))

    if points.dtype == torch.float16 and not 1.0 <= float(norms.max()) <= _LARGEST_HALF_NORM:
        points = points.float()  # float16 could not hold the norms, or not precisely
    table = row_factors(points, norms)
    centers = _seed_centers(table, points.shape[2], lengths, clusters, seed)
    real = torch.arange(centers.shape[1], device=points.device) < k[:, None]
    centers = _fit(table, centers, real, length, k, seed)
    facing = center_factors(centers, real, table)
    copies = copies_of(table)
    parts = (torch.cat([part] * copies, dim=-1) for part in table.split(BATCH_SIZE, dim=1))
    labels = torch.cat([nearest_centers(part, facing)[1] for part in parts], dim=1)
    return labels.masked_fill_(torch.arange(points.shape[1], device=points.device) >= length[:, None], -1)


def _uniforms(seed: int, stream: int) -> torch.Generator:
    """A generator on the host, so that CPU and CUDA see the same draws."""
    # manual_seed of a CPU generator uses 32 bits only: no room to put the stream number beside the seed.
    root = torch.Generator(device="cpu").manual_seed(seed)
    seeds = torch.randint(2**32, (3,), generator=root, device="cpu").tolist()
    return torch.Generator(device="cpu").manual_seed(seeds[stream])


def _draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """float64 uniforms in [0, 1) whose product with a row count stays below it after rounding."""
    return torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu").clamp_(max=1 - 2.0**-32)


def _trials(k: int) -> int:
    return 2 + int(math.log(k))


def _init_size(length: int, k: int) -> int:
    """Rows that greedy k-means++ sees: scikit-learn's default ``init_size``."""
    size = 3 * min(BATCH_SIZE, length)
    return min(size if size >= k else 3 * k, length)


def _seed_centers(table: Tensor, width: int, lengths: list[int], clusters: list[int], seed: int) -> Tensor:
    """Greedy k-means++ on the init subset: centers (Q, k, D) float32. Nothing in the loop waits for the device.

    table: (Q, N, W) as of :func:`row_factors`; width: D.
    """
    problems, rows, _ = table.shape
    device = table.device
    sizes = [_init_size(n, k) for n, k in zip(lengths, clusters, strict=True)]
    n, k = max(sizes), max(clusters)
    at_once = _CENTERS_PER_STEP[device.type]
    places = 1 + ceil_div(k - 1, at_once) * at_once  # those from k on are never read
    subset = torch.zeros(problems, n, dtype=torch.int64)
    draws = torch.zeros(problems, places, _trials(k), dtype=torch.float64)
    alike: dict[tuple[int, int], int] = {}  # problems of one length and cluster number have the same draws
    for q, (length, size, cluster) in enumerate(zip(lengths, sizes, clusters, strict=True)):
        first = alike.setdefault((length, cluster), q)
        if first < q:
            subset[q], draws[q] = subset[first], draws[first]
            continue
        if size == length:
            subset[q, :size] = torch.arange(size)
        else:
            subset[q, :size] = (_draw((size,), _uniforms(seed, _INIT_STREAM)) * length).long()
        shape = (cluster, _trials(cluster))
        draws[q, :cluster, : shape[1]] = _draw(shape, _uniforms(seed, _SEEDING_STREAM))
    ragged_trials = len({_trials(cluster) for cluster in clusters}) > 1
    unused = torch.arange(_trials(k)) >= torch.tensor([_trials(cluster) for cluster in clusters])[:, None]
    unused, draws = unused.to(device), draws.transpose(0, 1).contiguous().to(device)

    pick = (subset + torch.arange(problems)[:, None] * rows).to(device).view(-1)
    right = table.view(problems * rows, -1).index_select(0, pick)
    left = opposite_factors(right, width)
    wide = right.view(problems, n, -1).transpose(1, 2)
    # rows are numbered through all problems: one long scan and search is faster than many short ones
    base = torch.arange(problems, device=device)[:, None] * n
    last = base + torch.tensor(sizes, device=device)[:, None] - 1
    zero = torch.zeros((), device=device)
    # A padding row is at distance 0 from the start, so it is never drawn.
    nearest = torch.full((problems, n), torch.inf, device=device)
    nearest.masked_fill_(torch.arange(n, device=device) + base > last, 0.0)

    def distances(candidates: Tensor) -> Tensor:
        """(Q, T, n): what ``nearest`` (Q, n), squared distances to the centers, becomes with each candidate (Q, T)."""
        chosen_rows = left.index_select(0, candidates.view(-1)).view(problems, -1, left.shape[1])
        return products(chosen_rows, wide).clamp_(zero, nearest[:, None])

    chosen = torch.zeros(problems, places, dtype=torch.int64, device=device)
    chosen[:, :1] = base + (draws[0, :, :1] * (last - base + 1)).long()
    nearest.copy_(distances(chosen[:, :1].contiguous())[:, 0])
    # a power of two, so that float32 weights stay exact; frexp(max) = (m, e) means max < 2^e
    bits = min(_WEIGHT_BITS, 53 - (problems * n).bit_length())
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

    add = Replayed(add_centers, device)
    for _ in range(1, places, at_once):
        add()
    return right.index_select(0, chosen[:, :k].flatten())[:, :width].reshape(problems, k, width).float()


@dataclass
class _Fit:
    """What scikit-learn's estimator keeps, for A problems at once."""

    length: Tensor  # (A,) rows
    k: Tensor  # (A,) clusters
    real: Tensor  # (A, k) centers that the problem has
    centers: Tensor  # (A, k, D)
    counts: Tensor  # (A, k) float32: rows that went into a center so far
    since: Tensor  # (A,) rows seen since the last reassignment
    smooth: Tensor  # (A,) float64: exponentially weighted mean of a minibatch's inertia
    lowest: Tensor  # (A,) float64: its minimum
    stale: Tensor  # (A,) minibatches since that minimum
    running: Tensor  # (A,) bool: not stopped yet; a stopped problem's centers stay as they are

    def __post_init__(self) -> None:
        self.batch = self.length.clamp(max=BATCH_SIZE)
        self.alpha = (self.batch * 2.0 / (self.length + 1)).clamp(max=1.0).double()
        self.steps = MAX_EPOCHS * self.length // self.batch

    def in_place(self, step: Callable[[], None]) -> None:
        """Run ``step``, which replaces fields, and bring what changed back to the tensors that held it before."""
        before = {field.name: getattr(self, field.name) for field in fields(self)}
        step()
        for name, held in before.items():
            if getattr(self, name) is not held:
                held.copy_(getattr(self, name))
                setattr(self, name, held)

    def update(self, sums: Tensor, sizes: Tensor) -> None:
        """Move centers to the running mean of all their rows; sums: (A, k, D), over the ``sizes`` (A, k) new rows."""
        gain = torch.where((sizes > 0) & self.running[:, None], 1.0 / (self.counts + sizes), 0.0)
        self.centers.mul_((1.0 - sizes * gain)[:, :, None]).addcmul_(sums, gain[:, :, None])

    def reassign(self, x: Tensor, sizes: Tensor) -> None:
        """Add ``sizes`` to the counts; move centers of low count to rows of the minibatch ``x`` (A, slots, D).

        Due at once while some center has no rows, else each time 10 k rows were seen.
        """
        self.since = self.since + self.batch
        due = ((self.counts == 0) & self.real).any(1) | (self.since >= 10 * self.k)
        self.since.masked_fill_(due, 0)
        grown = self.counts + sizes
        few = self.real & (due & self.running)[:, None] & (grown < REASSIGNMENT_RATIO * grown.amax(1, keepdim=True))
        by_count = torch.where(few, grown, torch.inf).argsort(dim=1, stable=True)
        ranks = torch.arange(grown.shape[1], device=x.device).expand_as(by_count)
        rank = torch.empty_like(by_count).scatter_(1, by_count, ranks)
        few &= rank < self.batch[:, None] // 2
        # Rows of a minibatch are independent draws, so its first ones are a random choice without replacement.
        problems, slots, width = x.shape
        rank = rank.clamp_(max=slots - 1) + torch.arange(problems, device=x.device)[:, None] * slots
        drawn = x.flatten(0, 1).index_select(0, rank.view(-1)).view(problems, -1, width)
        torch.where(few[:, :, None], drawn.float(), self.centers, out=self.centers)
        floor = torch.where(self.real & ~few, grown, torch.inf).amin(1, keepdim=True)
        self.counts = torch.where(few, floor, grown)

    def stop(self, mean: Tensor, step: int | Tensor) -> None:
        """Update ``running`` after minibatch number ``step`` (from 1) with inertia ``mean`` (A,) a row."""
        step = torch.as_tensor(step, device=mean.device)
        # the first minibatch tells about the seeding only: the mean begins anew with the second
        self.smooth = torch.lerp(self.smooth, mean, self.alpha.masked_fill(step <= 2, 1.0))
        self.stale = (self.stale + 1).masked_fill_(self.smooth < self.lowest, 0)
        self.lowest = torch.minimum(self.lowest, self.smooth).masked_fill_(step <= 1, torch.inf)
        self.running = self.running & (self.stale < MAX_NO_IMPROVEMENT) & (step < self.steps)


def _fit(table: Tensor, centers: Tensor, real: Tensor, length: Tensor, k: Tensor, seed: int) -> Tensor:
    """Minibatch updates of ``centers`` (Q, k, D) until every problem has stopped; arguments as in :class:`_Fit`.

    table: (Q, N, W) as of :func:`row_factors`. The host waits for the device only after the first steps.
    """
    problems, rows, _ = table.shape
    device, width, copies = table.device, centers.shape[2], copies_of(table)
    generator = _uniforms(seed, _MINIBATCH_STREAM)
    zeros = torch.zeros(problems, dtype=torch.int64, device=device)
    fit = _Fit(
        length=length,
        k=k,
        real=real,
        centers=centers.clone(),
        counts=torch.zeros(real.shape, device=device),
        since=zeros.clone(),
        smooth=zeros.double(),
        lowest=torch.full_like(zeros, torch.inf, dtype=torch.float64),
        stale=zeros.clone(),
        running=zeros == 0,
    )
    slots = min(BATCH_SIZE, rows)
    used = torch.arange(slots, device=device) < fit.batch[:, None]
    ones = used.long()
    draws = torch.empty(slots, dtype=torch.float64, device=device)
    step = torch.zeros((), dtype=torch.int64, device=device)
    base = torch.arange(problems, device=device)[:, None] * rows
    facing = center_factors(fit.centers, real, table)
    members = table.new_zeros(problems, slots, centers.shape[1]) if copies > 1 else None

    def minibatch() -> None:
        step.add_(1)
        pick = (draws * fit.length[:, None]).long() + base
        repeated = pick[:, :, None].expand(-1, -1, copies).reshape(-1)
        factors = table.view(problems * rows, -1).index_select(0, repeated).view(problems, slots, -1)
        x = factors[:, :, :width]
        write_centers(facing, fit.centers, real)
        distance, label = nearest_centers(factors, facing)
        mean = distance.masked_fill_(~used, 0.0).sum(1, dtype=torch.float64) / fit.batch
        sizes = torch.zeros_like(real, dtype=torch.int64).scatter_add_(1, label, ones)
        fit.update(_sums(x, label, sizes, used, members), sizes)
        fit.reassign(x, sizes)
        fit.stop(mean, step)

    def uniforms() -> Tensor:
        # always whole minibatches, so that a problem's draws do not depend on the others' sizes
        block = _draw((_STEPS_PER_CHECK, BATCH_SIZE), generator)[:, :slots]
        return block.pin_memory().to(device, non_blocking=True) if table.is_cuda else block

    advance = Replayed(lambda: fit.in_place(minibatch), device)
    block = uniforms()
    while True:
        for part in block:
            draws.copy_(part)
            advance()
        block = uniforms()  # drawn while the device works
        if not fit.running.any():
            return fit.centers


def _sums(x: Tensor, label: Tensor, sizes: Tensor, used: Tensor, members: Tensor | None) -> Tensor:
    """(Q, k, D) float32: sums of the rows ``x`` (Q, R, D) of each center; rows that are not ``used`` belong nowhere.

    Scattered additions are not deterministic on CUDA. Half rows are multiplied by zeros and ones instead, in
    ``members`` (Q, R, k), zero before and after. That is exact; a float32 product need not be, so float32 rows are
    sorted by center and summed in segments of ``sizes``.
    """
    if members is not None:
        members.scatter_(2, label[:, :, None], used[:, :, None].to(x.dtype))
        sums = products(members.transpose(1, 2), x)
        members.scatter_(2, label[:, :, None], 0.0)
        return sums
    problems, rows, _ = x.shape
    order = label.masked_fill(~used, sizes.shape[1]).argsort(dim=1, stable=True)
    order = order + torch.arange(problems, device=x.device)[:, None] * rows
    together = x.flatten(0, 1).index_select(0, order.view(-1)).view(problems, rows, -1)
    return torch.segment_reduce(together, "sum", lengths=sizes, axis=1, unsafe=True, initial=0.0)
