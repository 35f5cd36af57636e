"""Kept team records: found for the same rows under the same grouping, and for nothing else."""

from __future__ import annotations

import pytest
import torch

import latent_santa
from latent_santa.patches import grouping
from latent_santa.patches.team_store import TeamStore

from .tiny_models import cache_of, generate, padded, prompt, tiny_model

SMALL = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 16}


@pytest.fixture(scope="module", params=["deepseek_v2-yarn", "qwen2"])
def model(request):
    return tiny_model(request.param)


@pytest.fixture
def formed(monkeypatch):
    """Parent partitions that were formed, one entry a call."""
    calls, form = [], grouping.form_parents
    monkeypatch.setattr(grouping, "form_parents", lambda *args: calls.append(args) or form(*args))
    return calls


@pytest.fixture
def santa(model):
    with latent_santa.patch(model, **SMALL) as handle:
        handle.team_store = TeamStore()
        handle.batch = ("a",)
        yield handle


def outcome(santa, ids, mask=None):
    santa.reset()
    output = generate(santa.model, ids, 5, **({} if mask is None else {"attention_mask": mask}))
    return output.sequences.tolist(), [s.tolist() for s in output.scores], santa.access.as_dict()


def fresh(santa, ids, mask=None, **settings):
    """The same without a store."""
    store, santa.team_store = santa.team_store, None
    try:
        return outcome(santa, ids, mask)
    finally:
        santa.team_store = store


@pytest.mark.parametrize("parents", ["contiguous", "kmeans"])
def test_one_grouping_serves_every_decode_setting(santa, formed, parents):
    santa.configure(parents=parents)
    ids, mask = padded([37, 60])
    for settings in ({}, {"budget": 32}, {"estimator": "pooled"}, {"noise": "shared"}):
        santa.configure(**settings)
        assert outcome(santa, ids, mask) == fresh(santa, ids, mask)
    assert len(formed) == 1 + 4  # and four without the store
    assert santa.team_store.found == 3


def test_without_a_name_nothing_is_kept(santa, formed):
    santa.batch = None
    for _ in range(2):
        outcome(santa, prompt(40))
    assert len(formed) == 2 and santa.team_store.bytes == 0


def test_names_are_told_apart(santa, formed):
    for name in ("a", "b", "a", "b"):
        santa.batch = (name,)
        outcome(santa, prompt(40, seed=ord(name)))
    assert len(formed) == 2 and santa.team_store.found == 2


def test_rows_of_another_shape_are_grouped_anew(santa, formed):
    """The name is the caller's promise; length, batch and padding are looked at all the same."""
    inputs = [(prompt(40), None), (prompt(41), None), (prompt(41, batch=2), None), padded([30, 41]), padded([41, 30])]
    for number, (ids, mask) in enumerate(inputs, 1):
        found = outcome(santa, ids, mask)
        assert len(formed) == number and santa.team_store.found == 0
        assert found == fresh(santa, ids, mask)
        formed.pop()
    replaced, santa.team_store = santa.team_store, TeamStore()
    outcome(santa, *inputs[-1])
    assert replaced.bytes == santa.team_store.bytes > 0  # of the last input alone


def test_another_number_of_groups_is_grouped_anew(santa):
    outcome(santa, prompt(40))
    member = torch.ones(1, 40, dtype=torch.bool)
    groups = 1 if santa.layout == "mla" else 2
    assert santa.team_store.find(("a",), [0, 1], member, [(1, groups, 40)] * 2) is not None
    assert santa.team_store.find(("a",), [0, 1], member, [(1, groups + 1, 40)] * 2) is None
    assert santa.team_store.find(("a",), [0], member, [(1, groups, 40)]) is None


def test_another_grouping_frees_the_records(santa, formed):
    outcome(santa, prompt(40))
    before = santa.team_store.bytes
    santa.configure(representatives=1)
    outcome(santa, prompt(40))
    assert 0 < santa.team_store.bytes < before  # fewer teams, and nothing of the first grouping
    santa.configure(representatives=2)
    outcome(santa, prompt(40))
    assert len(formed) == 3 and santa.team_store.found == 0
    santa.configure(method="santa")
    outcome(santa, prompt(40))
    assert santa.team_store.bytes == 0


def test_routing_keys_come_from_the_rows_at_hand(santa):
    outcome(santa, prompt(40, seed=1))
    output = generate(santa.model, prompt(40, seed=2), 2)
    assert santa.team_store.found == 1
    for layer, adapter in zip(cache_of(output).layers, santa._controller.adapters, strict=True):
        teams, rows = layer.grouped.teams, adapter.rows(layer.keys, layer.values)
        index = teams.representative.long()[..., None]
        before = teams.representative < 39  # the last prompt row is written again after it was frozen
        assert before.sum() > 5
        for routed, keys in zip(teams.routing_keys, rows.keys, strict=True):
            assert routed.codes[before].equal(keys.gather(2, index.expand(-1, -1, -1, keys.shape[-1]))[before])


def test_later_turns_neither_look_nor_keep(santa, formed):
    first = generate(santa.model, prompt(40), 3)
    kept = santa.team_store.bytes
    more = torch.cat((first.sequences, prompt(20, seed=7)), 1)
    generate(santa.model, more, 3, cache=cache_of(first))
    assert len(formed) == 2 and santa.team_store.found == 0 and santa.team_store.bytes == kept


def test_what_does_not_fit_is_not_kept(santa, formed):
    outcome(santa, prompt(40))
    santa.team_store = TeamStore(limit_bytes=santa.team_store.bytes)
    for name in ("a", "b", "a", "b"):
        santa.batch = (name,)
        outcome(santa, prompt(40, seed=ord(name)))
    assert len(formed) == 1 + 3 and santa.team_store.found == 1
    assert santa.team_store.bytes == santa.team_store.limit_bytes


def test_centroids_are_made_each_time(santa, formed):
    santa.configure(method="centroid")
    for _ in range(2):
        outcome(santa, prompt(40))
    assert len(formed) == 2 and santa.team_store.bytes == 0
