"""Minibatch updates of the torch engine: what scikit-learn's ``MiniBatchKMeans`` does after seeding, batched.

Symbols: Q or A problems, N or R rows (padded), D dimensions, k clusters (padded).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..in_parts import Work
from .cuda_graph import GraphedStep
from .distances import center_factors, copies_of, nearest_centers, products, write_centers
from .draws import MINIBATCH_STREAM, draw, generator
from .rules import BATCH_SIZE, MAX_EPOCHS, MAX_NO_IMPROVEMENT, REASSIGNMENT_RATIO

# Minibatches between two looks at the stopping rule by the host.
STEPS_PER_CHECK = 4


@dataclass
class Fit:
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
        self.alpha = (self.batch.float() * 2.0 / (self.length + 1)).clamp(max=1.0).double()
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
        """Update ``running`` after minibatch number ``step`` (from 1) with inertia ``mean`` (A,) per row."""
        step = torch.as_tensor(step, device=mean.device)
        # the first minibatch tells about the seeding only: the mean begins again with the second
        self.smooth = torch.lerp(self.smooth, mean, self.alpha.masked_fill(step <= 2, 1.0))
        self.stale = (self.stale + 1).masked_fill_(self.smooth < self.lowest, 0)
        self.lowest = torch.minimum(self.lowest, self.smooth).masked_fill_(step <= 1, torch.inf)
        self.running = self.running & (self.stale < MAX_NO_IMPROVEMENT) & (step < self.steps)


def fit_centers(table: Tensor, centers: Tensor, real: Tensor, length: Tensor, k: Tensor, seed: int) -> Work[Tensor]:
    """Minibatch updates of ``centers`` (Q, k, D) until every problem has stopped; arguments as in :class:`Fit`.

    table: (Q, N, W) as of :func:`row_factors`. The host reads from the device behind a part.
    """
    problems, rows, _ = table.shape
    device, width, copies = table.device, centers.shape[2], copies_of(table)
    source = generator(seed, MINIBATCH_STREAM)
    zeros = torch.zeros(problems, dtype=torch.int64, device=device)
    fit = Fit(
        length=length,
        k=k,
        real=real,
        centers=centers.clone(),
        counts=torch.zeros(real.shape, dtype=torch.float32, device=device),
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
        fit.update(sums_by_center(x, label, sizes, used, members), sizes)
        fit.reassign(x, sizes)
        fit.stop(mean, step)

    def uniforms() -> Tensor:
        # always whole minibatches, so that a problem's draws do not depend on the others' sizes
        block = draw((STEPS_PER_CHECK, BATCH_SIZE), source)[:, :slots]
        return block.pin_memory().to(device, non_blocking=True) if table.is_cuda else block

    advance, made, most = GraphedStep(lambda: fit.in_place(minibatch), device), 0, MAX_EPOCHS * rows // slots
    block = uniforms()
    while True:
        for part in block:
            draws.copy_(part)
            advance()
            made += 1
            if made == 1:
                yield 1 / most  # launched one by one; the next one is captured
        running = fit.running.any()
        block = uniforms()  # drawn while the device works
        yield min(made / most, 1.0)
        if not running:
            return fit.centers


def sums_by_center(x: Tensor, label: Tensor, sizes: Tensor, used: Tensor, members: Tensor | None) -> Tensor:
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
