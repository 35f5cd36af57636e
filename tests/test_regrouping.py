"""Generated rows become teams while a patched model generates (``regroup_after``)."""

from __future__ import annotations

import copy

import pytest
import torch

import latent_santa
from latent_santa.growth import with_room
from latent_santa.methods import METHODS
from latent_santa.patches import cache_layer, grouping, regrouping

from .call_again import on_the_cpu
from .test_generation import (
    beams,
    chunks_of_padding,
    contrastive_copies,
    left_padding,
    padded_turns,
    prompt_lookup,
    several_returned_sequences,
    three_turns,
)
from .tiny_models import (
    assert_close,
    assert_same,
    cache_name,
    cache_of,
    decode_by_hand,
    generate,
    padded,
    prompt,
    settings_for,
    tiny_model,
)

P = 4
SMALL = {"parents": "contiguous", "parent_size": P, "representatives": 2, "budget": 8, "regroup_after": P}
EVERY_TEAM = {**SMALL, "budget": 4096}
CONTIGUOUS = [left_padding, several_returned_sequences, beams, chunks_of_padding, three_turns, padded_turns]
PATHS = [
    *((path, "contiguous") for path in (*CONTIGUOUS, prompt_lookup, contrastive_copies)),
    *((path, "kmeans") for path in (left_padding, beams, three_turns)),
]


@pytest.fixture(scope="module", params=["deepseek_v2-yarn", "qwen2"])
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def latent():
    return tiny_model("deepseek_v2-yarn")


def per_step(santa):
    """(routing, union, suffix, dense) of each call, per layer and group."""
    per = santa.layers * (1 if santa.layout == "mla" else 2)
    return [
        tuple(row[name] / per for name in ("routing", "union", "suffix", "dense")) for row in santa.access.per_step()
    ]


@pytest.mark.parametrize("path, parents", PATHS, ids=lambda each: each if isinstance(each, str) else each.__name__)
@pytest.mark.filterwarnings("ignore:no call of this generation was sparse")
def test_every_team_selected_equals_the_unpatched_model(model, path, parents):
    wanted = path(model)
    with latent_santa.patch(model, **{**EVERY_TEAM, "parents": parents}) as santa:
        found = path(model)
        assert santa.access.percent == 100
    for ours, theirs in zip(found, wanted, strict=True):
        assert_same(ours, theirs)
        for layer in getattr(cache_of(ours), "layers", ()):
            # a call that verifies drafts is dense and groups nothing; the next single token's does
            assert layer.open_rows <= P or path is prompt_lookup


