"""Minibatch k-means for parent groups: line 4 of Algorithm 3, with the settings of Appendix A.

Two engines follow the same rules. ``sklearn`` is the reference, scikit-learn's ``MiniBatchKMeans``, one problem after
another. ``torch`` implements those rules for many problems at once, for CUDA. Their random draws differ, so their
partitions do too; their inertia agrees within a few percent.

Symbols: Q problems, N rows (padded), D dimensions, k clusters (padded).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import index

import torch
from torch import Tensor

from ..in_parts import Work, result_of
from .sklearn import sklearn_labels
from .torch_engine import torch_labels


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
            through float32 matrix products, whose precision is the process's setting.
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
    with clustering(points.device):
        return result_of(kmeans_in_parts(points, lengths, clusters, seed, engine))


@contextmanager
def clustering(device: torch.device) -> Iterator[None]:
    """What PyTorch is set to while rows on this device are clustered."""
    # with rows on another GPU than the current one, PyTorch 2.11 gave wrong labels or an illegal access
    gpu = torch.cuda.device(device if device.type == "cuda" else -1)
    with torch.no_grad(), torch.autocast(device_type=device.type, enabled=False), gpu:
        yield


def kmeans_in_parts(
    points: Tensor, lengths: Sequence[int], clusters: Sequence[int], seed: int, engine: str
) -> Work[Tensor]:
    """:func:`minibatch_kmeans` in parts, each of which is to run inside of :func:`clustering`.

    The reference engine's parts are whole problems; the torch engine's are of some hundred launches at most.
    """
    lengths, clusters = _check(points, lengths, clusters, seed, engine)
    if engine == "auto":
        engine = "torch" if points.is_cuda else "sklearn"
    labels = yield from (sklearn_labels if engine == "sklearn" else torch_labels)(points, lengths, clusters, seed)
    return labels


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
