"""The operator workloads with a goal: the sampled operator's speed against the best dense method of the same run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """A workload's sizes, ``heads`` in all and the ratio aimed at for ``k`` teams per head, with CUDA graphs and a cold
    L2; ``int4`` is the ratio with 4-bit routing keys, ``two_stage`` that of two stages with either estimator and any K1
    at one stage's attention error or less, and ``estimator`` the one that the goals of one stage are set for. ``noise``
    is that of all."""

    layout: str
    heads: int
    groups: int
    batch: int
    context: int
    ratio: float | None
    int4: float | None = None
    estimator: str = "per_head"
    two_stage: float | None = None
    k: int = 32
    noise: str = "independent"

    @property
    def key(self) -> tuple[str, int, int, int]:
        """What identifies the workload in a result."""
        return (self.layout, self.heads, self.batch, self.context)


GOALS = (
    Goal("mla", 16, 1, 1, 32768, 2.0),
    Goal("mla", 16, 1, 1, 131072, 2.5, 3.0),
    Goal("mla", 16, 1, 8, 32768, 2.3, 3.0),
    Goal("mla", 16, 1, 8, 131072, 3.0, 5.0, two_stage=3.3),
    Goal("mla", 16, 1, 32, 65536, None, two_stage=3.5),
    # of the preset "many_heads", whose attention error is below that of one stage per head with K = 32
    Goal("mla", 128, 1, 8, 131072, None, two_stage=2.0, k=16, noise="shared"),
    Goal("gqa", 28, 4, 1, 32768, 1.9),
    Goal("gqa", 28, 4, 1, 131072, 3.3),
    Goal("gqa", 28, 4, 8, 131072, 5.0, 8.0, two_stage=4.5),
    Goal("gqa", 28, 4, 32, 65536, None),
)


def goal_of(
    layout: str,
    heads: int,
    batch: int,
    context: int,
    estimator: str,
    k: int,
    routing_dtype: str,
    two_stage: bool = False,
    noise: str = "independent",
) -> float | None:
    """The ratio aimed at for one measured setting, or None."""
    for goal in GOALS:
        if goal.key != (layout, heads, batch, context) or (goal.k, goal.noise) != (k, noise):
            continue
        if two_stage:
            return goal.two_stage
        if goal.estimator == estimator:
            return {"model": goal.ratio, "int4": goal.int4}.get(routing_dtype)
    return None
