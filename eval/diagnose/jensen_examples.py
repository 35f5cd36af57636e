"""Constructed logits for Figures 2 and 3: the paper prints their shapes and ratios, not the logits.

Each shape has one free number, which is found so that the ratio is the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

MEMBERS = 16
FIGURE_2_MASS = 2.20e4


def ratio(logits: Sequence[float]) -> float:
    """Exact mass over the mean key's surrogate: sum e^s / (n e^mean) (Equations 2 and 10)."""
    mean = sum(logits) / len(logits)
    return sum(math.exp(s - mean) for s in logits) / len(logits)


def _near_uniform(size: float) -> list[float]:
    return [size * (i / (MEMBERS - 1) - 0.5) for i in range(MEMBERS)]


def _bimodal(size: float) -> list[float]:
    return [0.0] * (MEMBERS // 2) + [size] * (MEMBERS // 2)


def _heavy_tailed(size: float) -> list[float]:
    return [size * (1 - math.log2(i + 1) / math.log2(MEMBERS)) ** 3 for i in range(MEMBERS)]


def _sparse(size: float) -> list[float]:
    level = math.log(FIGURE_2_MASS / (math.exp(size) + MEMBERS - 1))  # a level common to all leaves the ratio alone
    return [size + level] + [level] * (MEMBERS - 1)


# shape: its logits by the free number, and the paper's ratio (Figure 3; the sparse one is also Figure 2's)
SHAPES: dict[str, tuple[Callable[[float], list[float]], float]] = {
    "near-uniform": (_near_uniform, 1.03),
    "bimodal": (_bimodal, 30.0),
    "heavy-tailed": (_heavy_tailed, 135.0),
    "sparse": (_sparse, 760.0),
}


def examples() -> dict[str, list[float]]:
    """The logits of each shape, by bisection; the ratio rises with the free number."""
    found = {}
    for name, (shape, wanted) in SHAPES.items():
        low, high = 0.0, 40.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if ratio(shape(middle)) < wanted else (low, middle)
        found[name] = shape(high)
    return found
