"""The cache that owns the teams: crops, resets, copies, reordering, adoption, turns, and frozen representatives."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

import latent_santa
from latent_santa.patches.cache_layer import LEAST_RESERVE, TeamLayer

from .tiny_models import (
    assert_close,
    assert_same,
    cache_name,
    cache_of,
    decode_by_hand,
    filled_cache,
    generate,
    prompt,
    tiny_model,
)

SMALL = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 16, "regroup_after": 0}
EVERY_TEAM = {**SMALL, "budget": 4096}


@pytest.fixture(scope="module", params=["deepseek_v2-yarn", "qwen2"])
def model(request):
    return tiny_model(request.param)


def step(model, cache, ids, **kwargs):
    """One call on a cache: the last scores."""
    with torch.no_grad():
        given = {"logits_to_keep": 1, cache_name(model): cache}
        return model(ids, **{**given, **kwargs}).logits[:, -1]


def steps(santa):
    """(routing, union, suffix, dense) of every call, for one layer and group."""
    number = santa.layers * (1 if santa.layout == "mla" else 2)
    names = ("routing", "union", "suffix", "dense")
    return [tuple(entry[name] / number for name in names) for entry in santa.access.per_step()]


def rows_and_teams(cache):
    return [
        (
            layer.keys,
            layer.values,
            layer.grouped.teams.team_of_row,
            layer.grouped.teams.routing_keys[0].codes,
            layer.noise_key,
        )
        for layer in cache.layers
    ]


def same_state(found, wanted):
    layers = [zip(ours, theirs, strict=True) for ours, theirs in zip(found, wanted, strict=True)]
    return all(a.equal(b) for layer in layers for a, b in layer)


def test_rows_stay_in_place_and_the_suffix_grows_in_blocks(model):
    with latent_santa.patch(model, **SMALL):
        *_, cache = decode_by_hand(model, prompt(50), 5)
        places = [layer.keys.data_ptr() for layer in cache.layers]
        rows = [layer.keys.clone() for layer in cache.layers]
        for _ in range(3):
            step(model, cache, prompt(1))
        assert [layer.keys.data_ptr() for layer in cache.layers] == places
        for layer, old in zip(cache.layers, rows, strict=True):
            assert layer.keys.shape[-2] == 57 and layer.keys[..., :54, :].equal(old)
            held = layer.keys.untyped_storage().nbytes() // (4 * layer.keys.shape[1] * layer.keys.shape[-1])
            assert held <= 50 + LEAST_RESERVE
        for _ in range(4):  # past the end of the buffers
            wanted = [torch.cat((layer.keys, layer.keys[..., :LEAST_RESERVE, :]), -2) for layer in cache.layers]
            for layer in cache.layers:
                layer.update(layer.keys[..., :LEAST_RESERVE, :], layer.values[..., :LEAST_RESERVE, :])
            assert all(layer.keys.equal(w) for layer, w in zip(cache.layers, wanted, strict=True))


def test_nothing_expanded_is_held():
    model = tiny_model("deepseek_v2")
    with latent_santa.patch(model, **SMALL):
        cache = decode_by_hand(model, prompt(50), 3)[2]
    for layer in cache.layers:
        assert layer.keys.shape == (1, 1, 52, model.config.kv_lora_rank)
        assert layer.values.shape == (1, 1, 52, model.config.qk_rope_head_dim)
        assert [part.shape[-1] for part in layer.grouped.teams.routing_keys] == [16, 8]


def test_representatives_are_frozen_and_contributions_are_current(model):
    """Routing keys keep their prefill values when the cache's rows change; what is attended follows the rows."""
    with latent_santa.patch(model, **SMALL) as santa:
        cache = cache_of(generate(model, prompt(50), 1))
        frozen = [[part.codes.clone() for part in layer.grouped.teams.routing_keys] for layer in cache.layers]
        replayed = 0
        for number, (layer, parts) in enumerate(zip(cache.layers, frozen, strict=True)):
            place = layer.grouped.teams.representative.long()
            for part, rows in zip(parts, (layer.keys, layer.values), strict=False):
                found = rows.gather(2, place[..., None].expand(-1, -1, -1, rows.shape[-1]))
                assert found[place < 49].equal(part[place < 49])
                if number:  # below the first layer the replay changed the last row, which its copy does not follow
                    replayed += int(((found != part).any(-1) & (place == 49)).sum())
        assert replayed == len(parts) * (1 if santa.layout == "mla" else 2)
        twin = copy.deepcopy(cache)
        for layer in twin.layers:
            layer.keys.mul_(-2)
        santa.reset()
        scores = step(model, cache, prompt(1))
        union = santa.access.per_layer()[0]["union"]
        santa.reset()
        changed = step(model, twin, prompt(1))
        # the first layer's query depends on the token alone, so the same teams are read, but of other rows
        assert santa.access.per_layer()[0]["union"] == union
        for layer, parts in zip(twin.layers, frozen, strict=True):
            assert all(a.codes.equal(b) for a, b in zip(layer.grouped.teams.routing_keys, parts, strict=True))
        assert not torch.allclose(changed, scores, atol=1e-2)


