"""Kept prefills: computed once a batch, for all settings, with results that are equal to the bit."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

import latent_santa
from latent_santa.patches.prefill_store import PrefillStore
from latent_santa.patches.team_store import TeamStore

from .test_patch_lifecycle import snapshot
from .tiny_models import FAMILIES, cache_of, generate, padded, prompt, tiny_model

SMALL = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 16}
SETTINGS = [
    {"method": "dense"},
    {"method": "santa"},
    {"method": "santa++"},
    {"estimator": "pooled"},
    {"parents": "kmeans"},
    {"estimator": "per_head", "noise": "shared"},
    {"routing_dtype": "int8"},
    {"routing_dtype": "model", "method": "centroid"},
    {"parents": "contiguous", "estimator": "pooled"},
    {"method": "santa++", "first_token": "dense"},
]
LIMIT = 1 << 30


@pytest.fixture(scope="module", params=["deepseek_v2-yarn", "qwen2"])
def model(request):
    return tiny_model(request.param)


@pytest.fixture
def santa(model):
    with latent_santa.patch(model, **SMALL) as handle:
        handle.prefill_store = PrefillStore(LIMIT)
        handle.batch = ("a",)
        yield handle


@pytest.fixture
def prefills(model):
    """Numbers of tokens of the calls that ran the last layer's network on more than one, one entry a call."""
    seen = []
    hook = (
        model.get_decoder()
        .layers[-1]
        .mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]) if args[0].shape[1] > 1 else None)
    )
    yield seen
    hook.remove()


def bits(layer):
    """Everything in a cache layer, as lists."""
    teams, state = layer.grouped.teams, [layer.keys, layer.values, layer.noise_key]
    for field in fields(teams) if teams is not None else ():
        value = getattr(teams, field.name)
        state += value if isinstance(value, (tuple, list)) else [value]
    shown = [value.tolist() if isinstance(value, torch.Tensor) else repr(value) for value in state]
    grouped = layer.grouped
    return shown, grouped.stop, grouped.exact, grouped.grouping, layer.waiting, layer.keys.stride()


def outcome(santa, ids, mask=None, **kwargs):
    santa.reset()
    if mask is not None:
        kwargs["attention_mask"] = mask
    output = generate(santa.model, ids, 5, **kwargs)
    counts = santa.access.as_dict(), dict(santa._controller.calls), santa.full_calls
    scores = [score.tolist() for score in output.scores]
    return output.sequences.tolist(), scores, counts, [bits(layer) for layer in cache_of(output).layers]


def fresh(santa, *args, **kwargs):
    """The same without stores."""
    stores = santa.prefill_store, santa.team_store
    santa.prefill_store = santa.team_store = None
    try:
        return outcome(santa, *args, **kwargs)
    finally:
        santa.prefill_store, santa.team_store = stores


@pytest.mark.parametrize("teams", [False, True])
def test_one_prefill_serves_all_settings(santa, prefills, teams):
    ids, mask = padded([37, 60, 44])
    santa.team_store = TeamStore() if teams else None
    for settings in SETTINGS * 2:
        santa.configure(**settings)
        found, before = outcome(santa, ids, mask), len(prefills)
        assert found == fresh(santa, ids, mask)
        assert prefills[before:] == [60]
    assert len(prefills) == 1 + 2 * len(SETTINGS)
    assert santa.prefill_store.found == 2 * len(SETTINGS) - 1
    assert not teams or santa.team_store.found


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name):
    with latent_santa.patch(tiny_model(name), **SMALL) as santa:
        santa.prefill_store, santa.batch = PrefillStore(LIMIT), "a"
        for ids, mask in ((prompt(40), None), padded([30, 41])):
            results = [outcome(santa, ids, mask) for _ in range(3)]
            assert results == [fresh(santa, ids, mask)] * 3
        assert santa.prefill_store.found == 4


@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 2},
        {"do_sample": True, "num_return_sequences": 2, "num_beams": 1},
        {"prompt_lookup_num_tokens": 3, "output_scores": False},
    ],
)
def test_other_ways_to_generate(santa, how):
    ids, results = prompt(24).repeat(1, 2), []
    for store in (None, santa.prefill_store, santa.prefill_store):
        santa.prefill_store = store
        torch.manual_seed(5)
        results.append(generate(santa.model, ids, 6, **how).sequences.tolist())
    assert results[0] == results[1] == results[2] and santa.prefill_store.found == 1


