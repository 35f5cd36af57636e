"""Triton decode kernels for SANTA++: the twin of :func:`latent_santa.estimator.sampled_attention`.

Importing this package needs neither Triton nor a GPU; ask ``BACKEND.reason_not`` before calling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from latent_santa.step import DecodeStep, Output, Sampling

from .plan import Workspace
from .support import unavailable, unsupported

if TYPE_CHECKING:
    from .operator import sampled_attention

__all__ = ["BACKEND", "Workspace", "sampled_attention", "unavailable", "unsupported"]


class TritonBackend:
    """The kernels as a backend of the sampled operator (:class:`latent_santa.backends.Backend`)."""

    name = "triton"

    def reason_not(self, step: DecodeStep, sampling: Sampling) -> str | None:
        assert step.teams is not None, "this operator samples teams"
        return unsupported(step.query, step.rows, step.teams, sampling.k)

    def sampled_attention(self, step: DecodeStep, sampling: Sampling) -> Output:
        from .operator import sampled_attention

        return sampled_attention(step, sampling)


BACKEND = TritonBackend()


def __getattr__(name: str) -> Any:
    # the kernels' modules import triton, which a CPU installation may lack
    if name == "sampled_attention":
        from . import operator

        return operator.sampled_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