def test_crop_within_the_suffix_keeps_the_teams(model):
    with latent_santa.patch(model, **SMALL) as santa:
        tokens, scores, cache = decode_by_hand(model, prompt(50), 6)
        teams = [layer.grouped.teams for layer in cache.layers]
        cache.crop(0)
        assert cache.get_seq_length() == 55
        cache.crop(-3)
        assert cache.get_seq_length() == 52
        assert [layer.grouped.teams for layer in cache.layers] == teams
        santa.reset()
        for i in (2, 3, 4):
            torch.testing.assert_close(step(model, cache, tokens[:, i : i + 1]), scores[i + 1], rtol=0, atol=1e-5)
        assert [row[2] for row in steps(santa)] == [3, 4, 5]


def test_crop_below_the_prompt_drops_the_teams_and_they_come_back(model):
    ids = prompt(50)
    with latent_santa.patch(model, **SMALL) as santa:
        cache = decode_by_hand(model, ids, 6)[2]
        cache.crop(-9)
        assert all(layer.grouped.teams is None and layer.waiting == (0, 46) for layer in cache.layers)
        cache.crop(-1)
        assert all(layer.waiting == (0, 45) for layer in cache.layers)
        santa.reset()
        step(model, cache, ids[:, 45:46])
        step(model, cache, ids[:, 46:47])
        assert [(r, s, d) for r, _, s, d in steps(santa)] == [(12, 1, 46), (12, 2, 47)]
        assert all(layer.grouped.stop == 45 for layer in cache.layers)
        cache.crop(-47)
        assert cache.get_seq_length() == 0
        again = decode_by_hand(model, ids, 3, cache)[1]
        assert_close(again, decode_by_hand(model, ids, 3)[1], 0)


def test_crop_by_a_positive_number_never_corrupts(model):
    """It raises, or (in older versions) keeps that many rows."""
    with latent_santa.patch(model, **SMALL):
        tokens, scores, cache = decode_by_hand(model, prompt(50), 6)
        try:
            cache.crop(52)
        except (ValueError, RuntimeError):
            cache.crop(-3)
        assert cache.get_seq_length() == 52
        torch.testing.assert_close(step(model, cache, tokens[:, 2:3]), scores[3], rtol=0, atol=1e-5)


def test_reset_forgets_everything(model):
    with latent_santa.patch(model, **SMALL) as santa:
        cache = decode_by_hand(model, prompt(70), 4)[2]
        cache.reset()
        assert cache.get_seq_length() == 0
        santa.sequence_keys = [3, 4]
        found = decode_by_hand(model, prompt(30, batch=2), 4, cache)[1]
        assert_close(found, decode_by_hand(model, prompt(30, batch=2), 4)[1], 0)


def test_deepcopy_of_a_cache_with_teams(model):
    with latent_santa.patch(model, **SMALL):
        tokens, scores, cache = decode_by_hand(model, prompt(50), 3)
        twin, before = copy.deepcopy(cache), copy.deepcopy(rows_and_teams(cache))
        wanted = [step(model, cache, prompt(1, seed=s)) for s in range(3)]
        assert same_state(rows_and_teams(twin), before)
        found = [step(model, twin, prompt(1, seed=s)) for s in range(3)]
        assert_close(found, wanted, 0)
        pointers = {layer.keys.data_ptr() for c in (cache, twin) for layer in c.layers}
        assert len(pointers) == 4