def test_calls_by_hand_get_all_positions(santa, prefills):
    ids, mask = padded([30, 41])
    santa.configure(first_token="dense")  # what is found is the output itself
    with torch.no_grad():
        wanted = santa.model(ids, attention_mask=mask).logits
        hidden = santa.model.get_decoder()(ids, attention_mask=mask).last_hidden_state
        hidden.zero_()  # what was handed out is the caller's
        again = santa.model(ids, attention_mask=mask).logits
    assert wanted.shape[:2] == (2, 41) and wanted.equal(again)
    assert len(prefills) == 1 and santa.prefill_store.found == 2


def test_rows_kept_in_inference_mode_serve_outside_of_it(santa, prefills):
    ids, mask = padded([30, 41])
    with torch.inference_mode():
        first = outcome(santa, ids, mask)
    assert outcome(santa, ids, mask) == first and len(prefills) == 1
    santa.prefill_store.clear()
    assert santa.prefill_store.bytes == 0
    assert outcome(santa, ids, mask) == first and len(prefills) == 2
    with torch.inference_mode():
        assert outcome(santa, ids, mask) == first and len(prefills) == 2


def test_without_a_name_nothing_is_kept(santa, prefills):
    santa.batch = None
    for _ in range(2):
        outcome(santa, prompt(40))
    assert len(prefills) == 2 and santa.prefill_store.bytes == 0


def test_names_are_told_apart(santa, prefills):
    for name in ("a", "b", "a", "b"):
        santa.batch = (name,)
        ids = prompt(40, seed=ord(name))
        assert outcome(santa, ids) == fresh(santa, ids)
    assert len(prefills) == 2 + 4 and santa.prefill_store.found == 2


def test_a_wrong_name_costs_a_prefill(santa, prefills):
    ids, mask = padded([41, 30])
    inputs = [
        (prompt(40), None),
        (prompt(40, seed=1), None),
        (prompt(41), None),
        (prompt(41, batch=2), None),
        (ids, mask),
        (ids, torch.ones_like(mask)),
    ]
    for number, (ids, mask) in enumerate(inputs, 1):
        found = outcome(santa, ids, mask)
        assert len(prefills) == number and santa.prefill_store.found == 0
        assert found == fresh(santa, ids, mask)
        prefills.pop()
    replaced, santa.prefill_store = santa.prefill_store, PrefillStore(LIMIT)
    outcome(santa, *inputs[-1])
    assert replaced.bytes == santa.prefill_store.bytes > 0  # of the last input alone


def test_what_does_not_fit_is_computed_each_time(santa, prefills):
    outcome(santa, prompt(40))
    santa.prefill_store = PrefillStore(limit_bytes=santa.prefill_store.bytes)
    for name in ("a", "b", "a", "b"):
        santa.batch = (name,)
        outcome(santa, prompt(40, seed=ord(name)))
    assert len(prefills) == 1 + 3 and santa.prefill_store.found == 1
    assert santa.prefill_store.bytes == santa.prefill_store.limit_bytes


def test_bytes_are_those_of_rows_hidden_states_and_inputs(santa):
    ids, mask = padded([30, 40])
    output = generate(santa.model, ids, 1, attention_mask=mask)
    layers = cache_of(output).layers
    rows = sum(part.shape[1] * part.shape[3] for layer in layers for part in (layer.keys, layer.values))
    inputs = 3 * 8  # ids, mask and positions
    assert santa.prefill_store.bytes == 2 * 40 * ((rows + santa.model.config.hidden_size) * 4 + inputs)


def test_more_than_hidden_states_is_computed_each_time(santa, prefills):
    ids = prompt(40)
    wanted = outcome(santa, ids)
    for _ in range(2):
        output = generate(santa.model, ids, 5, output_hidden_states=True)
        assert output.sequences.tolist() == wanted[0] and output.hidden_states[0][0].shape[1] == 40
    assert len(prefills) == 3 and santa.prefill_store.found == 0 and santa.prefill_store.bytes == 0
    with torch.no_grad():
        for _ in range(2):
            santa.model.get_decoder()(ids, return_dict=False)
    assert len(prefills) == 5 and santa.prefill_store.bytes == 0


