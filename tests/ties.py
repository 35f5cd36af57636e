"""Scores too close to be told apart: both sides of a comparison round, and may select either team or parent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from latent_santa import two_stage
from latent_santa.step import DecodeStep, Sampling

# both sides' scores are off by less than 1e-6
TIE = 1e-5


def gaps(step: DecodeStep, sampling: Sampling) -> list[Tensor]:
    """By how much each head's K-th score exceeds its (K+1)-st, ``(B, G, H)`` per stage that samples."""
    found = []

    def recording(phi: Tensor, gumbels: Tensor, k: int, *rest: Any) -> Any:
        top = (phi + gumbels).topk(k + 1).values
        found.append((top[..., -2] - top[..., -1]).nan_to_num(torch.inf))
        return select(phi, gumbels, k, *rest)

    select = two_stage.select
    with mock.patch.object(two_stage, "select", recording):
        two_stage.select_teams(step, sampling)
    return found


def is_tie(step: DecodeStep, sampling: Sampling) -> bool:
    """Whether some head's K-th and (K+1)-st score, of teams or of a first stage's parents, are too close to be told
    apart."""
    step = replace(step, query=tuple(part.float() for part in step.query))
    return any(bool((gap < TIE).any()) for gap in gaps(step, sampling))


def without_tie(step: DecodeStep, sampling: Sampling) -> DecodeStep:
    """The step, or if it has a tie, at the first later draw that has none."""
    while is_tie(step, sampling):
        step = replace(step, draw=replace(step.draw, step=step.draw.step + 1))
    return step
