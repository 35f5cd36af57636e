"""Parents by probe fingerprints (Appendix B.5): fingerprints in loops, and queries on their way to the grouping."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import latent_santa
from latent_santa.config import SantaConfig
from latent_santa.probes import PROBES, fingerprints
from latent_santa.prompt_queries import PromptQueries
from latent_santa.rows import Rows

from .tiny_models import assert_same, filled_cache, generate, padded, prompt, tiny_model

SMALL = {"parents": "probes", "parent_size": 8, "representatives": 2, "budget": 16, "kmeans_engine": "sklearn"}


@pytest.fixture(scope="module", params=["deepseek_v2-yarn", "qwen2"])
def model(request):
    return tiny_model(request.param)


def in_loops(keys, heads, rows):
    """Fingerprints (n, H W) of the listed rows by their full keys (N, D); heads (H, W, D) are the probes."""
    columns = []
    for queries in heads:
        for query in queries:
            products = [float(keys[i] @ query) for i in rows]
            mean = sum(products) / len(rows)
            spread = math.sqrt(sum((x - mean) ** 2 for x in products) / len(rows))
            columns.append([(x - mean) / spread if spread else 0.0 for x in products])
    return np.array(columns).T


def test_fingerprints_are_those_of_loops():
    generator = torch.Generator().manual_seed(3)
    keys = tuple(torch.randn(2, 2, 9, d, generator=generator) for d in (5, 3))
    parts = tuple(torch.randn(2, 2, 3, 4, d, generator=generator) for d in (5, 3))
    visible = torch.ones(2, 9, dtype=torch.bool)
    visible[1, :7] = False  # two real rows, and so two real queries of the last four
    member = visible.clone()
    member[0, :2] = False
    found = fingerprints(PromptQueries(parts, 0.3, visible), Rows(keys, keys[0]), member)
    assert found.shape == (2, 2, 9, 12)
    for b in range(2):
        rows = member[b].nonzero().flatten().tolist()
        for g in range(2):
            full = torch.cat([part[b, g].double() for part in keys], -1).numpy()
            real = visible[b, -4:]
            heads = torch.cat([part[b, g][:, real].double() for part in parts], -1).numpy()
            wanted = in_loops(full, heads, rows)
            mine = found[b, g, rows]
            np.testing.assert_allclose(mine[:, : wanted.shape[1]], wanted, atol=1e-5)
            assert not mine[:, wanted.shape[1] :].any()
        assert not found[b, :, ~member[b]].any()


def test_a_dimension_without_spread_is_zero():
    keys = (torch.tensor([1.0, 0.0]).expand(1, 1, 6, 2),)
    parts = (torch.randn(1, 1, 2, 3, 2, generator=torch.Generator().manual_seed(0)),)
    visible = torch.ones(1, 6, dtype=torch.bool)
    assert not fingerprints(PromptQueries(parts, 1.0, visible), Rows(keys, keys[0]), visible).any()


@torch.no_grad()
def test_teams_of_a_prompt_come_from_its_last_queries(model):
    """The parents are sklearn's clusters of the fingerprints in loops, and Algorithm 2 then works on the keys."""
    from latent_santa.kmeans import minibatch_kmeans
    from latent_santa.teams import build_teams

    ids = prompt(80)
    with latent_santa.patch(model, **SMALL) as santa:
        prefilled = santa.prefill(ids)
        for adapter, layer in zip(santa._control.adapters, prefilled.rewound().layers, strict=True):
            states = layer.observed.states
            assert states.shape[2] == PROBES
            rows, points = adapter.rows(layer.keys, layer.values), adapter.points(layer.keys)
            each = [adapter.query(states[:, :, w : w + 1]) for w in range(PROBES)]
            for g in range(points.shape[1]):
                full = torch.cat([part[0, g].double() for part in rows.keys], -1).numpy()
                heads = np.stack([torch.cat([p[0, g].double() for p in parts], -1).numpy() for parts in each], 1)
                prints = torch.tensor(in_loops(full, heads, range(80)), dtype=torch.float32)
                parents = minibatch_kmeans(prints[None], [80], [10], seed=0, engine="sklearn")
                wanted = build_teams(points[:, g : g + 1], parents[None], 2).team_of_row[0, 0]
                assert wanted.equal(layer.grouped.teams.team_of_row[0, g])


def test_full_budget_is_dense_and_prefilled_prompts_agree(model):
    ids, mask = padded([30, 90])
    wanted = generate(model, ids, 4, attention_mask=mask)
    with latent_santa.patch(model, **{**SMALL, "budget": 4096}) as santa:
        assert_same(generate(model, ids, 4, attention_mask=mask), wanted)
        santa.configure(budget=16)
        santa.sequence_keys = [7, 9]
        found = generate(model, ids, 4, attention_mask=mask)
        santa.configure(parents="contiguous")
        prefilled = santa.prefill(ids, mask)  # under other settings: the queries are kept for any
        prefilled.generate(max_new_tokens=2, do_sample=False)
        santa.configure(parents="probes")
        assert prefilled.generate(max_new_tokens=4, do_sample=False).equal(found.sequences)
        for b, length in enumerate((30, 90)):
            santa.sequence_keys = [(7, 9)[b]]
            alone = generate(model, ids[b : b + 1, 90 - length :], 4)
            assert alone.sequences[0, length:].equal(found.sequences[b, 90:])


def test_a_prompt_in_chunks_has_the_same_teams(model):
    ids = prompt(90)
    with latent_santa.patch(model, **SMALL) as santa:
        counts = []
        for options in ({}, {"prefill_chunk_size": 24}):
            santa.reset()
            model.generate(ids, max_new_tokens=3, do_sample=False, **options)
            counts.append(santa.access.totals())
    assert counts[0] == counts[1]


def test_exact_rows_stay_out_of_the_clusters(model):
    with latent_santa.patch(model, **SMALL, exact_first=4, exact_last=8) as santa:
        for layer in santa.prefill(prompt(80)).rewound().layers:
            grouped = (layer.grouped.teams.team_of_row >= 0).any(1)[0]
            assert grouped.nonzero().flatten().tolist() == list(range(4, 72))


def test_what_has_no_queries_is_refused(model):
    with latent_santa.patch(model, **SMALL) as santa:
        cache = filled_cache(model, prompt(40))
        santa.prepare(cache)
    with latent_santa.patch(model, **{**SMALL, "parents": "contiguous"}) as santa:
        cache = filled_cache(model, prompt(40))
        santa.configure(parents="probes")
        with pytest.raises(NotImplementedError, match='parents="probes" clusters rows by the queries .* santa.prefill'):
            santa.prepare(cache)
    with pytest.raises(ValueError, match='regroup_after=64: must be 0 .never. or "auto" with parents="probes"'):
        SantaConfig(parents="probes", regroup_after=64)
