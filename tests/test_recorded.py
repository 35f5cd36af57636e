"""A recorded dense decoding: other settings attend the same queries and rows as decoding itself would."""

from __future__ import annotations

import pytest
import torch

import latent_santa
from latent_santa.estimator import dense_attention

from .tiny_models import generate, padded, prompt, tiny_model

SMALL = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 16}
SETTINGS = [{"estimator": "pooled"}, {"method": "santa", "budget": 6}, {"method": "quest"}, {"routing": "two_stage"}]


@pytest.fixture(scope="module", params=["deepseek_v2-yarn", "qwen2"])
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def santa(model):
    with latent_santa.patch(model, **SMALL) as handle:
        yield handle


@pytest.fixture(scope="module")
def recorded(santa):
    return santa.prefill(prompt(40)).record(5)


def test_tokens_are_denses_and_settings_stay(model, santa, recorded):
    assert santa.config == latent_santa.SantaConfig(**SMALL)
    santa.configure(method="dense")
    wanted = generate(model, prompt(40), 5).sequences[:, 40:]
    santa.configure(method="santa++")
    assert recorded.tokens.equal(wanted) and recorded.calls == 5 and recorded.rows(0).length == 44


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: next(iter(s.values())))
def test_a_layers_first_query_is_decodings_own(santa, recorded, settings):
    """Nothing sampled has touched the first layer's query of the first call: counts are equal, errors to rounding."""
    santa.configure(latent_santa.SantaConfig(**SMALL).for_method(**{"method": "santa++", **settings}))
    santa.shadow, found = True, []
    for attend in (recorded.attend, lambda: recorded.prompt.generate(max_new_tokens=5, do_sample=False)):
        santa.reset()
        attend()
        first = next(santa.access._entries())
        found.append((santa.shadow_errors()[0, 0].item(), first[2], first[3].tolist()))
        if len(found) == 1:
            assert santa.sparse_calls == 5 and santa.shadow_errors().shape == (recorded.layers, 5, 1)
            assert [step["dense"] for step in santa.access.per_step()] == [
                (40 + t) * santa.access.per_step()[0]["dense"] // 40 for t in range(5)
            ]
    santa.shadow = False
    assert found[0][1:] == found[1][1:] and found[0][0] == pytest.approx(found[1][0], rel=1e-5) and found[0][0] > 0


def test_full_budget_is_dense_on_every_layer_and_call(santa, recorded):
    santa.configure(latent_santa.SantaConfig(**{**SMALL, "budget": 4096}))
    santa.reset()
    santa.shadow = True
    recorded.attend()
    santa.shadow = False
    assert santa.shadow_errors().max() < 1e-5 and santa.full_calls == 5


def test_queries_and_rows_give_the_models_own_attention(model, santa):
    seen: dict[int, list[torch.Tensor]] = {}
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda module, args, place=place: seen.setdefault(place, []).append(args[0])
        )
        for place, layer in enumerate(model.model.layers)
    ]
    recorded = santa.prefill(prompt(40, seed=5)).record(3)
    for hook in hooks:
        hook.remove()
    for layer in range(recorded.layers):
        for call in range(3):
            query, scale = recorded.query(layer, call)
            visible = torch.arange(42)[None] < 40 + call
            out, _ = dense_attention(query, recorded.rows(layer), visible, scale)
            mine = santa._control.adapters[layer].output(out, torch.float32).flatten()
            torch.testing.assert_close(mine, seen[layer][1 + call].flatten(), rtol=1e-4, atol=1e-5)  # 0: the prefill


def test_padding_changes_nothing(model, santa):
    ids, mask = padded([30, 40])
    errors = []
    for given, seen in ((ids[:1, 10:], None), (ids[:1], mask[:1])):
        recorded = santa.prefill(given, seen).record(3)
        santa.configure(latent_santa.SantaConfig(**SMALL))
        santa.reset()
        santa.shadow = True
        recorded.attend()
        santa.shadow = False
        errors.append((santa.shadow_errors(), santa.access.totals()))
    torch.testing.assert_close(errors[0][0], errors[1][0], rtol=1e-3, atol=1e-5)
    assert errors[0][1] == errors[1][1]


def test_generated_rows_are_grouped_when_decoding_would(santa):
    """How many rows wait in the suffix depends on no token, so it must be the same at every call."""
    recorded = santa.prefill(prompt(40)).record(14)
    santa.configure(latent_santa.SantaConfig(**SMALL, regroup_after=8))
    found = []
    for attend in (recorded.attend, lambda: recorded.prompt.generate(max_new_tokens=14, do_sample=False)):
        santa.reset()
        attend()
        found.append([step["suffix"] for step in santa.access.per_step()])
    assert found[0] == found[1] and found[0][-1] < found[0][7]
    santa.configure(latent_santa.SantaConfig(**SMALL))


def test_refusals(santa, recorded):
    with pytest.raises(ValueError, match="batch of 2 sequences"):
        santa.prefill(torch.cat((prompt(20), prompt(20, seed=3)))).record(2)
    santa.configure(method="dense")
    with pytest.raises(ValueError, match="leaves decoding dense"):
        recorded.attend()
    santa.configure(latent_santa.SantaConfig(**SMALL))
