"""The reference engine: scikit-learn's ``MiniBatchKMeans``, problem after problem, on float32 rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..in_parts import Work
from .rules import BATCH_SIZE, MAX_EPOCHS, MAX_NO_IMPROVEMENT, REASSIGNMENT_RATIO, refuse_nonfinite


def sklearn_labels(points: Tensor, lengths: list[int], clusters: list[int], seed: int) -> Work[Tensor]:
    """Labels ``(Q, N)`` int64 of ``points (Q, N, D)``, -1 from ``lengths[q]`` on; arguments as in ``minibatch_kmeans``.
    A part is one problem.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: a real row is not finite.
    """
    try:
        from sklearn.cluster import MiniBatchKMeans
    except ImportError as error:
        raise ImportError(
            "the k-means engine 'sklearn' needs scikit-learn: install it, or choose the engine 'torch'"
        ) from error
    labels = torch.full(points.shape[:2], -1, dtype=torch.int64)
    for q, (length, k) in enumerate(zip(lengths, clusters, strict=True)):
        if q:
            yield q / len(lengths)
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
