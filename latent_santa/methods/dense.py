"""Dense attention: the model's own, through the same patch, cache and ledger."""

from __future__ import annotations

from .base import Method


class Dense(Method):
    name = "dense"
    about = "the model's own attention, counted in the same ledger"
    sampled = False
    fixed_shapes = True
