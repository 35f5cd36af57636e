"""Implementations of the sampled operator, by name: each says what it cannot run, and runs the rest."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import torch

from .estimator import sampled_attention
from .step import DecodeStep, Output, Sampling

log = logging.getLogger("latent_santa")


class Backend(Protocol):
    """One implementation of :func:`latent_santa.estimator.sampled_attention`."""

    name: str

    def unavailable(self, device: torch.device) -> str | None:
        """Why this backend can run nothing for tensors on ``device``; None when it can."""

    def reason_not(self, step: DecodeStep, sampling: Sampling) -> str | None:
        """Why this backend cannot run the step, in words for a user; None when it can."""

    def sampled_attention(self, step: DecodeStep, sampling: Sampling) -> Output:
        """Algorithm 1 for one decoding step of one layer."""


class TorchBackend:
    """Plain PyTorch: runs everything, everywhere."""

    name = "torch"

    def unavailable(self, device: torch.device) -> str | None:
        return None

    def reason_not(self, step: DecodeStep, sampling: Sampling) -> str | None:
        return None

    def sampled_attention(self, step: DecodeStep, sampling: Sampling) -> Output:
        return sampled_attention(step, sampling)


def _triton() -> Backend:
    module = importlib.import_module("latent_santa.kernels")
    backend: Backend = module.BACKEND
    return backend


# a loader per name, so that a backend's package is imported only where it is asked for
BACKENDS: dict[str, Callable[[], Backend]] = {"torch": TorchBackend, "triton": _triton}


def choose(name: str, step: DecodeStep, sampling: Sampling) -> Backend:
    """The backend that runs the step.

    Args:
        name: a key of ``BACKENDS``, or ``"auto"``: Triton for rows on a GPU where its kernels can run, else PyTorch.

    Raises:
        RuntimeError: the backend was asked for by name and cannot run; the message says why.
    """
    if name == "auto":
        if not step.rows.values.is_cuda:
            return BACKENDS["torch"]()
        backend = BACKENDS["triton"]()
        reason = backend.reason_not(step, sampling)
        if reason is None:
            return backend
        _say_once(reason)
        return BACKENDS["torch"]()
    backend = BACKENDS[name]()
    reason = backend.reason_not(step, sampling)
    if reason is not None:
        raise RuntimeError(f'backend="{name}" cannot run here: {reason}; use backend="torch"')
    return backend


@lru_cache
def _say_once(reason: str) -> None:
    log.warning('backend="auto": %s; PyTorch runs instead', reason)
