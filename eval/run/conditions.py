"""The compared settings of attention: one condition is one row of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from latent_santa.config import SantaConfig
from latent_santa.eval.errors import EvalError

METHODS = ("dense", "santa", "santa++", "centroid")
ESTIMATORS = ("per_head", "pooled")
PARENTS = ("kmeans", "contiguous")

_PARENT_NAMES = {"kmeans": "k-means", "contiguous": "contiguous"}


@dataclass(frozen=True)
class Condition:
    """One method with its settings; fields that a method does not have are None.

    budget           nominal budget S
    parent_size      P of SANTA++, or B, the nominal cluster size, of the centroid method
    representatives  R of SANTA++
    """

    method: str
    budget: int | None = None
    parents: str | None = None
    parent_size: int | None = None
    representatives: int | None = None
    estimator: str | None = None

    @property
    def name(self) -> str:
        """The method with everything but the budget, as tables and lines of the plot show it."""
        if self.method == "dense":
            return "dense (SDPA)"
        if self.method == "santa":
            return "SANTA"
        parents = _PARENT_NAMES[str(self.parents)]
        if self.method == "centroid":
            return f"centroid B={self.parent_size} {parents}"
        estimator = str(self.estimator).replace("_", " ")
        return f"SANTA++ {parents} {self.parent_size}/{self.representatives} {estimator}"

    @property
    def slug(self) -> str:
        """A file name for the condition's results, with the budget."""
        words = [
            self.name.replace("SANTA++", "santapp").replace("(SDPA)", ""),
            f"s{self.budget}" if self.budget else "",
        ]
        return "_".join("_".join(words).lower().replace("/", "-").replace("=", "").split()).strip("_")

    def overrides(self) -> dict[str, Any]:
        """Arguments of `handle.configure` that select the condition."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def grouping(self) -> tuple[Any, ...]:
        """What the prompts' teams depend on, as far as conditions of one run differ."""
        return SantaConfig(**self.overrides()).grouping


def running_order(conditions: Sequence[Condition]) -> list[Condition]:
    """The conditions with those of one grouping one after another, else as given: their prompts are grouped once."""
    first: dict[tuple[Any, ...], int] = {}
    for condition in conditions:
        first.setdefault(condition.grouping, len(first))
    return sorted(conditions, key=lambda condition: first[condition.grouping])


def checked_config(device: str, **settings: Any) -> SantaConfig:
    """A configuration whose values and backend are known to be right for ``device``, before anything long begins.

    Raises EvalError naming what is wrong.
    """
    try:
        config = SantaConfig(**settings)
    except ValueError as error:
        raise EvalError(str(error)) from error
    if config.backend == "triton":
        import torch

        from latent_santa import kernels

        reason = kernels.unavailable(torch.device(device))
        if reason:
            raise EvalError(f"--backend triton cannot run here: {reason}; use --backend torch")
    return config


def condition_from_dict(data: dict[str, Any]) -> Condition:
    """The inverse of `dataclasses.asdict`."""
    return Condition(**data)


def from_manifest(manifest: Mapping[str, Any], where: object) -> list[Condition]:
    """The conditions of a run, from its manifest at `where`. Raises EvalError for those that this version lacks."""
    found = []
    for data in manifest["conditions"]:
        try:
            found.append(Condition(**data))
            SantaConfig(**found[-1].overrides())
        except (TypeError, ValueError) as error:
            raise EvalError(f"{where}: conditions has {data!r}, which this version does not know: {error}") from error
    return found


def expand(
    methods: Sequence[str],
    budgets: Sequence[int],
    estimators: Sequence[str],
    parents: Sequence[str],
    teams: Sequence[tuple[int, int]],
    centroid_sizes: Sequence[int],
) -> tuple[Condition, ...]:
    """All conditions of a run, dense first, each method with the settings that it has.

    teams  pairs (P, R). Every condition is checked by `SantaConfig`; raises EvalError naming what is wrong.
    """
    for what, given, known in (
        ("method", methods, METHODS),
        ("estimator", estimators, ESTIMATORS),
        ("parents", parents, PARENTS),
    ):
        for value in given:
            if value not in known:
                raise EvalError(f"unknown {what} {value!r}; choose from {', '.join(known)}")
    found: dict[Condition, None] = {}
    if "dense" in methods:
        found[Condition("dense")] = None
    for method in methods:
        if method == "santa":
            found |= {Condition("santa", budget): None for budget in budgets}
        elif method == "centroid":
            for kind in parents:
                for size in centroid_sizes:
                    found |= {Condition("centroid", budget, kind, size): None for budget in budgets}
        elif method == "santa++":
            for kind in parents:
                for size, representatives in teams:
                    for estimator in estimators:
                        for budget in budgets:
                            found[Condition("santa++", budget, kind, size, representatives, estimator)] = None
    for condition in found:
        try:
            SantaConfig(**condition.overrides())
        except ValueError as error:
            raise EvalError(f"{condition.name}, S={condition.budget}: {error}") from error
    return tuple(found)