def test_other_prefills_are_neither_kept_nor_found(santa, prefills):
    model, ids, store = santa.model, prompt(40), santa.prefill_store
    first = generate(model, ids, 3)
    kept = store.bytes
    generate(model, torch.cat((first.sequences, prompt(20, seed=7)), 1), 3, cache=cache_of(first))  # a later turn
    generate(model, ids, 3, prefill_chunk_size=16)
    generate(model, None, 3, inputs_embeds=model.get_input_embeddings()(ids), attention_mask=torch.ones_like(ids))
    with torch.no_grad():
        model(ids, use_cache=False)
        model.train()
        model(ids)
        model.eval()
    loss = model(ids, labels=ids, use_cache=True).loss
    assert loss.requires_grad and store.found == 0 and store.bytes == kept
    assert len(prefills) > 6
    generate(model, ids, 3)
    assert store.found == 1


def test_a_filled_cache_goes_on_like_any_other(santa):
    def turns():
        first = generate(santa.model, prompt(40), 3)
        more = torch.cat((first.sequences, prompt(20, seed=7)), 1)
        second = generate(santa.model, more, 3, cache=cache_of(first))
        return second.sequences.tolist(), [bits(layer) for layer in cache_of(second).layers]

    assert turns() == turns() and santa.prefill_store.found == 1


def test_hooks_of_others_run(santa, model):
    seen, base = [], model.get_decoder()
    hooks = [
        base.register_forward_pre_hook(lambda *_: seen.append("before")),
        base.register_forward_hook(lambda *_: seen.append("after")),
    ]
    counts = []
    for _ in range(2):
        seen.clear()
        outcome(santa, prompt(40))
        counts.append(list(seen))
    for hook in hooks:
        hook.remove()
    assert counts[0] == counts[1] and santa.prefill_store.found == 1


def test_unpatch_restores_everything_to_the_bit(model):
    before = snapshot(model)
    santa = latent_santa.patch(model, **SMALL)
    patched = snapshot(model)
    santa.prefill_store = None
    assert snapshot(model) == patched
    for _ in range(2):
        santa.prefill_store, santa.batch = PrefillStore(LIMIT), "a"
        outcome(santa, prompt(40))
    santa.unpatch()
    assert snapshot(model) == before
    santa.prefill_store = PrefillStore(LIMIT)
    assert snapshot(model) == before


def test_a_call_that_raised_leaves_nothing(santa, model, prefills):
    hook = model.get_decoder().layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        outcome(santa, prompt(40))
    hook.remove()
    assert santa.prefill_store.bytes == 0
    assert outcome(santa, prompt(40)) == fresh(santa, prompt(40))


def test_another_attention_implementation_is_another_prefill(santa, model, prefills):
    outcome(santa, prompt(40))
    own = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    try:
        outcome(santa, prompt(40))
    finally:
        model.config._attn_implementation = own
    assert len(prefills) == 2 and santa.prefill_store.found == 0


@pytest.mark.parametrize("name", ["deepseek_v2", "qwen2"])
def test_a_base_model_with_a_hook_of_accelerate_makes_no_use_of_it(name):
    model, ids = tiny_model(name), prompt(40)
    base = model.get_decoder()
    with latent_santa.patch(model, **SMALL) as santa:
        wanted = outcome(santa, ids)
        santa.prefill_store, santa.batch = PrefillStore(LIMIT), "a"
        add_hook_to_module(base, ModelHook())  # later than the store
        assert outcome(santa, ids) == outcome(santa, ids) == wanted
        assert santa.prefill_store.bytes == 0
        remove_hook_from_module(base)
        assert outcome(santa, ids) == outcome(santa, ids) == wanted and santa.prefill_store.found == 1
    add_hook_to_module(base, ModelHook())
    before = snapshot(model)
    with latent_santa.patch(model, **SMALL) as santa:
        santa.prefill_store, santa.batch = PrefillStore(LIMIT), "a"
        assert outcome(santa, ids) == outcome(santa, ids) == wanted
        assert santa.prefill_store.found == santa.prefill_store.bytes == 0
    assert snapshot(model) == before


@pytest.mark.parametrize("name", ["deepseek_v2", "qwen2"])
def test_offloaded_weights(name):
    """Hooks on modules that are not called take no part; the others load what they need."""
    model, ids = cpu_offload(tiny_model(name), execution_device="cpu"), prompt(40)
    with latent_santa.patch(model, **SMALL) as santa:
        wanted = outcome(santa, ids)
        santa.prefill_store, santa.batch = PrefillStore(LIMIT), "a"
        assert outcome(santa, ids) == outcome(santa, ids) == wanted
        assert santa.prefill_store.found == 1 and next(model.parameters()).is_meta
