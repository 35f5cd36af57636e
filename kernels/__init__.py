"""Triton decode kernels for SANTA++: the twin of :func:`latent_santa.estimator.sampled_attention`.

Importing this package needs neither Triton nor a GPU; ask ``BACKEND.reason_not`` before calling.
"""

from __future__ import annotations

import torch

from latent_santa.step import DecodeStep, Output, Sampling

from .support import dense_reason_not, reason_not, unavailable
from .workspace import Workspace, scratch

__all__ = ["BACKEND", "Workspace", "dense_reason_not", "reason_not", "sampled_attention", "scratch", "unavailable"]


def sampled_attention(step: DecodeStep, sampling: Sampling, workspace: Workspace | None = None) -> Output:
    """SANTA++ for one decoding step of one layer (Algorithm 1), or its pooled form. Four launches, pooled five; in
    two stages six and seven; no synchronisation.

    A float32 query over 16-bit rows is fed to the tensor cores as two 16-bit parts, and so are the softmax weights,
    so that scores and output keep about float32's precision. A query in the rows' own dtype takes one part each.
    Seed, step and team counts are read on the device: a captured CUDA graph draws new noise each time it runs after
    ``draw.step`` was advanced in place.

    Args:
        step: the query in float32 or the rows' dtype; rows with a contiguous last dimension and any other strides;
            routing keys in the cache's dtype or in codes (:mod:`latent_santa.routing_keys`).
        sampling: K, estimator and noise, and K1 of two stages.
        workspace: scratch kept between steps; None takes the current stream's own.

    Raises:
        RuntimeError: the kernels cannot take these inputs; the message says why.
    """
    reason = reason_not(step, sampling)
    if reason is not None:
        raise RuntimeError(f"the triton backend cannot run: {reason}")
    return BACKEND.sampled_attention(step, sampling, workspace)


class TritonBackend:
    """The kernels as a backend of the sampled operator (:class:`latent_santa.backends.Backend`)."""

    name = "triton"

    def unavailable(self, device: torch.device) -> str | None:
        """Why no kernel can run for tensors on ``device``, or None."""
        return unavailable(device)

    def reason_not(self, step: DecodeStep, sampling: Sampling) -> str | None:
        """Why the kernels cannot run the step, or None when they can."""
        return reason_not(step, sampling)

    def sampled_attention(self, step: DecodeStep, sampling: Sampling, workspace: Workspace | None = None) -> Output:
        """:func:`latent_santa.kernels.sampled_attention` without its checks, for a caller that asked ``reason_not``."""
        from .launch import run  # imports triton, which a CPU installation may lack

        return run(step, sampling, workspace)


BACKEND = TritonBackend()
