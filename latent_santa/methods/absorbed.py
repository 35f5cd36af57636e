"""Exact attention over every visible row, straight from the cache (:mod:`latent_santa.dense`): the fast dense baseline.

``"dense"`` is the model's own attention, which in MLA expands all latents to keys and values on every call. This method
computes the same numbers to rounding and reads each row once, so what sampling gains against it is sampling's own.

Count: m = 0, u + e = N; 100 % in Equations 13 and 14.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..dense import attend_all
from ..step import DecodeStep, Output
from .base import Choose, Method

if TYPE_CHECKING:
    from ..config import SantaConfig


class AbsorbedDense(Method):
    name = "absorbed_dense"
    about = "exact attention over every row, straight from the cache: the fast dense baseline"
    settings = ("first_token",)
    fixed_shapes = True  # of a step on reserved rows; operators are chosen before a capture
    apart = True

    def attend(self, step: DecodeStep, config: SantaConfig, choose: Choose) -> Output:
        out, lse = attend_all(step)
        exact = step.suffix.counts(step.batch)[:, None].expand(-1, step.groups)
        return Output(out, lse, torch.zeros_like(exact), step.draw.step[:, None] - exact, exact)

    def full(self, step: DecodeStep, config: SantaConfig) -> bool:
        return True
