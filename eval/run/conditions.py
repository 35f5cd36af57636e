"""The compared settings of attention: each is a whole `SantaConfig`, and one line of a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Any

from latent_santa.backends import BACKENDS
from latent_santa.config import SantaConfig, choices
from latent_santa.eval.errors import EvalError
from latent_santa.methods import METHODS

TWO_STAGES = ("routing", "parents_per_head", "parent_summary")
HASHES = ("hash_bits", "hash_tables")
EXACT = ("exact_first", "exact_last")
# Fields in which the settings of one run differ; the others are equal in all of them.
SWEPT = ("budget", "parents", "parent_size", "representatives", "estimator", "noise", *TWO_STAGES, *HASHES, *EXACT)

_NAMES = {"dense": "dense (SDPA)", "santa": "SANTA", "santa++": "SANTA++", "kmeans": "k-means"}


def swept_by(method: str) -> list[str]:
    """The fields in which settings of a method differ. Methods without representatives are baselines: per head only."""
    used = METHODS[method].settings
    fields = [field for field in SWEPT if field in used]
    return [field for field in fields if field not in ("estimator", "noise") or "representatives" in used]


def swept(config: SantaConfig) -> dict[str, Any]:
    """The method and its swept fields, the others None: how a condition stands in a manifest and in a table."""
    own = swept_by(config.method)
    if config.routing == "one_stage":
        own = [field for field in own if field not in TWO_STAGES]
    if config.noise == "independent":
        own = [field for field in own if field != "noise"]
    own = [field for field in own if field not in EXACT or getattr(config, field)]
    return {"method": config.method} | {field: getattr(config, field) if field in own else None for field in SWEPT}


def name(config: SantaConfig) -> str:
    """The method with everything but the budget, as tables and lines of the plot show it."""
    own = swept(config)
    words = [_NAMES.get(config.method, config.method)]
    parents = _NAMES.get(config.parents, config.parents)
    if own["representatives"]:
        words += [parents, f"{config.parent_size}/{config.representatives}"]
    elif own["parent_size"]:
        words += [f"B={config.parent_size}", *([parents] if own["parents"] else [])]
    if own["hash_bits"]:
        words.append(f"K={config.hash_bits} L={config.hash_tables}")
    if own["estimator"]:
        words.append(config.estimator.replace("_", " "))
    if own["noise"]:
        words.append("shared noise")
    if own["routing"]:
        words.append(f"two-stage K1={config.parents_per_head}")
        words += [] if config.parent_summary == "mean" else [config.parent_summary]
    if own["exact_first"] or own["exact_last"]:
        words.append(f"exact {config.exact_first}/{config.exact_last}")
    return " ".join(words)


def label(config: SantaConfig) -> str:
    """The name with the budget."""
    budget = swept(config)["budget"]
    return name(config) + (f" S={budget}" if budget else "")


def slug(config: SantaConfig) -> str:
    """A file name for the results of these settings."""
    text = label(config).replace("SANTA++", "santapp").replace("(SDPA)", "").replace("S=", "s").replace("K1=", "k1-")
    return "_".join(text.lower().replace("/", "-").replace("=", "").split())


def running_order(conditions: Sequence[SantaConfig]) -> list[SantaConfig]:
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
    if config.backend != "auto":
        import torch

        reason = BACKENDS[config.backend]().unavailable(torch.device(device))
        if reason:
            raise EvalError(f"--backend {config.backend} cannot run here: {reason}; use --backend torch")
    return config


def from_manifest(manifest: Mapping[str, Any], where: object) -> list[SantaConfig]:
    """The conditions of a run, from its manifest at `where`. Raises EvalError for those that this version lacks."""
    found = []
    for data in manifest["conditions"]:
        try:
            given = {field: value for field, value in data.items() if value is not None}
            # earlier versions took settings that a method does not use
            unused = set(SWEPT).difference(METHODS[given["method"]].settings)
            found.append(SantaConfig(**{field: value for field, value in given.items() if field not in unused}))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise EvalError(f"{where}: conditions has {data!r}, which this version does not know: {error}") from error
    return found


def old_santa(manifest: Mapping[str, Any]) -> bool:
    """Whether the run is from before "santa" drew with replacement; it then sampled rows as "gumbel_rows" does."""
    return "draws" not in manifest["settings"]


def expand(
    base: SantaConfig,
    methods: Sequence[str],
    budgets: Sequence[int],
    estimators: Sequence[str],
    parents: Sequence[str],
    teams: Sequence[tuple[int, int]],
    centroid_sizes: Sequence[int],
    routing: Sequence[Mapping[str, Any]] = ({},),
    noise: Sequence[str] = (),
    hashes: Sequence[Mapping[str, Any]] = ({},),
    exact: Sequence[Mapping[str, Any]] = ({},),
    budgets_of: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> tuple[SantaConfig, ...]:
    """All conditions of a run, dense first, each method with the settings that it uses.

    base     what all of them share. A method gets of it what it uses
    teams    pairs (P, R)
    routing  fields that say how teams are routed, such as {"routing": "two_stage", "parents_per_head": 64}
    noise    kinds of noise; none given: the base's
    hashes   fields that say how rows are hashed, such as {"hash_bits": 10, "hash_tables": 150}
    exact    fields that say which rows stay out of teams, such as {"exact_first": 16, "exact_last": 48}
    budgets_of  budgets of single methods, instead of `budgets`

    Raises EvalError naming what is wrong.
    """
    for what, given, known in (
        ("method", methods, tuple(METHODS)),
        ("estimator", estimators, choices()["estimator"]),
        ("parents", parents, choices()["parents"]),
        ("noise", noise, choices()["noise"]),
    ):
        for value in given:
            if value not in known:
                raise EvalError(f"unknown {what} {value!r}; choose from {', '.join(known)}")

    def variants(method: str) -> Iterator[dict[str, Any]]:
        own = swept_by(method)
        sizes: Sequence[tuple[int, ...]] = [()]
        if "representatives" in own:
            sizes = teams
        elif "parent_size" in own:
            sizes = [(size,) for size in centroid_sizes]
        axes: list[list[dict[str, Any]]] = [
            [{"parents": value} for value in parents] if "parents" in own else [{}],
            [dict(zip(("parent_size", "representatives"), size, strict=False)) for size in sizes],
            [{"estimator": value} for value in estimators] if "estimator" in own else [{}],
            [{"noise": value} for value in noise] or [{}] if "noise" in own else [{}],
            [dict(fields) for fields in routing] if "routing" in own else [{}],
            [dict(fields) for fields in hashes] if "hash_bits" in own else [{}],
            [dict(fields) for fields in exact] if "exact_first" in own else [{}],
            [{"budget": value} for value in budgets_of.get(method, budgets)] if "budget" in own else [{}],
        ]
        for parts in product(*axes):
            yield {field: value for part in parts for field, value in part.items()}

    found: dict[SantaConfig, None] = {}
    for method in sorted(methods, key=lambda method: method != "dense"):
        for variant in variants(method):
            try:
                found[base.for_method(method, **variant)] = None
            except ValueError as error:
                raise EvalError(f"{method} S={variant.get('budget')}: {error}") from error
    return tuple(found)
