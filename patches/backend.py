"""Which implementation of the sampled operator runs: Triton's kernels or plain PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor

from latent_santa.attention import Output
from latent_santa.rows import Rows
from latent_santa.teams import Teams

log = logging.getLogger("latent_santa")


def triton_attention(
    backend: str, query: tuple[Tensor, ...], rows: Rows, teams: Teams, teams_per_head: int
) -> Callable[..., Output] | None:
    """The Triton operator, or None for PyTorch's.

    Raises:
        RuntimeError: ``backend="triton"`` was asked for and cannot run; the message says why.
    """
    if backend == "torch" or (backend == "auto" and not rows.values.is_cuda):
        return None
    operator, reason = _load()
    if operator is not None:
        reason = operator.unsupported(query, rows, teams, teams_per_head)
        if reason is None:
            return operator.sampled_attention
    if backend == "triton":
        raise RuntimeError(f'backend="triton" cannot run here: {reason}; use backend="torch"')
    _say_once(reason)
    return None


@lru_cache
def _load() -> tuple[Any, str | None]:
    try:
        from latent_santa import kernels

        if not hasattr(kernels, "sampled_attention"):
            return None, "this build has no Triton kernels"
    except ImportError as error:  # the package loads its operators, and Triton with them, when they are asked for
        return None, f"{error} (install the extra: latent-santa[gpu])"
    return kernels, None


@lru_cache
def _say_once(reason: str) -> None:
    log.warning('backend="auto": %s; PyTorch\'s operators are used', reason)
