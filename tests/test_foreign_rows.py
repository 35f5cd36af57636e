"""Rows and masks that somebody else changed: what was grouped under other rows is grouped anew, never used."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import latent_santa

from .tiny_models import assert_close, cache_name, prompt, tiny_model

EVERY_TEAM = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 4096}
SMALL = {**EVERY_TEAM, "budget": 16}


@pytest.fixture(scope="module", params=["deepseek_v2-yarn", "qwen2"])
def model(request):
    return tiny_model(request.param)


def call(model, cache, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **{cache_name(model): cache}, use_cache=True, logits_to_keep=1, **kwargs).logits[:, -1]


def stale_teams(cache):
    """Representatives whose frozen key is no longer the row's; the last grouped row is written anew by its replay."""
    stale = 0
    for layer in cache.layers:
        teams = layer.grouped.teams
        rows = (layer.keys, layer.values) if len(teams.routing_keys) == 2 else (layer.keys,)
        real = (teams.sizes > 0) & (teams.representative != layer.grouped.stop - 1)
        index = teams.representative.long().clamp_min(0)[..., None]
        for part, frozen in zip(rows, teams.routing_keys, strict=True):
            now = part.gather(2, index.expand(-1, -1, -1, part.shape[-1]))
            stale += int((real & ((now - frozen.codes).abs().amax(-1) > 1e-6)).sum())
    return stale


@pytest.mark.parametrize("hidden, shown", [((8, 28), ()), ((), (3, 9)), ((20, 24), (3, 9))])
def test_a_mask_that_changes_for_grouped_rows(model, hidden, shown):
    """At full budget the answer is the unpatched model's under the later mask, whichever rows it hides or shows."""
    first = torch.ones(1, 40).long()
    if shown:
        first[:, : shown[1]] = 0
    later = torch.nn.functional.pad(first, (0, 1), value=1)
    for stretch, value in ((hidden, 0), (shown, 1)):
        if stretch:
            later[:, slice(*stretch)] = value

    def last():
        cache = DynamicCache(config=model.config)
        call(model, cache, prompt(40), attention_mask=first)
        one = {"attention_mask": later, "position_ids": torch.tensor([[40]])}
        return call(model, cache, torch.tensor([[7]]), **one), cache

    wanted, _ = last()
    with latent_santa.patch(model, **EVERY_TEAM, first_token="dense") as santa:
        found, cache = last()
        grouped = [layer.grouped for layer in cache.layers]
        assert_close([found], [wanted])
        call(model, cache, torch.tensor([[9]]), attention_mask=torch.nn.functional.pad(later, (0, 1), value=1))
        assert [layer.grouped for layer in cache.layers] == grouped  # the same mask for the same rows regroups nothing
        assert santa.sparse_calls == 2


def test_a_mask_that_its_caller_writes_into(model):
    """A bool mask comes as it is, so what was grouped keeps a copy of it."""

    def last():
        cache, mask = DynamicCache(config=model.config), torch.ones(1, 50, dtype=torch.bool)
        call(model, cache, prompt(40), attention_mask=mask[:, :40])
        mask[:, 8:28] = False
        one = {"attention_mask": mask[:, :41], "position_ids": torch.tensor([[40]])}
        return call(model, cache, torch.tensor([[7]]), **one)

    wanted = last()
    with latent_santa.patch(model, **EVERY_TEAM):
        assert_close([last()], [wanted])


def test_a_mask_left_out_later_shows_all_rows(model):
    mask = torch.ones(1, 40).long()
    mask[:, :5] = 0
    for settings in (EVERY_TEAM, SMALL):
        with latent_santa.patch(model, **settings):
            cache = DynamicCache(config=model.config)
            call(model, cache, prompt(40), attention_mask=mask)
            assert int((cache.layers[0].grouped.teams.team_of_row >= 0)[0, 0].sum()) == 35
            call(model, cache, torch.tensor([[7]]))
            assert int((cache.layers[0].grouped.teams.team_of_row >= 0)[0, 0].sum()) == 40


def cut(cache, stretch):
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, stretch].clone(), layer.values[:, :, stretch].clone()


