"""The compared settings: every combination once, each a whole configuration, known again from a manifest."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from latent_santa.config import SantaConfig
from latent_santa.eval.cli import main
from latent_santa.eval.errors import EvalError
from latent_santa.eval.report.summary import summarise
from latent_santa.eval.run.conditions import SWEPT, expand, from_manifest, slug, swept
from latent_santa.eval.run.freeze import check_resume
from latent_santa.eval.run.store import Store
from latent_santa.methods import METHODS
from tests.eval_support import DENSE
from tests.report_runs import make_run, same


def test_conditions_expand_check_and_name_themselves():
    conditions = expand(
        DENSE,
        ["santa++", "santa", "dense", "centroid"],
        [128, 256],
        ["per_head", "pooled"],
        ["kmeans", "contiguous"],
        [(16, 4), (16, 1)],
        [4, 16],
    )
    assert conditions[0] == DENSE
    assert len(conditions) == 1 + 2 + 2 * 2 * 2 * 2 + 2 * 2 * 2
    own = expand(DENSE, ["santa", "snapkv"], [4], ["per_head"], [], [], [], budgets_of={"snapkv": [7, 9]})
    assert [(condition.method, condition.budget) for condition in own] == [("santa", 4), ("snapkv", 7), ("snapkv", 9)]
    slugs = [slug(condition) for condition in conditions]
    assert len(set(slugs)) == len(slugs) and "santapp_k-means_16-4_per_head_s128" in slugs and "dense" in slugs
    # A slug must never be the beginning of another's file name before a dot.
    assert all(set(slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_") for slug in slugs)
    assert from_manifest({"conditions": [swept(condition) for condition in conditions]}, "here") == list(conditions)
    # Files of finished runs have these names.
    assert {
        "dense",
        "santa_s128",
        "centroid_b16_k-means_s128",
        "centroid_b4_contiguous_s256",
        "santapp_contiguous_16-1_pooled_s256",
        "santapp_k-means_16-4_per_head_s128",
    } <= set(slugs)
    assert swept(conditions[0]) == {"method": "dense"} | dict.fromkeys(SWEPT)
    stages = [{"routing": "one_stage"}, *({"routing": "two_stage", "parents_per_head": k} for k in (32, 64))]
    routed = expand(DENSE, ["santa++", "santa"], [128], ["pooled"], ["contiguous"], [(16, 4)], [16], stages)
    assert [slug(condition) for condition in routed] == [
        "santapp_contiguous_16-4_pooled_s128",
        "santapp_contiguous_16-4_pooled_two-stage_k1-32_s128",
        "santapp_contiguous_16-4_pooled_two-stage_k1-64_s128",
        "santa_s128",
    ]
    assert from_manifest({"conditions": [swept(condition) for condition in routed]}, "here") == list(routed)
    noisy = expand(
        DENSE, ["santa++"], [128], ["pooled"], ["contiguous"], [(16, 4)], [16], noise=["independent", "shared"]
    )
    assert [slug(condition) for condition in noisy] == [
        "santapp_contiguous_16-4_pooled_s128",
        "santapp_contiguous_16-4_pooled_shared_noise_s128",
    ]
    kept = [{"exact_first": 0, "exact_last": 0}, {"exact_first": 16, "exact_last": 48}]
    exact = expand(DENSE, ["santa++", "centroid"], [128], ["pooled"], ["contiguous"], [(16, 4)], [16], exact=kept)
    assert [slug(condition) for condition in exact] == [
        "santapp_contiguous_16-4_pooled_s128",
        "santapp_contiguous_16-4_pooled_exact_16-48_s128",
        "centroid_b16_contiguous_s128",
        "centroid_b16_contiguous_exact_16-48_s128",
    ]
    assert from_manifest({"conditions": [swept(condition) for condition in exact]}, "here") == list(exact)
    assert not {"routing", "parents_per_head"} & {key for key, value in swept(routed[0]).items() if value is not None}
    with pytest.raises(EvalError, match="unknown estimator 'mean'.*per_head, pooled"):
        expand(DENSE, ["santa++"], [128], ["mean"], ["kmeans"], [(16, 4)], [16])
    with pytest.raises(EvalError, match="S=130.*divisible by P/R = 4"):
        expand(DENSE, ["santa++"], [130], ["pooled"], ["kmeans"], [(16, 4)], [16])


def test_options_of_two_stages_belong_to_two_stages(capsys):
    for options in (["--parents-per-head", "32"], ["--parent-summary", "diagonal"]):
        assert main(["ruler", "--model", "builtin:tiny", "--dry-run", *options]) == 2
        assert "are of --routing two_stage: add it, or leave them out" in capsys.readouterr().err


def test_every_condition_takes_what_its_method_uses():
    """What a method does not use is the default, so nothing is left of the condition that ran before it."""
    base = replace(DENSE, seed=5, noise="shared", kmeans_seed=2, routing_dtype="int8")
    dense, *conditions = expand(base, list(METHODS), [128], ["pooled"], ["contiguous"], [(32, 2)], [8])
    assert dense == base and {condition.method for condition in conditions} == {*METHODS} - {"dense"}
    for condition in conditions:
        used, default = METHODS[condition.method].settings, SantaConfig()
        own = {field for field, value in swept(condition).items() if value is not None} | {"method"}
        for name in {field.name for field in fields(condition)} - own:
            assert getattr(condition, name) == getattr(base if name in used else default, name)
        # baselines without representatives are per head, whatever was asked for
        assert condition.estimator == ("pooled" if {"estimator", "representatives"} <= set(used) else "per_head")


def test_conditions_of_an_old_run_may_have_what_their_method_does_not_use():
    old = {"method": "quest", "budget": 128, "parent_size": 16, "estimator": "per_head", "noise": "shared"}
    (found,) = from_manifest({"conditions": [old]}, "a run")
    assert found == SantaConfig(method="quest", budget=128)


def test_santa_of_an_old_run_is_not_santa_of_today(tmp_path):
    santa = SantaConfig(method="santa", budget=128)
    manifest = {"settings": {}, "conditions": [swept(santa)], "environment": {}}
    store = Store(tmp_path / "old")
    store.freeze(manifest, [])
    with pytest.raises(EvalError, match="SANTA S=128: rows without replacement then, with replacement now"):
        check_resume(store, {}, (santa,))
    warning = "SANTA of this run sampled rows without replacement, as the method gumbel_rows does now"
    scores = {DENSE: same([1, 1, 1, 1]), santa: same([1, 1, 1, 1])}
    assert warning in summarise(make_run(tmp_path / "a", scores))["warnings"]
    assert warning not in summarise(make_run(tmp_path / "b", scores, draws="independent"))["warnings"]
