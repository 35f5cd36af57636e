"""The settings and their rules."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields

import pytest

from latent_santa import SantaConfig
from latent_santa.config import choices
from latent_santa.methods import METHODS

CHOICES = choices()

INTEGERS = ("parent_size", "representatives", "budget", "seed", "kmeans_seed")


def test_defaults_are_the_papers():
    config = SantaConfig()
    assert (config.parent_size, config.representatives, config.budget) == (16, 4, 512)
    assert (config.method, config.parents, config.estimator, config.noise) == (
        "santa++", "kmeans", "per_head", "independent",
    )  # fmt: skip
    assert config.teams_per_head == 128


def test_frozen_and_hashable():
    config = SantaConfig()
    with pytest.raises(FrozenInstanceError):
        config.budget = 4  # type: ignore[misc]
    assert hash(config) == hash(SantaConfig())
    assert config == SantaConfig() != SantaConfig(seed=1)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("value", ["", "Dense", None, 1, ["santa"], True])
def test_choices(name, value):
    with pytest.raises(ValueError) as error:
        SantaConfig(**{name: value})
    assert str(error.value).startswith(f"{name}={value!r}: ")
    assert all(repr(choice) in str(error.value) for choice in CHOICES[name])


@pytest.mark.parametrize("name, choice", [(name, choice) for name, all_of in CHOICES.items() for choice in all_of])
def test_every_choice_is_accepted(name, choice):
    method = {} if name == "method" else {"method": "santa" if name == "draws" else "santa++"}
    assert getattr(SantaConfig(**method, **{name: choice}), name) == choice


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [16.0, "16", None, True, False, (16,)])
def test_integers(name, value):
    with pytest.raises(ValueError) as error:
        SantaConfig(**{name: value})
    assert str(error.value) == f"{name}={value!r}: must be an int, not {type(value).__name__}"


RULES = [
    ({"parent_size": 0}, "parent_size=0", "at least 1"),
    ({"parent_size": -16}, "parent_size=-16", "at least 1"),
    ({"representatives": 0}, "representatives=0", "at least 1"),
    ({"budget": 0}, "budget=0", "at least 1"),
    ({"budget": -4}, "budget=-4", "at least 1"),
    ({"seed": -1}, "seed=-1", "non-negative"),
    ({"kmeans_seed": -1}, "kmeans_seed=-1", "non-negative"),
    ({"seed": 2**64}, f"seed={2**64}", "below 2**64"),
    ({"kmeans_seed": 2**32}, f"kmeans_seed={2**32}", "below 2**32"),
    ({"representatives": 3}, "representatives=3", "P must be divisible by R, and parent_size=16"),
    ({"parent_size": 4, "representatives": 8}, "representatives=8", "P must be divisible by R, and parent_size=4"),
    ({"budget": 510}, "budget=510", "S must be divisible by P/R = 4"),
    ({"parent_size": 32, "budget": 4}, "budget=4", "S must be divisible by P/R = 8"),
    ({"method": "centroid", "budget": 15}, "budget=15", "at least B = parent_size = 16"),
]


@pytest.mark.parametrize("overrides, given, rule", RULES)
def test_rules_name_field_value_and_rule(overrides, given, rule):
    with pytest.raises(ValueError) as error:
        SantaConfig(**overrides)
    assert str(error.value).startswith(given + ":") and rule in str(error.value)
    with pytest.raises(ValueError, match="must be"):
        SantaConfig().with_overrides(**overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        {"seed": 2**64 - 1, "kmeans_seed": 2**32 - 1},
        {"parent_size": 1, "representatives": 1, "budget": 1},
        {"method": "santa", "budget": 511},
        {"method": "dense", "budget": 511},
        {"method": "centroid", "budget": 17},
        {"method": "santa", "representatives": 4},  # the default says nothing
        {"method": "dense", "representatives": 5, "budget": 128, "draws": "systematic"},
    ],
)
def test_edges_that_are_allowed(overrides):
    SantaConfig(**overrides)


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ({"budget": 128}, 32),
        ({"parent_size": 32, "budget": 128}, 16),
        ({"representatives": 16, "budget": 128}, 128),
        ({"representatives": 1, "budget": 16}, 1),
        ({"method": "santa", "budget": 77}, 77),
        ({"method": "centroid", "budget": 128}, 8),
        ({"method": "centroid", "budget": 47}, 2),
    ],
)
def test_teams_per_head(overrides, expected):
    """Equation 5, before the cap by the number of teams."""
    assert SantaConfig(**overrides).teams_per_head == expected


def test_with_overrides():
    config = SantaConfig(seed=3)
    changed = config.with_overrides(budget=64, noise="shared")
    assert (changed.seed, changed.budget, changed.noise, config.budget) == (3, 64, "shared", 512)
    assert config.with_overrides() == config
    # P and R are checked together, so both may change at once
    assert config.with_overrides(parent_size=6, representatives=3).teams_per_head == 256


def test_with_overrides_unknown_field():
    with pytest.raises(ValueError) as error:
        SantaConfig().with_overrides(budgets=3, topk=1)
    assert str(error.value).startswith("unknown setting budgets, topk: ")
    assert all(field.name in str(error.value) for field in fields(SantaConfig))


OTHER = {
    "parents": "contiguous", "parent_size": 32, "representatives": 8, "budget": 256, "estimator": "pooled",
    "noise": "shared", "seed": 5, "kmeans_seed": 6, "kmeans_engine": "torch", "backend": "torch",
    "routing_dtype": "int4", "draws": "systematic", "hash_bits": 9, "hash_tables": 75, "regroup_after": 0,
    "routing": "two_stage", "parents_per_head": 3, "parent_summary": "diagonal",
    "exact_first": 2, "exact_last": 7,
    "first_token": "dense",
}  # fmt: skip
TEAMS = {"parents", "parent_size", "exact_first", "exact_last", "routing_dtype"}
SHAPES_TEAMS = [
    ({}, {*TEAMS, "representatives", "kmeans_seed", "kmeans_engine", "routing"}),
    ({"parents": "contiguous"}, {*TEAMS, "representatives", "routing"}),
    ({"method": "centroid"}, {*TEAMS, "kmeans_seed", "kmeans_engine"}),
    ({"method": "santa"}, set()),
    ({"method": "magicpig"}, {"hash_bits", "hash_tables", "seed"}),
    ({"method": "dense"}, set()),
]


@pytest.mark.parametrize("base, shaping", SHAPES_TEAMS)
def test_grouping_changes_with_what_shapes_teams_only(base, shaping):
    config = SantaConfig(**base)
    others = {**OTHER, "parents": "kmeans"} if config.parents == "contiguous" else OTHER
    assert set(others) | {"method"} == {field.name for field in fields(SantaConfig)}
    used = METHODS[config.method].settings
    groupings = {name: config.with_overrides(**{name: others[name]}).grouping for name in used}
    assert {name for name, grouping in groupings.items() if grouping != config.grouping} == shaping


@pytest.mark.parametrize("method", sorted(set(CHOICES["method"]) - {"dense"}))
def test_settings_that_a_method_does_not_use_are_refused(method):
    used = METHODS[method].settings
    for name, value in OTHER.items():
        if name not in used:
            with pytest.raises(ValueError, match=f"^{name}={value!r}: method '{re.escape(method)}' does not use it; "):
                SantaConfig(method=method, **{name: value})
    kept = SantaConfig(method="dense", **OTHER)
    assert kept.for_method("dense") == kept and kept.with_overrides(method="dense") == kept
    config = SantaConfig(method="dense", **OTHER).for_method(method)
    assert config.used() == {"method": method} | {name: OTHER[name] for name in used}
    assert SantaConfig.from_dict(config.to_dict()) == config


def test_the_refusal_names_who_uses_the_setting():
    with pytest.raises(
        ValueError, match="draws='systematic': method 'quest' does not use it; santa does: leave it out"
    ):
        SantaConfig(method="quest", draws="systematic")
    with pytest.raises(ValueError, match="parents='contiguous'.*take over what the method uses with config.for_method"):
        SantaConfig(parents="contiguous").with_overrides(method="sparq")
    with pytest.raises(ValueError, match="method='none': must be one of"):
        SantaConfig().for_method("none")
    with pytest.raises(ValueError, match="noise='shared': method 'quest' does not use it"):
        SantaConfig().for_method("quest", noise="shared")


def test_grouping_tells_methods_apart():
    groupings = [SantaConfig(method=method).grouping for method in CHOICES["method"]]
    assert len(set(groupings)) == len(groupings)
