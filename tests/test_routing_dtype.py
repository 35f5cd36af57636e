"""Routing keys in integer codes, on patched models: what they change and what they must not."""

from __future__ import annotations

import pytest
import torch

import latent_santa

from .tiny_models import assert_same, cache_of, generate, prompt, settings_for, tiny_model

SMALL = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 16}
DIMS = {"deepseek_v2": {"kv_lora_rank": 32, "qk_rope_head_dim": 16}, "qwen2": {"head_dim": 32}}


@pytest.fixture(scope="module", params=list(DIMS))
def model(request):
    return tiny_model(request.param, **DIMS[request.param])


@pytest.mark.parametrize("routing_dtype", ["int8", "int4"])
def test_every_team_is_still_dense_attention(model, routing_dtype):
    wanted = generate(model, prompt(60))
    with latent_santa.patch(model, **{**SMALL, "budget": 4096}, routing_dtype=routing_dtype):
        assert_same(generate(model, prompt(60)), wanted)


@pytest.mark.parametrize("method", ["santa++", "centroid"])
def test_the_ledger_counts_the_same_rows_and_fewer_bytes(model, method):
    entries = {}
    for routing_dtype in ("model", "int8", "int4"):
        with latent_santa.patch(model, settings_for(method, **SMALL, routing_dtype=routing_dtype)) as santa:
            cache = cache_of(generate(model, prompt(90)))
            entries[routing_dtype] = santa.access.as_dict()["per_step"][0]
        for layer in cache.layers:
            parts = layer.grouped.teams.routing_keys
            assert {part.bits for part in parts} == {{"model": 32, "int8": 8, "int4": 4}[routing_dtype]}
    first = cache.layers[0]
    heads, row = first.keys.shape[1], 4 * (first.keys.shape[-1] + first.values.shape[-1])
    for entry in entries.values():
        assert entry["dense_bytes"] == entry["dense"] * row and entry["routing"] == entries["model"]["routing"]
    # float32 keys: a routing row of the model's dtype is a whole row in MLA and a key in GQA
    key = row if heads == 1 else 4 * first.keys.shape[-1]
    plain = entries["model"]
    assert plain["bytes"] == plain["routing"] * key + (plain["union"] + plain["suffix"]) * row
    routing = {name: e["bytes"] - (e["union"] + e["suffix"]) * row for name, e in entries.items()}
    assert routing["int4"] < routing["int8"] < routing["model"]
    assert routing["int4"] < 0.3 * routing["model"]


def test_a_second_turn_joins_codes_and_beams_take_them_along(model):
    with latent_santa.patch(model, **SMALL, routing_dtype="int4") as santa:
        output = generate(model, prompt(60), num_beams=3)
        assert output.sequences.shape[1] == 66 and santa.sparse_calls == 6
        first = generate(model, prompt(60), 4)
        cache = cache_of(first)
        centers = [part.center.clone() for part in cache.layers[0].grouped.teams.routing_keys]
        generate(model, torch.cat((first.sequences, prompt(30, seed=1)), 1), 4, cache=cache)
        teams = cache.layers[0].grouped.teams
        assert teams.routing_keys[0].shape[2] == teams.M > int(teams.count.max())  # with room for generated rows
        # both turns' scores miss the same number
        for part, center in zip(teams.routing_keys, centers, strict=True):
            assert torch.equal(part.center, center)
        if model.config.model_type == "qwen2":
            rows = teams.representative[..., None].long().expand(-1, -1, -1, cache.layers[0].keys.shape[-1])
            keys = cache.layers[0].keys.gather(2, rows.clamp_min(0))
            held = teams.routing_keys[0]
            step = held.scales.float().repeat_interleave(held.group, -1)
            real = (teams.sizes > 0)[..., None]
            assert bool((((keys - centers[0] - held.float()).abs() <= 0.51 * step + 1e-6) | ~real).all())


def test_dimensions_that_do_not_divide_are_refused_before_anything_runs():
    model = tiny_model("qwen2")  # 8 dimensions a head
    with pytest.raises(ValueError, match='8 key dimensions do not divide into an even number .*use "int8" or'):
        latent_santa.patch(model, routing_dtype="int4")
    with latent_santa.patch(model) as santa:
        with pytest.raises(ValueError, match="8 key dimensions"):
            santa.configure(routing_dtype="int4")
        assert santa.config.routing_dtype == "model"
