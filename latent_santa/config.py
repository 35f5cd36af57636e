"""The settings of the method, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any

CHOICES: dict[str, tuple[str, ...]] = {
    "method": ("santa++", "santa", "dense", "centroid"),
    "parents": ("kmeans", "contiguous"),
    "estimator": ("per_head", "pooled"),
    "noise": ("independent", "shared"),
    "kmeans_engine": ("auto", "sklearn", "torch"),
    "routing_dtype": ("model", "int8", "int4"),
    "backend": ("auto", "torch", "triton"),
    "first_token": ("replay", "dense"),
}
POSITIVE = ("parent_size", "representatives", "budget")
NON_NEGATIVE = ("seed", "kmeans_seed")


@dataclass(frozen=True)
class SantaConfig:
    """Settings of SANTA++ and of its baselines.

    Attributes:
        method: ``"santa++"`` samples teams by their representatives (Algorithm 1); ``"santa"`` scans every key and
            samples single rows; ``"centroid"`` routes clusters of ``parent_size`` rows by their mean key (Appendix
            B.2); ``"dense"`` is the model's own attention through the same adapter and cache.
        parents: how prompt rows are first grouped: ``"kmeans"`` (Algorithm 3) or ``"contiguous"`` (Algorithm 4).
        parent_size: P, nominal rows a parent. For ``"centroid"`` it is B, the nominal cluster size.
        representatives: R, most representatives (and so teams) a parent. Must divide P.
        budget: S, the nominal budget. Equation 5 turns it into K = S / (P / R) teams a head. Not a row count.
        estimator: ``"per_head"`` lets a head use the teams it selected (the paper); ``"pooled"`` lets every head of a
            sharing group use every team of the union, with one inclusion correction a team.
        noise: ``"independent"`` Gumbel draws for each head, or one draw ``"shared"`` by the heads of a group.
        seed: base seed of the sampling noise, below 2**64.
        kmeans_seed: seed of the k-means parents, below 2**32.
        kmeans_engine: ``"sklearn"`` is the reference, ``"torch"`` the batched engine; ``"auto"`` takes PyTorch for
            rows on a GPU.
        routing_dtype: how frozen routing keys are kept: in the cache's dtype (``"model"``), or in ``"int8"`` or
            ``"int4"`` codes (:mod:`latent_santa.quantise`), which routing then reads. The sums stay unbiased.
        backend: ``"torch"``, ``"triton"``, or ``"auto"``: Triton for rows on a GPU where its kernels can run, else
            PyTorch.
        first_token: ``"replay"`` runs the last prompt token again through sparse attention (Appendix F);
            ``"dense"`` keeps the prefill's own logits for the first generated token.

    Raises:
        ValueError: a field has a wrong type or value; the message names field, value and rule.
    """

    method: str = "santa++"
    parents: str = "kmeans"
    parent_size: int = 16
    representatives: int = 4
    budget: int = 512
    estimator: str = "per_head"
    noise: str = "independent"
    seed: int = 0
    kmeans_seed: int = 0
    kmeans_engine: str = "auto"
    routing_dtype: str = "model"
    backend: str = "auto"
    first_token: str = "replay"

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")
        for name in POSITIVE + NON_NEGATIVE:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise ValueError(f"{name}={value!r}: must be an int, not {type(value).__name__}")
            object.__setattr__(self, name, int(value))  # NumPy's integers are welcome
            if value < (1 if name in POSITIVE else 0):
                raise ValueError(f"{name}={value}: must be {'at least 1' if name in POSITIVE else 'non-negative'}")
        if self.seed >= 2**64:
            raise ValueError(f"seed={self.seed}: must be below 2**64")
        if self.kmeans_seed >= 2**32:
            raise ValueError(f"kmeans_seed={self.kmeans_seed}: must be below 2**32 (scikit-learn's range)")
        self._check_budget()

    def _check_budget(self) -> None:
        """Equation 5's divisibility rules, for the methods that form teams or clusters."""
        if self.method == "centroid" and self.budget < self.parent_size:
            raise ValueError(
                f"budget={self.budget}: centroid selects floor(S / B) clusters, so S must be at least "
                f"B = parent_size = {self.parent_size}: use a larger S or a smaller B"
            )
        if self.method != "santa++":
            return
        if self.parent_size % self.representatives:
            raise ValueError(
                f"representatives={self.representatives}: P must be divisible by R, and "
                f"parent_size={self.parent_size} is not"
            )
        step = self.parent_size // self.representatives
        if self.budget % step:
            raise ValueError(f"budget={self.budget}: S must be divisible by P/R = {step} (Equation 5)")

    @property
    def teams_per_head(self) -> int:
        """K of Equation 5 before the cap by the number of teams; rows for SANTA, clusters for centroid."""
        if self.method == "santa":
            return self.budget
        if self.method == "centroid":
            return self.budget // self.parent_size
        return self.budget // (self.parent_size // self.representatives)

    @property
    def grouping(self) -> tuple[Any, ...]:
        """What the prompt's teams depend on; teams built under another value are not used."""
        if self.method in ("dense", "santa"):
            return (self.method,)
        kmeans = (self.kmeans_seed, self.kmeans_engine) if self.parents == "kmeans" else ()
        size = (self.parent_size,) if self.method == "centroid" else (self.parent_size, self.representatives)
        return (self.method, self.parents, *size, *kmeans, self.routing_dtype)

    def with_overrides(self, **overrides: Any) -> SantaConfig:
        """Return a checked copy with some fields changed.

        Raises:
            ValueError: an override is not a field, or the result breaks a rule.
        """
        known = [field.name for field in fields(self)]
        unknown = sorted(set(overrides) - set(known))
        if unknown:
            raise ValueError(f"unknown setting {', '.join(unknown)}: SantaConfig has {', '.join(known)}")
        return replace(self, **overrides)