@pytest.mark.parametrize("stretch", [slice(8, None), slice(None, 24), slice(None, None, 2)])
@pytest.mark.parametrize("question", [1, 5, 20, 60])
def test_rows_assigned_by_others(model, stretch, question):
    """Cut off, evicted from the front or thinned out: a further call of any length regroups what is left."""
    ids = prompt(question, seed=5)

    def after():
        cache = DynamicCache(config=model.config)
        call(model, cache, prompt(40))
        call(model, cache, prompt(9, seed=3))
        cut(cache, stretch)
        call(model, cache, ids)
        return call(model, cache, torch.tensor([[7]])), cache

    wanted, _ = after()
    with latent_santa.patch(model, **EVERY_TEAM):
        found, cache = after()
        assert_close([found], [wanted])
    with latent_santa.patch(model, **SMALL):
        _, cache = after()
        assert stale_teams(cache) == 0
        kept = len(range(49)[stretch])
        assert cache.layers[0].grouped.stop == (kept + question if question >= 8 else kept)


def scaled_values(layer):
    layer.values = 1.5 * layer.values


def every_second_row_as_a_view(layer):
    layer.keys, layer.values = layer.keys[:, :, ::2], layer.values[:, :, ::2]


def first_rows_as_a_view(layer):
    layer.keys, layer.values = layer.keys[:, :, :20], layer.values[:, :, :20]


def two_sequences(layer):
    layer.keys, layer.values = layer.keys[:2], layer.values[:2]


def one_sequence(layer):
    layer.keys, layer.values = layer.keys[:1], layer.values[:1]


@pytest.mark.parametrize(
    "assign", [scaled_values, every_second_row_as_a_view, first_rows_as_a_view, two_sequences, one_sequence]
)
def test_what_is_assigned_is_used(model, assign):
    """Keys or values alone, and views of the cache's own memory: nothing of the rows before comes back."""

    def after():
        cache = DynamicCache(config=model.config)
        call(model, cache, prompt(40, batch=3))
        call(model, cache, prompt(9, batch=3, seed=3))
        for layer in cache.layers:
            assign(layer)
        batch = cache.layers[0].keys.shape[0]
        return [call(model, cache, prompt(new, batch=batch, seed=new)) for new in (1, 10, 1)], cache

    wanted, _ = after()
    with latent_santa.patch(model, **EVERY_TEAM, first_token="dense"):
        assert_close(after()[0], wanted)
    with latent_santa.patch(model, **SMALL):
        assert stale_teams(after()[1]) == 0


def test_the_same_number_of_other_rows_is_noticed(model):
    with latent_santa.patch(model, **SMALL):
        cache = DynamicCache(config=model.config)
        call(model, cache, prompt(40))
        for layer in cache.layers:
            layer.keys = layer.keys.flip(2)
        call(model, cache, torch.tensor([[7]]))
        assert stale_teams(cache) == 0


def test_rows_pruned_by_a_hook_inside_the_prefill(model):
    """Which rows are left is the hook's secret, so the last token is not replayed; what is left is grouped later."""

    def press(module, args, kwargs, output):
        layer = kwargs[cache_name(model)].layers[module.layer_idx]
        if layer.keys.shape[2] == 64:
            layer.keys, layer.values = layer.keys[:, :, ::2].contiguous(), layer.values[:, :, ::2].contiguous()

    def last():
        cache = DynamicCache(config=model.config)
        return [call(model, cache, ids) for ids in (prompt(64), torch.tensor([[7]]), torch.tensor([[8]]))]

    hooks = [layer.self_attn.register_forward_hook(press, with_kwargs=True) for layer in model.model.layers]
    try:
        wanted = last()
        with latent_santa.patch(model, **EVERY_TEAM) as santa:
            assert_close(last(), wanted)
            assert (santa.prefill_calls, santa.sparse_calls) == (1, 2)
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("parts", [("keys", "values"), ("keys",), ("values",)])
def test_different_lengths_are_refused(model, parts):
    """Of layers, and of a layer's keys and values."""
    with latent_santa.patch(model, **SMALL):
        cache = DynamicCache(config=model.config)
        call(model, cache, prompt(40))
        for part in parts:
            setattr(cache.layers[1], part, getattr(cache.layers[1], part)[:, :, :30])
        with pytest.raises(NotImplementedError, match="different numbers of rows .30, 40."):
            call(model, cache, torch.tensor([[7]]))