def test_reorder_repeat_and_select_carry_everything(model):
    ids = prompt(40, batch=3)
    with latent_santa.patch(model, **SMALL) as santa:
        wanted = decode_by_hand(model, ids, 2)[2]
        wanted_next = step(model, copy.deepcopy(wanted), prompt(1).expand(3, -1))
        order = torch.tensor([2, 0, 0])
        for act, index in (
            (lambda c: c.reorder_cache(order), order),
            (lambda c: c.batch_select_indices(order[:2]), order[:2]),
            (lambda c: c.batch_repeat_interleave(2), torch.tensor([0, 0, 1, 1, 2, 2])),
            (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), torch.tensor([0, 2])),
        ):
            cache = copy.deepcopy(wanted)
            act(cache)
            assert same_state(rows_and_teams(cache), [[part[index] for part in ps] for ps in rows_and_teams(wanted)])
            found = step(model, cache, prompt(1).expand(len(index), -1))
            torch.testing.assert_close(found, wanted_next[index], rtol=0, atol=1e-4)
        # a replay that is undone after the reordering gives each sequence its own dense row back
        santa.configure(budget=4096)
        cache = DynamicCache(config=model.config)
        step(model, cache, ids[:, :30])
        cache.reorder_cache(order)
        found = step(model, cache, ids[:, 30:][order])
    torch.testing.assert_close(found, step(model, DynamicCache(config=model.config), ids[order]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cut", [0, 2])
def test_a_cache_that_an_unpatched_model_filled_is_adopted(model, cut):
    ids = prompt(50)
    tokens, scores, _ = decode_by_hand(model, ids, 4)
    cache = filled_cache(model, ids)
    with latent_santa.patch(model, **EVERY_TEAM) as santa:
        if cut:
            cache.crop(-cut)
            found = [step(model, cache, ids[:, 48:])]  # two tokens attend densely and join the suffix
        else:
            found = [scores[0]]
        found += [step(model, cache, tokens[:, i : i + 1]) for i in range(3)]
        assert_close(found, scores)
        assert all(type(layer) is TeamLayer and layer.grouped.stop == 50 - cut for layer in cache.layers)
        assert [row[2] for row in steps(santa)][-3:] == [1 + cut, 2 + cut, 3 + cut]


def test_a_long_turn_on_an_adopted_cache_groups_all_of_it(model):
    ids = prompt(60)
    with latent_santa.patch(model, **SMALL) as santa:
        cache = filled_by_a_twin(model, ids[:, :40])
        step(model, cache, ids[:, 40:])
        assert steps(santa)[-1][0::2] == (16, 0)
        assert all(layer.grouped.stop == 60 and layer.grouped.exact == () for layer in cache.layers)


def filled_by_a_twin(model, ids):
    plain = type(model)(model.config).eval()
    plain.load_state_dict(model.state_dict())
    return filled_cache(plain, ids)


def test_a_cache_goes_on_after_unpatch_and_after_patching_again(model):
    ids = prompt(50)
    tokens, scores, _ = decode_by_hand(model, ids, 7)
    with latent_santa.patch(model, **EVERY_TEAM):
        _, found, cache = decode_by_hand(model, ids, 3)
    assert_close(found, scores[:3])
    assert_close([step(model, cache, tokens[:, i : i + 1]) for i in (2, 3)], scores[3:5])
    with latent_santa.patch(model, **EVERY_TEAM) as santa:
        assert_close([step(model, cache, tokens[:, i : i + 1]) for i in (4, 5)], scores[5:7])
        assert [row[2] for row in steps(santa)] == [5, 6]


def test_three_turns_group_new_teams_beside_the_old(model):
    """Prompt 40, 5 tokens, a turn of 22 rows, 5 tokens, a turn of 6 rows (fewer than P), 5 tokens, a turn of 9 rows."""
    with latent_santa.patch(model, **SMALL) as santa:
        cache, ids, counts, teams = DynamicCache(config=model.config), prompt(40), [], []
        for turn in (0, 21, 5, 8):
            santa.reset()
            ids = torch.cat((ids, prompt(turn, seed=turn)), 1)
            ids = generate(model, ids, 5, cache=cache).sequences
            counts.append([(routing, suffix, dense) for routing, _, suffix, dense in steps(santa)])
            teams.append([layer.grouped.teams for layer in cache.layers])
    # the replayed last row is in a team: no suffix at the first call
    assert counts[0] == [(10, e, 40 + e) for e in range(5)]
    # the 4 rows decoded so far stay exact; the last token of the first answer opens the second turn's 22 rows
    assert counts[1] == [(16, 4 + e, 66 + e) for e in range(5)]
    # 6 rows are fewer than P: a dense call without replay, after which they and the 4 tokens before are suffix
    assert counts[2] == [(0, 0, 76), *((16, 4 + 4 + 6 + e, 76 + e) for e in range(1, 5))]
    assert counts[3] == [(16 + 3, 14 + 4 + e, 89 + e) for e in range(5)]
    layer = cache.layers[0]
    assert layer.grouped.exact == ((40, 44), (66, 80)) and layer.grouped.stop == 89
    for old, new in zip(teams[:-1], teams[1:], strict=True):
        for a, b in zip(old, new, strict=True):
            m = a.M
            assert b.team_of_row[..., : a.length].equal(a.team_of_row)
            assert b.representative[..., :m].equal(a.representative)
            assert all(x.codes.equal(y.codes[:, :, :m]) for x, y in zip(a.routing_keys, b.routing_keys, strict=True))
    grouped = (teams[-1][0].team_of_row[0, 0] >= 0).nonzero().flatten().tolist()
    assert grouped == [*range(40), *range(44, 66), *range(80, 89)]


@pytest.mark.parametrize("new", [7, 8])
def test_a_turn_is_grouped_from_a_parents_size_on(model, new):
    with latent_santa.patch(model, **SMALL) as santa:
        cache = decode_by_hand(model, prompt(40), 3)[2]
        santa.reset()
        step(model, cache, prompt(new))
        step(model, cache, prompt(1))
        long = new == 8
        assert [s for _, _, s, _ in steps(santa)] == ([2, 3] if long else [0, 2 + 7 + 1])
        assert (santa.prefill_calls, santa.dense_calls, santa.sparse_calls) == ((1, 0, 2) if long else (0, 1, 1))


def test_settings_that_shape_teams_regroup_a_cache(model):
    with latent_santa.patch(model, **SMALL) as santa:
        cache = decode_by_hand(model, prompt(48), 5)[2]
        santa.reset()
        step(model, cache, prompt(1))
        santa.configure(budget=8, estimator="pooled", seed=3)
        step(model, cache, prompt(1))
        santa.configure(representatives=4)
        step(model, cache, prompt(1))
        santa.configure(method="dense")
        step(model, cache, prompt(1))
        santa.configure(santa.config.for_method("gumbel_rows"))
        step(model, cache, prompt(1))
        assert [(r, s) for r, _, s, _ in steps(santa)] == [(12, 5), (12, 6), (28, 1), (0, 0), (57, 1)]


def test_inference_mode_and_no_grad_and_gradients_mix(model):
    """Rows are written in place, which must not fail when a cache made in one mode goes on in another."""
    ids = prompt(60)
    modes = (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.no_grad, torch.inference_mode)
    spans = ((0, 40), (40, 43), (43, 44), (44, 59), (59, 60))

    def run():
        cache, scores = DynamicCache(config=model.config), []
        for mode, (start, stop) in zip(modes, spans, strict=True):
            with mode():
                scores.append(model(ids[:, start:stop], **{cache_name(model): cache}).logits[:, -1].detach().clone())
        return scores

    wanted = run()
    with latent_santa.patch(model, **EVERY_TEAM):
        assert_close(run(), wanted)


def test_gradients_reach_embeddings_through_an_evaluated_prefill(model):
    """In eval mode gradients are allowed, so they must be right: those of the dense rows, all but the replayed last."""
    embedded = model.get_input_embeddings()(prompt(20)).detach()

    def gradient():
        leaf = embedded.clone().requires_grad_()
        return torch.autograd.grad(model(inputs_embeds=leaf, use_cache=True).logits[:, :-1].square().sum(), leaf)[0]

    wanted = gradient()
    with latent_santa.patch(model, **SMALL, first_token="dense"):
        torch.testing.assert_close(gradient(), wanted)


def test_layers_refuse_to_be_offloaded():
    with pytest.raises(NotImplementedError, match="offloaded caches are not supported"):
        TeamLayer().offload()


def test_generate_goes_on_from_a_cache_kept_with_its_output(model):
    with latent_santa.patch(model, **SMALL) as santa:
        first = generate(model, prompt(50), 8)
        part = generate(model, prompt(50), 4)
        santa.reset()
        rest = generate(model, part.sequences, 4, cache=cache_of(part))
        # one token is new to the cache: an ordinary decoding call, so the answer simply goes on
        assert santa.prefill_calls == 0 and [row[2] for row in steps(santa)] == [4, 5, 6, 7]
        assert rest.sequences.equal(first.sequences)
        assert_close(rest.scores, first.scores[4:])
        assert_same(generate(model, prompt(50), 8), first, 0)
