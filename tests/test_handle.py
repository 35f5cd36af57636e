"""The handle: found again, honest about what its counts are of, and refusals that name what to do."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from torch import nn
from transformers.cache_utils import DynamicLayer

import latent_santa
from latent_santa.patches import control
from latent_santa.patches.limits import context_limit

from .tiny_models import assert_same, generate, prompt, tiny_model

SMALL = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 16}
EVERY_TEAM = {**SMALL, "budget": 4096}


@pytest.fixture(scope="module", params=["deepseek_v2-yarn", "qwen2"])
def model(request):
    return tiny_model(request.param)


def test_a_lost_handle_is_found_again(model):
    latent_santa.patch(model, **SMALL)  # as a notebook cell that keeps nothing
    with pytest.raises(RuntimeError, match=r"latent_santa.handle\(model\) gives the handle back"):
        latent_santa.patch(model)
    wrapper = nn.Sequential(model)
    found = latent_santa.handle(wrapper)
    assert found.model is model and found.config.budget == 16
    latent_santa.unpatch(wrapper)
    assert not found.patched
    latent_santa.unpatch(model)  # nothing is left to undo
    with pytest.raises(RuntimeError, match="is not patched: latent_santa.patch"):
        latent_santa.handle(model)
    for front_door in (latent_santa.handle, latent_santa.unpatch):
        with pytest.raises(TypeError, match="got a str: give the model"):
            front_door("a model's name")


def test_presets(model):
    with latent_santa.patch(model, preset="recommended", parent_size=8, representatives=2) as santa:
        assert (santa.config.routing, santa.config.estimator, santa.config.budget) == ("two_stage", "pooled", 128)
        assert santa.config.parent_size == 8
        generate(model, prompt(60), 2)
    paper = latent_santa.SantaConfig.preset("paper")
    default = latent_santa.SantaConfig().to_dict()
    assert paper.to_dict() == {**default, "kmeans_engine": "sklearn", "regroup_after": 0}
    with pytest.raises(ValueError, match="preset='best': must be one of 'paper', 'recommended', 'many_heads'"):
        latent_santa.patch(model, preset="best")
    with pytest.raises(ValueError, match="config and preset='paper' were both given"):
        latent_santa.patch(model, paper, preset="paper")


@pytest.mark.parametrize("given", [{"preset": "paper"}, {"graphs": "off"}, {"compile": True}])
def test_configure_says_how_to_change_what_only_patch_takes(model, given):
    name = next(iter(given))
    with latent_santa.patch(model, budget=64) as santa:
        with pytest.raises(ValueError, match=f"configure has no {name}, which patch takes: "):
            santa.configure(budget=32, **given)
        assert santa.config.budget == 64


def test_the_report_recommends_one_draw_for_many_heads():
    model = tiny_model("deepseek_v2", hidden_size=64, num_attention_heads=64, num_key_value_heads=64)
    with latent_santa.patch(model) as santa:
        assert '64 heads share each row, and each draws by itself: preset="many_heads"' in santa.report()
        santa.configure(**latent_santa.SantaConfig.preset("many_heads").used())
        assert "heads share each row" not in santa.report()


def test_the_report_says_which_settings_its_counts_are_of(model):
    with latent_santa.patch(model, **SMALL) as santa:
        generate(model, prompt(40), 3)
        assert "add up" not in santa.report() and "layers patched" in santa.report()
        santa.configure(estimator="pooled")
        assert "are of other settings than these: 3 sparse and 0 dense calls: method santa++" in flat(santa.report())
        generate(model, prompt(40), 4)
        report = flat(santa.report())
        assert "add up 2 settings since the last reset()" in report
        assert (
            "3 sparse and 0 dense calls: method santa++, contiguous parents, P=8, R=2, S=16 (K=4), per_head" in report
        )
        assert "4 sparse and 0 dense calls: method santa++, contiguous parents, P=8, R=2, S=16 (K=4), pooled" in report
        santa.reset()
        for changed in ({"regroup_after": 8}, {"regroup_after": 0}, {"routing_dtype": "int8"}):
            santa.configure(**changed)
            generate(model, prompt(40), 4)
        lines = flat(santa.report()).split("4 sparse and 0 dense calls: ")[1:]
        assert "rows grouped at 8" in lines[0] and "rows exact" in lines[1] and "int8 routing keys" in lines[2]
        santa.reset()
        generate(model, prompt(40), 4)
        assert "add up" not in santa.report()
    assert "layers no longer patched" in santa.report()


def flat(text):
    return " ".join(text.split())


def test_continuous_batching_is_refused_at_the_call(model):
    with latent_santa.patch(model, **SMALL):
        for name in ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager"):
            if hasattr(type(model), name):
                with pytest.raises(NotImplementedError, match=f"{name}: continuous batching keeps its rows in a paged"):
                    getattr(model, name)([[1, 2, 3]])
    assert "generate_batch" not in model.__dict__


def test_beyond_the_models_positions_a_warning_once(model, monkeypatch):
    monkeypatch.setattr(control, "context_limit", lambda config: 44)
    with latent_santa.patch(model, **SMALL):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            generate(model, prompt(40), 4)
        with pytest.warns(UserWarning, match="tokens are beyond the 44 positions") as noted:
            generate(model, prompt(43), 4)
            generate(model, prompt(50), 4)
        assert sum("beyond the 44" in str(w.message) for w in noted) == 1


def test_scaled_positions():
    config = tiny_model("qwen2").config
    config.max_position_embeddings = 1000
    assert context_limit(config) == 1000
    config.rope_parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}
    assert context_limit(config) == 4000
    config.max_position_embeddings = 4000  # the product, stated
    assert context_limit(config) == 4000


def test_early_exit_drafts(model):
    """The drafts' calls leave the upper layers out, which then have no rows; tokens are those without a patch."""
    try:
        DynamicLayer().crop(-1)
    except TypeError:  # 5.17 crops no layer without rows, so that such drafts fail in it without a patch
        pytest.skip(f"transformers {transformers.__version__} has no early-exit drafts that work")
    ids, options = prompt(40), {"assistant_early_exit": 1, "attention_mask": torch.ones(1, 40).long()}
    plain = model.generate(ids, max_new_tokens=6, do_sample=False, **options)
    with latent_santa.patch(model, **EVERY_TEAM) as santa:
        assert model.generate(ids, max_new_tokens=6, do_sample=False, **options).equal(plain)
        calls = {entry["layer"]: entry["calls"] for entry in santa.access.per_layer()}
        assert calls[0] > calls[1] > 0
        santa.configure(budget=16)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # none about a generation without sampled calls, inside this one
            warnings.filterwarnings("ignore", category=FutureWarning)
            model.generate(ids, max_new_tokens=6, do_sample=False, **options)


def test_failed_generations_leave_no_state(model):
    ids = prompt(40)
    with latent_santa.patch(model, **SMALL) as santa:
        wanted = generate(model, ids, 4)

        def stop(*args):
            raise KeyboardInterrupt

        for options in ({}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 16}):
            handle = model.lm_head.register_forward_hook(stop)
            with pytest.raises(KeyboardInterrupt):
                generate(model, ids, 4, **options)
            handle.remove()
            thread = santa._control.thread
            assert (thread.generating, thread.all_logits, thread.draft_prompt, thread.prefill_target) == (
                False, False, None, None,
            )  # fmt: skip
            assert_same(generate(model, ids, 4), wanted, 0)
