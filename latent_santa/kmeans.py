"""Minibatch k-means for parent groups: Algorithm 3 of the paper, with the settings of Appendix A.

Two engines fit the same rules. ``sklearn`` is the reference, scikit-learn's ``MiniBatchKMeans``, one problem after the
other. ``torch`` is an own implementation of those rules, batched over problems, for CUDA. Their random draws differ, so
their partitions do too; their inertia agrees within a few percent.

Symbols: Q problems, N rows (padded), D dimensions, k clusters (padded).
"""

from collections.abc import Sequence
from operator import index

import torch
from torch import Tensor

from .minibatch import (
    BATCH_SIZE,
    MAX_EPOCHS,
    MAX_NO_IMPROVEMENT,
    REASSIGNMENT_RATIO,
    refuse_nonfinite,
    torch_labels,
)


@torch.no_grad()
def minibatch_kmeans(
    points: Tensor, lengths: Sequence[int], clusters: Sequence[int], seed: int = 0, engine: str = "auto"
) -> Tensor:
    """Cluster Q independent sets of rows by minibatch k-means (Algorithm 3, settings of Appendix A).

    Minibatches of 4096 rows with replacement, one greedy k-means++ initialization, at most 100 epochs, stop after 10
    minibatches without improvement, reassignment ratio 0.01, no tolerance on center changes.

    Args:
        points: (Q, N, D) float tensor; rows ``0 .. lengths[q] - 1`` of problem q are real, the others are ignored and
            may hold anything. The torch engine is fastest on CUDA with bfloat16 or float16 rows, or float32 rows that
            hold bfloat16 values; there it multiplies exact values and accumulates in float32. Other float32 rows go
            through float32 matrix products, whose precision is the process's own setting.
        lengths: Q Python ints, ``1 <= lengths[q] <= N``.
        clusters: Q Python ints, ``1 <= clusters[q] <= lengths[q]``; Algorithm 3 asks for ``min(N, max(2, N // P))``.
        seed: the seed xi, ``0 <= seed < 2**32``. Every problem gets the same draws, alone or beside others.
        engine: "sklearn", "torch", or "auto": torch for CUDA tensors, otherwise sklearn.

    Returns:
        (Q, N) int64 on the device of ``points``: the index of the nearest center, the lowest one on a tie, and -1 on
        ignored rows. Some indices may be unused: the caller omits empty parents.

        The result is deterministic. On the CPU a problem's labels do not depend on its neighbours. On CUDA the draws
        do not either, but a matrix product may round differently in another batch shape, so labels can differ as much
        as under another seed.

    Raises:
        ValueError: an argument of another shape, type or range, or a real row that is not finite.
        ImportError: the sklearn engine without scikit-learn.
    """
    lengths, clusters = _check(points, lengths, clusters, seed, engine)
    if engine == "auto":
        engine = "torch" if points.is_cuda else "sklearn"
    # with rows on another GPU than the current one, PyTorch 2.11 gave wrong labels or an illegal access
    with torch.autocast(device_type=points.device.type, enabled=False), torch.cuda.device_of(points):
        if engine == "sklearn":
            return _sklearn_labels(points, lengths, clusters, seed)
        return torch_labels(points, lengths, clusters, seed)


@torch.no_grad()
def inertia(points: Tensor, lengths: Sequence[int], labels: Tensor) -> Tensor:
    """Sum of squared distances of real rows to the mean of their cluster.

    Args:
        points: (Q, N, D) float tensor.
        lengths: Q ints, the real rows of each problem.
        labels: (Q, N) int64 as returned by :func:`minibatch_kmeans`.

    Returns:
        (Q,) float64 on the device of ``points``.
    """
    sums = []
    for rows, length, label in zip(points, lengths, labels, strict=True):
        x, label = rows[:length].double(), label[:length]
        if length == 0:
            sums.append(x.sum())
            continue
        count = torch.bincount(label, minlength=1).clamp_(min=1)
        means = x.new_zeros(count.shape[0], x.shape[1]).index_add_(0, label, x) / count[:, None]
        sums.append((x - means[label]).square_().sum())
    return torch.stack(sums) if sums else points.new_zeros(0, dtype=torch.float64)


def _check(
    points: Tensor, lengths: Sequence[int], clusters: Sequence[int], seed: int, engine: str
) -> tuple[list[int], list[int]]:
    """Validated copies of ``lengths`` and ``clusters``."""
    if points.dim() != 3 or not points.is_floating_point():
        raise ValueError(f"points is {points.dtype} {tuple(points.shape)}: give a float tensor (Q, N, D)")
    if engine not in ("auto", "sklearn", "torch"):
        raise ValueError(f"engine is {engine!r}: choose 'auto', 'sklearn' or 'torch'")
    try:
        lengths, clusters, seed = [index(n) for n in lengths], [index(k) for k in clusters], index(seed)
    except TypeError as error:
        raise ValueError(f"lengths is {lengths}, clusters is {clusters}, seed is {seed}: give Python ints") from error
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}: it must be at least 0 and below 2**32")
    problems, rows, _ = points.shape
    for name, given in (("lengths", lengths), ("clusters", clusters)):
        if len(given) != problems:
            raise ValueError(f"{name} has {len(given)} entries: give one for each of the {problems} problems of points")
    for q, (length, k) in enumerate(zip(lengths, clusters, strict=True)):
        if not 1 <= length <= rows:
            raise ValueError(f"lengths[{q}] is {length}: it must be at least 1 and at most the {rows} rows of points")
        if not 1 <= k <= length:
            raise ValueError(f"clusters[{q}] is {k}: it must be at least 1 and at most lengths[{q}] = {length}")
    return lengths, clusters


def _sklearn_labels(points: Tensor, lengths: list[int], clusters: list[int], seed: int) -> Tensor:
    """The reference: scikit-learn, problem after problem, on float32 rows."""
    try:
        from sklearn.cluster import MiniBatchKMeans
    except ImportError as error:
        raise ImportError(
            "the k-means engine 'sklearn' needs scikit-learn: install it, or choose the engine 'torch'"
        ) from error
    labels = torch.full(points.shape[:2], -1, dtype=torch.int64)
    for q, (length, k) in enumerate(zip(lengths, clusters, strict=True)):
        rows = points[q, :length].to(device="cpu", dtype=torch.float32)
        if not torch.linalg.vector_norm(rows, dim=-1).square().isfinite().all():
            refuse_nonfinite(q)
        if k == 1:
            labels[q, :length] = 0
            continue
        model = MiniBatchKMeans(
            n_clusters=k,
            init="k-means++",
            n_init=1,
            batch_size=BATCH_SIZE,
            max_iter=MAX_EPOCHS,
            max_no_improvement=MAX_NO_IMPROVEMENT,
            reassignment_ratio=REASSIGNMENT_RATIO,
            tol=0.0,
            random_state=seed,
        )
        labels[q, :length] = torch.from_numpy(model.fit(rows.numpy()).labels_).long()
    return labels.to(points.device)
