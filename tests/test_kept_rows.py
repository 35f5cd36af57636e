"""Methods that keep rows by the prompt's last queries: their votes in loops, and how queries come to the grouping."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import latent_santa
from latent_santa import naive as ref
from latent_santa.methods import METHODS, infllm
from latent_santa.prompt_queries import PromptQueries
from latent_santa.rows import Rows

from .cases import make_case
from .test_baselines import attend, settings, top
from .tiny_models import assert_same, cache_of, filled_cache, generate, padded, prompt, tiny_model

KEPT = ("snapkv", "tova", "h2o")


def asked(case, window, seed=4):
    """Random queries of the last ``window`` prompt tokens of a case."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(*q.shape[:3], window, q.shape[-1]) for q in case.query]
    return PromptQueries(tuple(torch.randn(s, generator=generator) for s in shapes), case.scale, case.prompt)


def weights_in_loops(queries, keys, scale, places):
    """Summed causal attention weights over ``keys`` of the queries, the n-th of which stands at row ``places[n]``."""
    total = np.zeros(len(keys))
    for query, place in zip(queries, places, strict=True):
        mass = [math.exp(ref.score(query, keys[i], scale)) for i in range(place + 1)]
        total[: place + 1] += np.array(mass) / sum(mass)
    return total


def kept_in_loops(method, config, heads, keys, scale):
    """The rows that each head keeps; ``heads (H, W, D)`` are the queries of the last W of the rows ``keys``."""
    length, window = len(keys), {"tova": 1, "h2o": len(keys)}.get(method, min(32, config.budget // 2))
    votes = []
    for queries in heads:
        used = min(window, len(queries), length)
        total = weights_in_loops(queries[len(queries) - used :], keys, scale, range(length - used, length))
        if method == "snapkv":
            total[max(0, length - window) :] = 0
            around = np.concatenate([[0, 0], total, [0, 0]])
            total = np.array([around[i : i + 5].sum() / 5 for i in range(length)])
            total[max(0, length - window) :] = 1000 + np.arange(length)[max(0, length - window) :]
        votes.append(total)
    if method == "h2o":
        late = range(max(0, length - config.budget // 2), length)
        return [top([*mine[: late[0]]], config.budget - len(late)) | {*late} for mine in votes]
    if method == "tova":
        votes = [np.mean(votes, 0)] * len(votes)
    return [top(mine, config.budget) for mine in votes]


def runs():
    for method in KEPT:
        for budget in (2, 7, 20, 400):
            yield method, budget, "per_head"
    yield "snapkv", 7, "pooled"
    yield "h2o", 7, "pooled"


@pytest.mark.parametrize("layout", ["mla", "gqa"])
@pytest.mark.parametrize(("method", "budget", "estimator"), list(runs()))
def test_equals_its_loops(method, budget, estimator, layout):
    case = make_case(layout, 3, 1, (37, 5, 22), suffix=3, hidden=((1, 0),))
    config = settings(method, budget=budget, estimator=estimator)
    queries = asked(case, min(METHODS[method].window, case.prompt.shape[1]))
    before = Rows(case.frozen, case.frozen[0] if layout == "mla" else case.rows.values[:, :, : case.prompt.shape[1]])
    (teams,) = METHODS[method].build_by_queries([queries], [before], case.prompt, config)
    output = METHODS[method].attend(replace(case.step, teams=teams), config, None)
    for b in range(3):
        inputs, real = case.reference_inputs(b, 0, 1), case.prompt[b].numpy()
        frozen = np.concatenate([part[b, 0].double().numpy() for part in case.frozen], -1)[real]
        heads = np.concatenate([part[b, 0].double().numpy() for part in queries.parts], -1)
        kept = kept_in_loops(method, config, heads[:, -len(frozen) :], frozen, case.scale)
        union, suffix = set.union(*kept), list(inputs["suffix"])
        used = [union if estimator == "pooled" else mine for mine in kept]
        wanted = [
            attend(q, inputs["keys"], inputs["values"], sorted(mine) + suffix, case.scale)
            for q, mine in zip(inputs["queries"], used, strict=True)
        ]
        np.testing.assert_allclose(output.out[b, 0].numpy(), wanted, rtol=2e-5, atol=2e-6)
        assert [int(part[b, 0]) for part in (output.routing, output.union, output.suffix)] == [
            0, len(union), len(suffix)
        ]  # fmt: skip


def blocks_in_loops(config, heads, keys, scale):
    """InfLLM's routing keys and the blocks that it reads for a query: the mean of the heads' queries ``(W, D)``."""
    length, blocks = len(keys), ref.contiguous_parents(len(keys), config.parent_size)
    asked, means = heads.mean(0), []
    for block in blocks:
        local = {}
        for row in block:
            behind = range(row + 1, min(row + 1 + infllm.LOCAL, length))
            local[row] = np.mean([ref.score(asked[i], keys[row], scale) for i in behind]) if behind else 0.0
        means.append(np.mean([keys[row] for row in sorted(block, key=lambda row: -local[row])[:4]], 0))
    k = config.teams_per_head

    def read(queries):
        always = {0, *range(max(0, len(blocks) - k // 2), len(blocks))}
        ranks = [
            float("inf") if m in always else ref.score(queries.mean(0), mean, scale) for m, mean in enumerate(means)
        ]
        return [row for m in top(ranks, k) for row in blocks[m]]

    return len(blocks), read


@pytest.mark.parametrize("layout", ["mla", "gqa"])
@pytest.mark.parametrize("budget", [10, 15, 20, 400])
def test_infllm_equals_its_loops(budget, layout, monkeypatch):
    monkeypatch.setattr(infllm, "LOCAL", 9)  # of 37 rows some have more tokens behind them, others fewer
    case = make_case(layout, 3, 1, (37, 5, 22), suffix=3, hidden=((1, 0),))
    config, queries = settings("infllm", parent_size=5, budget=budget), asked(case, case.prompt.shape[1])
    before = Rows(case.frozen, case.frozen[0] if layout == "mla" else case.rows.values[:, :, : case.prompt.shape[1]])
    (teams,) = METHODS["infllm"].build_by_queries([queries], [before], case.prompt, config)
    output = METHODS["infllm"].attend(replace(case.step, teams=teams), config, None)
    for b in range(3):
        inputs, real = case.reference_inputs(b, 0, 1), case.prompt[b].numpy()
        frozen = np.concatenate([part[b, 0].double().numpy() for part in case.frozen], -1)[real]
        heads = np.concatenate([part[b, 0].double().numpy() for part in queries.parts], -1)[:, real]
        blocks, read = blocks_in_loops(config, heads, frozen, case.scale)
        rows, suffix = read(inputs["queries"]), list(inputs["suffix"])
        wanted = [attend(q, inputs["keys"], inputs["values"], rows + suffix, case.scale) for q in inputs["queries"]]
        np.testing.assert_allclose(output.out[b, 0].numpy(), wanted, rtol=2e-5, atol=2e-6)
        assert [int(part[b, 0]) for part in (output.routing, output.union, output.suffix)] == [
            blocks if blocks > config.teams_per_head else 0, len(rows), len(suffix)
        ]  # fmt: skip


def test_tova_keeps_the_same_rows_in_every_group():
    case = make_case("gqa", 2, 3, (21, 9))
    config, queries = settings("tova", budget=4), asked(case, 1)
    before = Rows(case.frozen, case.rows.values)
    (teams,) = METHODS["tova"].build_by_queries([queries], [before], case.prompt, config)
    votes = teams.routing_keys[0].codes
    assert votes.shape == (2, 3, 21, 2) and bool((votes == votes[:, :1, :, :1]).all())
    mean = queries.weights(before, 1)[0].mean((0, 1))
    assert votes[0, 0, :, 0].allclose(mean) and float(mean.sum()) == pytest.approx(1)


# Through the patch: the queries that grouping gets are those of the model's own prefill


@pytest.fixture(scope="module", params=["deepseek_v2-yarn", "qwen2"])
def model(request):
    return tiny_model(request.param)


def votes_of(cache):
    return [layer.grouped.teams.routing_keys[0].codes for layer in cache.layers]


@pytest.mark.parametrize("method", KEPT)
def test_the_votes_are_the_models_own_attention(model, method):
    """Eager attention gives the weights of every prompt token; its last rows' are what the votes are made of."""
    ids = prompt(30)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(ids, output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation(before)
    with latent_santa.patch(model, settings(method, budget=8)):
        found = votes_of(cache_of(generate(model, ids, 1)))
    for own, votes in zip(weights, found, strict=True):
        heads = votes.transpose(2, 3).flatten(1, 2)[0]  # (heads, N)
        if method == "tova":
            wanted = own[0, :, -1].mean(0).expand_as(heads)
        elif method == "h2o":
            wanted = own[0].sum(1)
        else:
            sums = torch.nn.functional.pad(own[0, :, -4:, :-4].sum(1), (2, 2))
            wanted = sums.unfold(1, 5, 1).mean(-1)
            heads = heads[:, :-4]
        torch.testing.assert_close(heads, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", KEPT)
def test_a_prompt_in_pieces_has_the_same_votes(model, method):
    ids, mask = padded([30, 41])
    for chunk in (7, 20, 40):
        with latent_santa.patch(model, settings(method)):
            wanted = generate(model, ids, 3, attention_mask=mask)
            found = generate(model, ids, 3, attention_mask=mask, prefill_chunk_size=chunk)
        assert_same(found, wanted)
        for ours, theirs in zip(votes_of(cache_of(found)), votes_of(cache_of(wanted)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", KEPT)
def test_each_turn_is_voted_for_by_its_own_queries(model, method):
    ids = prompt(40)
    with latent_santa.patch(model, settings(method, budget=16)) as santa:
        first = generate(model, ids, 4)
        before = votes_of(cache_of(first))
        second = torch.cat((first.sequences, prompt(20, seed=8)), 1)
        found = generate(model, second, 4, cache=cache_of(first))
        both = votes_of(cache_of(found))
        assert all(bool((new[:, :, :40] == old).all()) for new, old in zip(both, before, strict=True))
        assert [votes.shape[2] for votes in both] == [61, 61]
        # the same turn behind a prefilled prompt, whose cache was another method's in between
        kept = santa.prefill(ids)
        assert kept.generate(max_new_tokens=4).tolist() == first.sequences.tolist()
        santa.configure(method="dense")
        dense = kept.generate(max_new_tokens=4)
        santa.configure(settings(method, budget=16))
        assert kept.generate(max_new_tokens=4).tolist() == first.sequences.tolist()
    assert dense.tolist() == generate(model, ids, 4).sequences.tolist()


@pytest.mark.parametrize("method", ["h2o", "infllm"])
def test_a_prefill_for_other_settings_is_computed_again_for_the_queries_of_all_tokens(model, method):
    ids, mask = padded([70, 90])
    with latent_santa.patch(model, settings("snapkv")) as santa:
        kept = santa.prefill(ids, mask)
        assert kept.rewound().layers[0].observed.states.shape[2] == 64  # the most that any other method looks at
        santa.configure(settings(method))
        wanted = generate(model, ids, 4, attention_mask=mask).sequences
        assert kept.generate(max_new_tokens=4).tolist() == wanted.tolist()


def test_beams_take_their_queries_with_them(model):
    ids, mask = padded([25, 40])
    options = {"attention_mask": mask, "num_beams": 3, "output_scores": False}
    with latent_santa.patch(model, settings("snapkv", budget=4096)):
        found = generate(model, ids, 5, **options)
        assert cache_of(found).layers[0].observed.states.shape[0] == 6
    assert found.sequences.tolist() == generate(model, ids, 5, **options).sequences.tolist()


def test_a_cache_without_the_queries_is_refused(model):
    ids = prompt(40)
    told = "by the queries of the prompt's last tokens, and this cache came without those of rows 8 to 40"
    cache = filled_cache(model, ids)
    with latent_santa.patch(model, settings("snapkv")) as santa:
        with pytest.raises(NotImplementedError, match=told):
            santa.prepare(cache)
        other = generate(model, ids, 2)
        santa.configure(budget=12)  # the rows of the answer would be grouped, too
        with pytest.raises(NotImplementedError, match="behind the prompt"):
            generate(model, torch.cat((other.sequences, prompt(1)), 1), 2, cache=cache_of(other))
        assert_same(generate(model, ids, 2, cache=DynamicCache(config=model.config)), generate(model, ids, 2), 0)