@pytest.mark.parametrize("after", [0, P, 7, 8])
def test_the_exact_suffix_stays_short(model, after):
    """Rows behind the last grouping never exceed ``regroup_after``, and every other row is in a team."""
    with latent_santa.patch(model, **{**SMALL, "regroup_after": after}) as santa:
        output = generate(model, prompt(30), 25)
        calls = per_step(santa)
    # the replayed token is in a team; call c then reads c generated rows and, as they become teams, P fewer
    suffix, expected = 0, []
    for call in range(25):
        if call:
            if after and suffix >= after:
                suffix -= P * -(-(suffix - after + 1) // P)
            suffix += 1
        expected.append(suffix)
    assert [row[2] for row in calls] == expected and (max(expected) == after if after else max(expected) == 24)
    for call, (routing, union, exact, dense) in enumerate(calls):
        grouped = dense - exact
        teams = 2 * (30 // P) + 2 + 2 * ((grouped - 30) // P)
        assert routing == teams and dense == 30 + call and 0 < union <= grouped
    for layer in cache_of(output).layers:
        teams = layer.grouped.teams
        assert (teams.team_of_row[..., : layer.grouped.stop] >= 0).all()
        assert (teams.team_of_row[..., layer.grouped.stop :] == -1).all()


def test_kmeans_clusters_the_whole_suffix(latent):
    with latent_santa.patch(latent, **{**SMALL, "parents": "kmeans", "regroup_after": 6}) as santa:
        output = generate(latent, prompt(30), 16)
        # 6 rows behind the prompt are clustered at the seventh call, and 6 more at the thirteenth
        assert [row[2] for row in per_step(santa)] == [0, *range(1, 7), *range(1, 7), *range(1, 4)]
        for layer in cache_of(output).layers:
            assert layer.grouped.stop == 42 and layer.grouped.exact == ()


@pytest.mark.parametrize("settings", [{}, {"routing": "two_stage", "parents_per_head": 3}, {"method": "quest"}])
def test_padded_batch_is_each_sequence_alone(latent, settings):
    """Teams of generated rows, their noise and their counts do not depend on the padding before them."""
    lengths = [11, 30]
    with latent_santa.patch(latent, settings_for(**{**SMALL, **settings})) as santa:
        alone, counts = [], []
        for b, length in enumerate(lengths):
            santa.sequence_keys = [10 + b]
            santa.reset()
            alone.append(generate(latent, prompt(length, seed=b), 14).sequences[0, length:].tolist())
            counts.append({**santa.access.per_sequence()[0], "sequence": b})
        santa.sequence_keys = [10, 11]
        santa.reset()
        ids, mask = padded(lengths)
        output = generate(latent, ids, 14, attention_mask=mask)
        assert output.sequences[:, 30:].tolist() == alone
        assert santa.access.per_sequence() == counts


@pytest.mark.parametrize("method", [name for name in METHODS if "regroup_after" in METHODS[name].settings])
def test_every_method_with_teams_regroups(model, method):
    """At full budget all of them are dense attention, on teams of generated rows too."""
    wanted = generate(model, prompt(30), 12)
    with latent_santa.patch(model, settings_for(method, **EVERY_TEAM)) as santa:
        found = generate(model, prompt(30), 12)
        assert santa.full_calls == santa.sparse_calls == 12
        santa.reset()
        santa.configure(budget=8)
        generate(model, prompt(30), 12)
        assert [row[2] for row in per_step(santa)] == [0, 1, 2, 3, 4, *[1, 2, 3, 4], *[1, 2, 3]]
        assert santa.full_calls == 0
    assert_same(found, wanted)


@pytest.mark.parametrize("settings", [{"routing": "two_stage", "parents_per_head": 3}, {"routing_dtype": "int8"}])
def test_records_are_those_of_a_join(latent, settings, monkeypatch):
    """Teams written in place give the scores that joining the same teams as a further turn gives."""
    with latent_santa.patch(latent, **{**SMALL, **settings}) as santa:
        _, found, cache = decode_by_hand(latent, prompt(30), 22)
        rooms = [layer.grouped.teams.room for layer in cache.layers]
        assert all(room.filled == 5 and room.spans == 256 // P for room in rooms)

        def joined(layers, adapters, visible, config):
            for layer in layers:
                if layer.open_rows >= P:
                    layer.waiting = (layer.grouped.stop, layer.grouped.stop + P)
            grouping.group_waiting(layers, adapters, visible, config)

        monkeypatch.setattr("latent_santa.patches.control.regroup_generated", joined)
        counts = per_step(santa)
        santa.reset()
        _, wanted, cache = decode_by_hand(latent, prompt(30), 22)
        assert per_step(santa) == counts
        assert all(layer.grouped.teams.room is None and layer.grouped.stop == 50 for layer in cache.layers)
    assert_close(found, wanted)


@pytest.mark.parametrize("settings", [{}, {"parents": "kmeans"}, {"routing": "two_stage", "parents_per_head": 3}])
def test_captured_steps_go_on_while_teams_come_to_the_records(latent, settings):
    """Regrouping between graph replays: the tokens and counts of launches one by one, and a single capture."""
    ids, mask = padded([11, 30])
    found = {}
    for graphs in ("off", "on"):
        with on_the_cpu(), latent_santa.patch(latent, **{**SMALL, **settings}, graphs=graphs) as santa:
            output = generate(latent, ids, 40, attention_mask=mask)
            found[graphs] = output.scores, santa.access.per_sequence(), santa.full_calls
            assert all(layer.grouped.stop == 30 + 36 for layer in cache_of(output).layers)
            assert santa.graphs.captured == (graphs == "on")
    assert_close(found["on"][0], found["off"][0])
    assert found["on"][1:] == found["off"][1:]


def test_room_grows_by_a_copy(latent, monkeypatch):
    monkeypatch.setattr(regrouping, "LEAST_ROOM", 2 * P)
    monkeypatch.setattr(cache_layer, "LEAST_RESERVE", 2 * P)
    copies = []
    monkeypatch.setattr(regrouping, "with_room", lambda *args: copies.append(args) or with_room(*args))
    _, wanted, _ = decode_by_hand(latent, prompt(30), 30)
    with latent_santa.patch(latent, **EVERY_TEAM) as santa:
        assert_close(decode_by_hand(latent, prompt(30), 30)[1], wanted)
        assert 1 < len(copies) / santa.layers < 7  # fewer than the parents of 30 rows


def test_a_turn_takes_the_open_rows_along(latent):
    """With regrouping no row stays exact for ever: what is open is grouped with the next turn."""
    with latent_santa.patch(latent, **SMALL):
        first = generate(latent, prompt(30), 7)
        assert all((layer.grouped.stop, layer.open_rows) == (34, 2) for layer in cache_of(first).layers)
        ids = torch.cat((first.sequences, prompt(9, seed=1)), 1)
        second = generate(latent, ids, 3, cache=cache_of(first))
        for layer in cache_of(second).layers:
            assert layer.grouped.exact == () and layer.grouped.stop == 46
            assert (layer.grouped.teams.team_of_row[..., :46] >= 0).all()


@pytest.mark.parametrize("removed", [1, 2, 3, 9])
def test_a_crop_below_the_grouped_rows_drops_the_teams(latent, removed):
    tokens, wanted, _ = decode_by_hand(latent, prompt(30), 12)
    with latent_santa.patch(latent, **EVERY_TEAM):
        _, _, cache = decode_by_hand(latent, prompt(30), 12)
        assert cache.get_seq_length() == 41 and cache.layers[0].grouped.stop == 38
        cache.crop(-removed)
        assert (cache.layers[0].grouped.teams is None) == (removed > 3)
        place = 11 - removed
        with torch.no_grad():
            again = latent(tokens[:, place : place + 1], use_cache=True, **{cache_name(latent): cache}).logits[:, -1]
        assert_close([again], [wanted[place + 1]])


def test_a_prefilled_prompt_keeps_its_records(latent):
    """Generations from one prefill write into records of their own, whichever settings come in between."""
    with latent_santa.patch(latent, **SMALL) as santa:
        prompt_ = santa.prefill(prompt(30))
        first = prompt_.generate(max_new_tokens=20, do_sample=False)
        santa.configure(regroup_after=0)
        other = prompt_.generate(max_new_tokens=20, do_sample=False)
        santa.configure(regroup_after=P)
        assert prompt_.generate(max_new_tokens=20, do_sample=False).tolist() == first.tolist()
        assert other.shape == first.shape
        cache = prompt_.rewound()
        assert all(layer.grouped.stop == 30 and layer.grouped.teams.room is None for layer in cache.layers)


def test_a_snapshot_is_not_written_into(latent):
    with latent_santa.patch(latent, **SMALL):
        tokens, _, cache = decode_by_hand(latent, prompt(30), 10)
        kept = [layer.snapshot() for layer in cache.layers]
        before = copy.deepcopy([state.grouped.teams for state in kept])
        generate(latent, torch.cat((prompt(30), tokens), 1), 8, cache=cache)
        for layer, state, old in zip(cache.layers, kept, before, strict=True):
            assert layer.grouped.stop > state.grouped.stop
            for name in ("sizes", "count", "team_of_row", "representative"):
                assert getattr(state.grouped.teams, name).equal(getattr(old, name))


def test_settings():
    config = latent_santa.SantaConfig
    after = METHODS["santa++"].regroup_after
    assert config.preset("paper").regroup_after == 0 and after(config.preset("paper")) == 0
    for parents in ("contiguous", "kmeans"):
        assert after(config(parents=parents)) >= 16
        assert after(config(parents=parents, parent_size=1024, representatives=1024)) == 1024
    assert after(config(parents="contiguous", regroup_after=32)) == 32
    assert METHODS["santa"].regroup_after(config(method="santa")) == 0
    assert config(regroup_after=0).grouping == config(regroup_after=64).grouping
    for wrong in (-1, 15, True, 1.5, "never"):
        with pytest.raises(ValueError, match="regroup_after"):
            config(regroup_after=wrong)
