"""The operator workloads with a goal: the sampled operator's speed against the best dense method of the same run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """A workload's sizes, ``heads`` in all and the ratio aimed at for K = 32 teams a head, with CUDA graphs and a cold
    L2; ``int4`` is the ratio with 4-bit routing keys, and ``estimator`` the one that the goal is set for."""

    layout: str
    heads: int
    groups: int
    batch: int
    context: int
    ratio: float
    int4: float | None = None
    estimator: str = "per_head"

    @property
    def key(self) -> tuple[str, int, int, int]:
        """What identifies the workload in a result."""
        return (self.layout, self.heads, self.batch, self.context)


GOALS = (
    Goal("mla", 16, 1, 1, 32768, 2.0),
    Goal("mla", 16, 1, 1, 131072, 2.5, 3.0),
    Goal("mla", 16, 1, 8, 32768, 2.3, 3.0),
    Goal("mla", 16, 1, 8, 131072, 3.0, 5.0),
    Goal("mla", 128, 1, 8, 131072, 2.0, estimator="pooled"),
    Goal("gqa", 28, 4, 1, 32768, 1.9),
    Goal("gqa", 28, 4, 1, 131072, 3.3),
    Goal("gqa", 28, 4, 8, 131072, 5.0, 8.0),
)


def goal_of(
    layout: str, heads: int, batch: int, context: int, estimator: str, k: int, routing_dtype: str
) -> float | None:
    """The ratio aimed at for one measured setting, or None."""
    for goal in GOALS:
        if goal.key == (layout, heads, batch, context) and goal.estimator == estimator and k == 32:
            return {"model": goal.ratio, "int4": goal.int4}.get(routing_dtype)
    return None
