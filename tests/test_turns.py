"""Turns, chunks and threads: where one call ends a prompt and where it does not."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache

import latent_santa
from latent_santa.access import MLA_UNIT, PACK, AccessLedger

from .tiny_models import cache_name, decode_by_hand, generate, prompt, tiny_model

SMALL = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 16, "regroup_after": 0}
EVERY_TEAM = {**SMALL, "budget": 4096}


@pytest.fixture(scope="module", params=["deepseek_v2-yarn", "qwen2"])
def model(request):
    return tiny_model(request.param)


def test_calls_of_many_tokens_by_hand_are_turns(model):
    """Only generate() knows of chunks: by hand, a call of P tokens or more is grouped and its last token replayed."""
    turn, name = prompt(30, seed=1), cache_name(model)
    with torch.no_grad():
        wanted = model(turn, **{name: decode_by_hand(model, prompt(40), 5)[2]}).logits[:, -1]
    for settings in (SMALL, EVERY_TEAM):
        with latent_santa.patch(model, **settings) as santa, torch.no_grad():
            cache = decode_by_hand(model, prompt(40), 5)[2]
            santa.reset()
            found = [model(ids, logits_to_keep=1, **{name: cache}).logits[:, -1] for ids in turn.split((16, 14), 1)][-1]
            assert [(layer.grouped.exact, layer.grouped.stop) for layer in cache.layers] == [(((40, 44),), 74)] * 2
            assert (santa.prefill_calls, santa.sparse_calls) == (2, 2)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)  # under EVERY_TEAM, the last of the two


@pytest.mark.parametrize("chunk", [3, 16, 32])
def test_a_last_chunk_of_one_token_changes_nothing(model, chunk):
    with latent_santa.patch(model, **SMALL) as santa:
        tokens = generate(model, prompt(33), 3).sequences
        whole = santa.access.as_dict()
        santa.reset()
        assert generate(model, prompt(33), 3, prefill_chunk_size=chunk).sequences.equal(tokens)
        assert santa.access.as_dict() == whole


def test_patched_then_unpatched_then_patched_again_on_one_cache(model):
    ids, name = prompt(90), cache_name(model)
    with torch.no_grad():
        wanted = model(ids).logits[:, -1]
        cache = DynamicCache(config=model.config)
        with latent_santa.patch(model, **EVERY_TEAM):
            model(ids[:, :60], **{name: cache})
        for place in range(60, 64):
            model(ids[:, place : place + 1], **{name: cache})
        with latent_santa.patch(model, **EVERY_TEAM):
            found = model(ids[:, 64:], **{name: cache}).logits[:, -1]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_every_generation_on_a_cache_counts_and_a_reset_between_calls_is_harmless(model):
    ids, name = prompt(90), cache_name(model)
    cache = DynamicCache(config=model.config)
    with latent_santa.patch(model, **SMALL) as santa:
        first = model.generate(ids[:, :60], max_new_tokens=1, do_sample=False, **{name: cache})
        santa.reset()
        longer = torch.cat((first, ids[:, 61:]), 1)
        model.generate(longer, max_new_tokens=1, do_sample=False, **{name: cache})
        assert (santa.prefill_calls, santa.sparse_calls) == (1, 1) and santa.access.totals()["calls"] == santa.layers


def test_two_threads_generate_on_one_model(model):
    prompts = [prompt(60, seed=seed) for seed in (1, 2)]
    with latent_santa.patch(model, **SMALL):
        wanted = [generate(model, ids, 6).sequences for ids in prompts]
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda ids: [generate(model, ids, 6).sequences for _ in range(4)], prompts))
    assert all(each.equal(tokens) for group, tokens in zip(found, wanted, strict=True) for each in group)


def test_threads_lose_nothing_in_the_ledger():
    ledger, one = AccessLedger(), torch.ones(1, 1, dtype=torch.long)

    def record(_: int) -> None:
        for _ in range(3 * PACK):
            ledger.record(0, MLA_UNIT, one, one, one, one)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(record, range(4)))
    assert ledger.totals()["calls"] == ledger.totals()["dense"] == 4 * 3 * PACK


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"),
    reason="older releases send chunks of a further turn a mask that is too short, patched or not",
)
@pytest.mark.parametrize("new", [1, 5, 7, 8, 30])
@pytest.mark.parametrize("whole", [True, False], ids=["all ids", "new ids"])
def test_a_further_turn_in_chunks_is_the_turn_in_one(model, new, whole):
    with latent_santa.patch(model, **SMALL) as santa:
        results = []
        for chunk in (None, 3, 16):
            cache = DynamicCache(config=model.config)
            first = generate(model, prompt(40), 5, cache=cache).sequences
            santa.reset()
            ids = torch.cat((first, prompt(new, seed=1)), 1)
            held = cache.get_seq_length()
            output = generate(
                model,
                ids if whole else ids[:, held:],
                4,
                cache=cache,
                attention_mask=torch.ones_like(ids),
                prefill_chunk_size=chunk,
            )
            results.append((output.sequences[:, -4:].tolist(), santa.access.as_dict(), santa.sparse_calls))
    assert results[1] == results[0] and results[2] == results[0]


def test_a_patched_model_is_not_pickled(model):
    with latent_santa.patch(model, **SMALL), pytest.raises(RuntimeError, match="unpatch it first"):
        pickle.dumps(model.model.layers[0].self_attn)
    assert pickle.loads(pickle.dumps(model.model.layers[0].self_attn)) is not None
