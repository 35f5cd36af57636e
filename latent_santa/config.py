"""The settings of the method, checked when they are made."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, get_args

from .backends import BACKENDS
from .methods import METHODS

Parents = Literal["kmeans", "contiguous", "probes"]
Estimator = Literal["per_head", "pooled"]
Noise = Literal["independent", "shared"]
Routing = Literal["one_stage", "two_stage"]
ParentSummary = Literal["mean", "isotropic", "diagonal"]
Draws = Literal["independent", "systematic"]
KMeansEngine = Literal["auto", "sklearn", "torch"]
RoutingDtype = Literal["model", "int8", "int4"]
FirstToken = Literal["replay", "dense"]

_LITERALS: dict[str, Any] = {
    "parents": Parents,
    "estimator": Estimator,
    "noise": Noise,
    "routing": Routing,
    "parent_summary": ParentSummary,
    "draws": Draws,
    "kmeans_engine": KMeansEngine,
    "routing_dtype": RoutingDtype,
    "first_token": FirstToken,
}
POSITIVE = ("parent_size", "representatives", "budget", "parents_per_head", "hash_bits", "hash_tables")
NON_NEGATIVE = ("exact_first", "exact_last", "seed", "kmeans_seed")


# named settings, as changes of the defaults
PRESETS: dict[str, dict[str, Any]] = {
    # the method and its parameters to the letter, scikit-learn's k-means included
    "paper": {"kmeans_engine": "sklearn", "regroup_after": 0},
    # fewest rows at the score of the paper's S=512 on a real checkpoint at 8K in MLA (eval/results/two_stage); no
    # default, since on the embedded model at 8K it loses keys that S=512 finds
    "recommended": {"estimator": "pooled", "routing": "two_stage", "parents_per_head": 64, "budget": 128},
    # where many heads share a row: fastest at the attention error of one stage per head with S=128 (kernels/NOTES.md)
    "many_heads": {
        "estimator": "pooled",
        "noise": "shared",
        "routing": "two_stage",
        "parents_per_head": 16,
        "budget": 64,
    },
}


def choices() -> dict[str, tuple[str, ...]]:
    """The values that each setting of words can have; methods and backends are what is registered now."""
    words = {name: get_args(literal) for name, literal in _LITERALS.items()}
    return {"method": tuple(METHODS), "backend": ("auto", *BACKENDS), **words}


@dataclass(frozen=True)
class SantaConfig:
    """Settings of SANTA++ and of the methods it is compared with.

    A method refuses settings that it does not use, so that none is given in vain. ``"dense"`` alone takes them all, and
    keeps them for the method that comes next.

    Attributes:
        method: a name in :data:`latent_santa.methods.METHODS`: ``"santa++"`` samples teams by their representatives
            (Algorithm 1); ``"santa"`` scans every key and draws rows with replacement; ``"gumbel_rows"`` scans every
            key and samples rows without replacement; ``"centroid"`` routes clusters of ``parent_size`` rows by their
            mean key (Appendix B.2); ``"dense"`` is the model's own attention through the same patch and cache. The
            others are baselines; each one's module has its rule.
        parents: how prompt rows are first grouped: ``"kmeans"`` (Algorithm 3), ``"contiguous"`` (Algorithm 4), or
            ``"probes"``: k-means on how the prompt's last 64 queries score the rows (Appendix B.5). The prefill must
            keep these queries: it runs under this setting, or through ``santa.prefill``.
        parent_size: P, nominal rows per parent. For ``"centroid"`` it is B, the nominal cluster size.
        representatives: R, most representatives (and so teams) per parent. Must divide P.
        budget: S, the nominal budget. Equation 5 turns it into K = S / (P / R) teams per head. Not a row count.
        estimator: ``"per_head"`` lets a head use the teams it selected (the paper); ``"pooled"`` lets every head of a
            sharing group use every team of the union, with one inclusion correction per team.
        noise: ``"independent"`` draws for each head, or one draw ``"shared"`` by the heads of a group.
        routing: ``"one_stage"`` scores every representative (the paper); ``"two_stage"`` samples parents first and
            scores the representatives of sampled parents only (:mod:`latent_santa.two_stage`). The faster one with the
            Triton kernels at large batches and long contexts, and the slower one at batch 1 (kernels/README.md). It is
            never chosen by shape: a prompt's draws do not depend on what else is in its batch.
        parents_per_head: K1 of two stages, parents that each head samples first; K of Equation 5 is then K2.
        parent_summary: what stands for a parent in the first stage: its ``"mean"`` key, or also its keys' spread around
            it, equal in all dimensions (``"isotropic"``, one number more) or not (``"diagonal"``, one vector more).
        exact_first: first rows of a sequence that stay out of teams and are attended exactly; 0 in the paper.
        exact_last: last rows of a prompt, and of each further turn, likewise; 0 in the paper.
        draws: how ``"santa"`` draws its S rows: ``"independent"``, or ``"systematic"`` from one uniform per head.
        hash_bits, hash_tables: K bits in each of L tables, by which ``"magicpig"`` samples rows.
        seed: base seed of the sampling noise, below 2**64.
        kmeans_seed: seed of the k-means parents, below 2**32.
        kmeans_engine: ``"sklearn"`` is the reference, ``"torch"`` the batched engine; ``"auto"`` takes PyTorch for
            rows on a GPU.
        regroup_after: most rows that the exact suffix holds before its rows are grouped too: with contiguous parents
            the oldest whole ones, with k-means the oldest seven eighths, clustered in the steps in which the others
            come. 0 is never (the paper), which leaves a long generation dense in its own rows; ``"auto"`` is
            :data:`latent_santa.methods.base.REGROUP_AFTER`.
        routing_dtype: how frozen routing keys are kept: in the cache's dtype (``"model"``), or in ``"int8"`` or
            ``"int4"`` codes (:mod:`latent_santa.routing_keys`), which routing then reads. Queries are coded for it too,
            in 14 bits. The sums stay unbiased.
        backend: a name in :data:`latent_santa.backends.BACKENDS`, or ``"auto"``: Triton for rows on a GPU where its
            kernels can run, else PyTorch.
        first_token: ``"replay"`` runs the last prompt token again through sparse attention (Appendix F);
            ``"dense"`` keeps the prefill's own logits for the first generated token (Appendix A).

    Raises:
        ValueError: a field has a wrong type or value, or differs from its default and is none of the method's; the
            message names field, value and rule.
    """

    method: str = "santa++"
    parents: Parents = "kmeans"
    parent_size: int = 16
    representatives: int = 4
    budget: int = 512
    estimator: Estimator = "per_head"
    noise: Noise = "independent"
    routing: Routing = "one_stage"
    parents_per_head: int = 64
    parent_summary: ParentSummary = "mean"
    exact_first: int = 0
    exact_last: int = 0
    draws: Draws = "independent"
    hash_bits: int = 10
    hash_tables: int = 150
    seed: int = 0
    kmeans_seed: int = 0
    kmeans_engine: KMeansEngine = "auto"
    regroup_after: int | Literal["auto"] = "auto"
    routing_dtype: RoutingDtype = "model"
    backend: str = "auto"
    first_token: FirstToken = "replay"

    def __post_init__(self) -> None:
        for name, allowed in choices().items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in allowed:
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
        method = METHODS[self.method]
        unused = self._unused()
        if unused and method.sampled:
            name = unused[0]
            users = [other.name for other in METHODS.values() if name in other.settings]
            raise ValueError(
                f"{name}={getattr(self, name)!r}: method {self.method!r} does not use it; {', '.join(users)} "
                f"{'do' if len(users) > 1 else 'does'}: leave it out, or take over what the method uses with "
                f"config.for_method({self.method!r})"
            )
        self._check_regrouping()
        method.check(self)
        most = method.regroup_after(self)
        if most and self.exact_last >= most and "exact_last" in method.settings:
            raise ValueError(
                f"exact_last={self.exact_last}: must be less than the {most} rows that the exact suffix holds before "
                "its oldest are grouped (regroup_after): use fewer, or a larger regroup_after"
            )

    def _check_regrouping(self) -> None:
        after = self.regroup_after
        if after == "auto":
            return
        if isinstance(after, bool) or not isinstance(after, Integral):
            raise ValueError(f'regroup_after={after!r}: must be an int, or "auto"')
        object.__setattr__(self, "regroup_after", int(after))
        if after != 0 and METHODS[self.method].parents(self) == "probes":
            raise ValueError(
                f'regroup_after={after}: must be 0 (never) or "auto" with parents="probes", which clusters by queries '
                "of the prompt's prefill"
            )
        if after != 0 and METHODS[self.method].sampled and after < self.parent_size:
            raise ValueError(
                f"regroup_after={after}: must be 0 (never) or at least P = parent_size = {self.parent_size}, since a "
                "whole parent is grouped"
            )

    @property
    def teams_per_head(self) -> int:
        """K of Equation 5 before the cap by the number of teams; rows for methods of single rows."""
        return METHODS[self.method].teams_per_head(self)

    @property
    def grouping(self) -> tuple[Any, ...]:
        """What the prompt's teams depend on; teams built under another value are not used."""
        return (self.method, *(getattr(self, name) for name in METHODS[self.method].grouped_by(self)))

    def used(self) -> dict[str, Any]:
        """The method and the settings that it uses, by name."""
        return {name: getattr(self, name) for name in ("method", *METHODS[self.method].settings)}

    def _unused(self) -> list[str]:
        """Fields that differ from their defaults and that the method does not use."""
        own = ("method", *METHODS[self.method].settings)
        return [one.name for one in fields(self) if one.name not in own and getattr(self, one.name) != one.default]

    def for_method(self, method: str, **overrides: Any) -> SantaConfig:
        """Another method with those of these settings that it uses (``"dense"``: all); the others are defaults.

        Raises:
            ValueError: there is no such method, an override is not a field or is not used, or the result breaks a rule.
        """
        _known(overrides)
        if method not in METHODS or not METHODS[method].sampled:
            return replace(self, **{"method": method, **overrides})
        used = {name: getattr(self, name) for name in METHODS[method].settings}
        return SantaConfig(**{"method": method, **used, **overrides})

    def with_overrides(self, **overrides: Any) -> SantaConfig:
        """Return a checked copy with some fields changed.

        Raises:
            ValueError: an override is not a field, or the result breaks a rule.
        """
        _known(overrides)
        return replace(self, **overrides)

    @classmethod
    def preset(cls, name: str) -> SantaConfig:
        """The settings of a name in :data:`PRESETS`.

        ``"paper"`` is the paper's method: one stage, per head, k-means 16/4 by scikit-learn, S = 512, replay.
        ``"recommended"`` reads fewest rows at the paper's score on a real checkpoint at 8K in MLA (pooled, two stages);
        on the embedded model at 8K it loses some, so it is no default.
        ``"many_heads"`` is for models of 64 heads and more that share a row (DeepSeek-V2, V3): pooled, two stages, and
        one draw for all heads, which so many heads need few of.

        Raises:
            ValueError: there is no such preset.
        """
        if name not in PRESETS:
            raise ValueError(f"preset={name!r}: must be one of {', '.join(map(repr, PRESETS))}")
        return cls(**PRESETS[name])

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SantaConfig:
        """The inverse of :meth:`to_dict`; fields left out get their defaults.

        Raises:
            ValueError: they are no dictionary, a name is no field, or a value breaks a rule.
        """
        if not isinstance(values, dict):
            raise ValueError(
                f"a dict or a JSON object with settings by name is expected, not a {type(values).__name__}"
            )
        _known(values)
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write the settings to a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> SantaConfig:
        """Read the settings from a JSON file.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds no JSON object, or one that is no valid configuration; the message names the file.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:  # json and UTF-8 errors are ValueErrors
            raise ValueError(f"{path}: {error}") from error


def _known(names: Any) -> None:
    known = [field.name for field in fields(SantaConfig)]
    unknown = sorted(map(str, set(names) - set(known)))
    if unknown:
        raise ValueError(f"unknown setting {', '.join(unknown)}: SantaConfig has {', '.join(known)}")
