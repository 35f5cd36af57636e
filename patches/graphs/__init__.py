"""Decoding steps as CUDA graphs: captured once per cache, replayed instead of a launch per kernel."""

from .steps import MODES, StepGraphs

__all__ = ["MODES", "StepGraphs"]
