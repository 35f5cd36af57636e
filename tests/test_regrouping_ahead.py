"""Teams of generated rows are made in the steps before they come to the records, with k-means in parts."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

import latent_santa
from latent_santa.kmeans import seeding, torch_engine
from latent_santa.patches import regrouping

from .call_again import on_the_cpu
from .test_regrouping import SMALL, P, per_step
from .tiny_models import assert_close, cache_name, cache_of, decode_by_hand, generate, padded, prompt, tiny_model

AHEAD = {**SMALL, "regroup_after": 32}  # whose teams are made two steps before they come
CLUSTERED = {**AHEAD, "parents": "kmeans"}  # and in four steps
TWO_STAGE = {"routing": "two_stage", "parents_per_head": 3}


@pytest.fixture(scope="module")
def latent():
    return tiny_model("deepseek_v2-yarn")


@pytest.fixture
def at_once(monkeypatch):
    """Lets the step that finds the suffix full make all its teams, of the same rows."""
    return lambda: monkeypatch.setattr(regrouping, "due", lambda layer: 0 < layer.limit <= layer.open_rows)


def fed(model, cache, rows):
    """Logits of so many further tokens, one by one."""
    scores = []
    with torch.no_grad():
        for _ in range(rows):
            ids = torch.tensor([[cache.get_seq_length() % 90 + 3]])
            scores.append(model(ids, use_cache=True, **{cache_name(model): cache}).logits[:, -1])
    return scores


def pending(model, rows=29):
    """A cache of 30 prompt rows and others behind them, of which the oldest are being clustered."""
    cache = decode_by_hand(model, prompt(30), 1)[2]
    fed(model, cache, rows)
    assert all(layer.coming is not None and layer.coming.making.teams is None for layer in cache.layers)
    return cache


@pytest.mark.parametrize(
    "settings",
    [
        {},
        TWO_STAGE,
        {"routing_dtype": "int8"},
        CLUSTERED,
        {**CLUSTERED, "kmeans_engine": "torch"},
        {**CLUSTERED, **TWO_STAGE, "routing_dtype": "int8"},
    ],
)
def test_teams_made_ahead_are_those_made_at_once(latent, settings, at_once):
    """The same teams at the same steps, to the bit."""
    ids, mask = padded([11, 30])
    with latent_santa.patch(latent, **{**AHEAD, **settings}) as santa:
        ahead = generate(latent, ids, 45, attention_mask=mask)
        counts = per_step(santa)
        assert max(row[2] for row in counts) == 64  # of two sequences
        santa.reset()
        at_once()
        wanted = generate(latent, ids, 45, attention_mask=mask)
        assert per_step(santa) == counts
    for one, two in zip(ahead.scores, wanted.scores, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    "settings, kept, made_of", [(AHEAD, 2, P), (AHEAD, 8, P), (CLUSTERED, 8, 28), (CLUSTERED, 29, 28)]
)
def test_rows_that_go_take_the_teams_made_of_them_along(latent, settings, kept, made_of):
    """A cache cropped while teams are in the making, and filled with other tokens, is one that never held the first."""
    name = cache_name(latent)

    def fed(tokens, cache):
        with torch.no_grad():
            for token in tokens:
                scores = latent(torch.tensor([[token]]), use_cache=True, **{name: cache}).logits
        return scores

    with latent_santa.patch(latent, **settings):
        first, then = list(range(3, 34)), list(range(40, 76 - kept))
        found, wanted = (decode_by_hand(latent, prompt(30), 1)[2] for _ in range(2))
        fed(first, found)
        assert all(layer.coming is not None for layer in found.layers)
        found.crop(kept - 31)
        # they are made of the oldest rows
        assert all((layer.coming is None) == (kept < made_of) for layer in found.layers)
        ours = fed(then, found)
        fed(first[:kept], wanted)
        theirs = fed(then, wanted)
    for one, two in zip(found.layers, wanted.layers, strict=True):
        assert one.grouped.stop == two.grouped.stop > 30
        assert torch.equal(one.grouped.teams.team_of_row, two.grouped.teams.team_of_row)
    assert torch.equal(ours, theirs)


def test_teams_made_ahead_are_made_again_where_they_are_too_few(latent):
    """Rows that come several at once (a draft that is taken) may leave more to group than was made."""
    name = cache_name(latent)
    with latent_santa.patch(latent, **AHEAD), torch.no_grad():
        cache = decode_by_hand(latent, prompt(30), 32)[2]
        assert all(layer.coming is not None for layer in cache.layers)
        latent(prompt(3, seed=2), use_cache=True, **{name: cache})
        latent(prompt(3, seed=3), use_cache=True, **{name: cache})
        assert all(layer.open_rows == 37 for layer in cache.layers)
        latent(prompt(1), use_cache=True, **{name: cache})
        assert all(layer.open_rows <= 32 and layer.grouped.stop == 38 for layer in cache.layers)


@pytest.mark.parametrize("settings", [AHEAD, CLUSTERED])
def test_teams_made_ahead_are_made_again_where_a_mask_hides_their_rows(latent, settings):
    """As speculative decoding of a batch hides rejected drafts: between the step that makes teams and theirs."""
    name = cache_name(latent)

    @torch.no_grad()
    def fed():
        cache, scores = decode_by_hand(latent, prompt(30), 1)[2], []
        for rows in range(30, 66):
            mask = torch.ones(1, rows + 1, dtype=torch.long)
            mask[:, 30:33] = rows < 61  # they are made before row 60 is written, and come before row 62 is
            given = {"attention_mask": mask, "position_ids": torch.tensor([[rows]]), name: cache}
            scores.append(latent(torch.tensor([[rows]]), use_cache=True, **given).logits[:, -1])
        return scores, cache

    wanted, _ = fed()
    with latent_santa.patch(latent, **{**settings, "budget": 4096}):
        found, cache = fed()
    assert all(layer.grouped.stop > 33 for layer in cache.layers)
    assert_close(found, wanted)


@pytest.fixture
def advances(monkeypatch):
    """How many parts of all k-means work each call of ``advance`` ran."""
    found, made = [], regrouping._made

    def counted(*args):
        work = made(*args)
        while True:
            try:
                done = next(work)
            except StopIteration as end:
                found[-1] += 1
                return end.value
            found[-1] += 1
            yield done

    advance = regrouping.Making.advance
    monkeypatch.setattr(regrouping, "_made", counted)
    monkeypatch.setattr(regrouping.Making, "advance", lambda self, share: (found.append(0), advance(self, share)))
    return found


@pytest.mark.filterwarnings("ignore:.*tokens are beyond")
def test_no_step_clusters_much(latent, advances, monkeypatch):
    """All problems in one group, as on a GPU: a part in each step ahead, and none left for the step of the append."""
    monkeypatch.setattr(torch_engine, "group_size", lambda *_: 1000)
    monkeypatch.setitem(seeding.CENTERS_PER_STEP, "cpu", 8)
    settings = {**CLUSTERED, "parent_size": 16, "regroup_after": 256, "kmeans_engine": "torch"}
    with latent_santa.patch(latent, **settings), torch.no_grad():
        cache = decode_by_hand(latent, prompt(30), 1)[2]
        for _ in range(14):  # turns so short that they stay exact
            latent(prompt(15), use_cache=True, **{cache_name(latent): cache})
        fed(latent, cache, 47)
    assert all(layer.grouped.stop == 30 + 256 - 32 for layer in cache.layers)
    assert advances[-1] == 0 and 10 < len(advances) <= 33 and sum(advances) > 10
    assert max(advances) <= 2, advances


@pytest.mark.parametrize("after, parts", [(64, [1, 1, 1, 0]), (32, [1, 2, 0])])
def test_contiguous_teams_are_made_in_parts_too(latent, advances, after, parts):
    """Before the step of the append, in which no part is left."""
    with latent_santa.patch(latent, **{**SMALL, "regroup_after": after}):
        cache = cache_of(generate(latent, prompt(30), after + 2))
    assert all(layer.grouped.stop == 30 + P for layer in cache.layers)
    assert advances == parts


@pytest.mark.parametrize("engine", ["sklearn", "torch"])
def test_work_of_many_problems_is_spread_over_the_steps(latent, advances, engine):
    """As on a CPU, where a problem is clustered after another."""
    settings = {**CLUSTERED, "regroup_after": 64, "kmeans_engine": engine}  # eight steps
    ids = prompt(30, batch=6)
    with latent_santa.patch(latent, **settings):
        generate(latent, ids, 66)
    assert len(advances) in (8, 9) and max(advances[:8]) <= sum(advances) / 4, advances


@pytest.mark.parametrize("kind", ["deepseek_v2-yarn", "qwen2"])
def test_beams_take_the_work_along(kind, at_once):
    """Rows of the surviving beams are those of the beams that they were when the work began."""
    model = tiny_model(kind)
    ids, mask = padded([11, 30])
    with latent_santa.patch(model, **CLUSTERED) as santa:
        given = {"attention_mask": mask, "num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True}
        ahead = generate(model, ids, 40, **given)
        counts = per_step(santa)
        assert all(layer.grouped.stop == 30 + 28 for layer in cache_of(ahead).layers)
        santa.reset()
        at_once()
        wanted = generate(model, ids, 40, **given)
        assert per_step(santa) == counts
    assert ahead.sequences.equal(wanted.sequences)
    for one, two in zip(ahead.scores, wanted.scores, strict=True):
        assert torch.equal(one, two)
    for one, two in zip(cache_of(ahead).layers, cache_of(wanted).layers, strict=True):
        assert torch.equal(one.grouped.teams.team_of_row, two.grouped.teams.team_of_row)


def test_caches_in_turn_do_not_disturb_each_other(latent):
    with latent_santa.patch(latent, **CLUSTERED):
        wanted = fed(latent, pending(latent), 9)
        one, two = pending(latent), pending(latent)
        found = [[], []]
        for _ in range(9):
            for scores, cache in zip(found, (one, two), strict=True):
                scores += fed(latent, cache, 1)
    for scores in found:
        assert all(map(torch.equal, scores, wanted))


@pytest.mark.parametrize("change", ["copied", "settings", "inference mode"])
def test_what_comes_in_between_changes_nothing(latent, change):
    with latent_santa.patch(latent, **CLUSTERED, kmeans_engine="torch") as santa:
        wanted, cache = fed(latent, pending(latent), 9), pending(latent)
        making = cache.layers[0].coming.making
        if change == "settings":
            santa.configure(backend="torch", budget=12)
            santa.configure(budget=8)
            found = fed(latent, cache, 2)
            assert cache.layers[0].coming.making is making
        elif change == "inference mode":
            with torch.inference_mode():
                found = fed(latent, cache, 2)
        else:  # its work is not copied: it makes its own
            cache, found = copy.deepcopy(cache), []
            assert all(layer.coming is None for layer in cache.layers)
        found += fed(latent, cache, 9 - len(found))
        assert all(layer.grouped.stop == 58 for layer in cache.layers)
    assert all(map(torch.equal, found, wanted))


def test_other_teams_take_the_place_of_the_work(latent):
    """A further turn groups the open rows with its own, and other settings group all rows anew."""
    with latent_santa.patch(latent, **CLUSTERED) as santa:
        cache = pending(latent)
        with torch.no_grad():
            latent(prompt(9), use_cache=True, **{cache_name(latent): cache})
        fed(latent, cache, 1)
        assert all(layer.coming is None and layer.grouped.stop == 68 for layer in cache.layers)
        cache = pending(latent)
        santa.configure(kmeans_seed=1)
        fed(latent, cache, 1)
        assert all(layer.coming is None and layer.grouped.stop == 59 for layer in cache.layers)


def test_a_generation_that_ends_before_leaves_its_rows_exact(latent):
    with latent_santa.patch(latent, **CLUSTERED) as santa:
        output = generate(latent, prompt(30), 31)
        assert all((layer.grouped.stop, layer.open_rows) == (30, 30) for layer in cache_of(output).layers)
        assert [row[2] for row in per_step(santa)] == list(range(31))


@pytest.fixture
def written(monkeypatch):
    """Lets a CPU be slow at the first use of a kernel; the shapes of the teams that are written into records."""
    calls, append = [], regrouping.append_

    def shapes(teams):
        keys = tuple((type(part), part.shape[0], *part.shape[3:]) for part in teams.routing_keys)
        parents = None if teams.parents is None else teams.parents.sizes.shape
        return teams.sizes.shape, teams.team_of_row.shape, keys, parents, teams.count.dtype

    def noted(records, new, start, spans):
        calls.append((len(records), spans, *map(shapes, new)))
        append(records, new, start, spans)

    monkeypatch.setattr(regrouping, "SLOW_AT_FIRST", ("cpu",))
    monkeypatch.setattr(regrouping, "_rehearsed", set())
    monkeypatch.setattr(regrouping, "append_", noted)
    return calls


@pytest.mark.parametrize("kind", ["deepseek_v2", "qwen2"])
@pytest.mark.parametrize(
    "settings",
    [
        AHEAD,
        {**AHEAD, **TWO_STAGE, "routing_dtype": "int8"},
        {**CLUSTERED, "kmeans_engine": "torch"},
        {**CLUSTERED, "regroup_after": 64},  # more rows than the prompt has
    ],
)
def test_a_prompts_call_rehearses_what_steps_do_first(kind, settings, written, monkeypatch):
    """Teams of the same shapes are written before the first step, once per shape, and nothing else changes."""
    model = tiny_model(kind)
    ids, steps = prompt(50), settings["regroup_after"] + 10
    with latent_santa.patch(model, **settings) as santa:
        with monkeypatch.context() as changed:
            changed.setattr(regrouping, "SLOW_AT_FIRST", ())
            wanted, counts = generate(model, ids, steps), per_step(santa)
        real = len(written)
        assert real and not regrouping._rehearsed
        santa.reset()
        found = generate(model, ids, 1)
        assert len(written) == real, "nothing is rehearsed for a short generation"
        santa.reset()
        found = generate(model, ids, steps)
        rehearsed = written[real : len(written) - real]
        assert len(rehearsed) == len(regrouping._rehearsed) == 1
        assert settings["regroup_after"] > 50 or rehearsed[0] == written[0] == written[-1]
        assert per_step(santa) == counts
        assert all(map(torch.equal, found.scores, wanted.scores))
        del written[:]
        generate(model, prompt(50, seed=1), steps)
        assert len(written) == real, "once per shape"
        generate(model, prompt(50, batch=2), steps)
        assert len(written) == 2 * real + 1 and len(regrouping._rehearsed) == 2


def test_captured_steps_go_on_beside_the_work(latent):
    ids, mask = padded([11, 30])
    found = {}
    for graphs in ("off", "on"):
        with on_the_cpu(), latent_santa.patch(latent, **CLUSTERED, graphs=graphs) as santa:
            output = generate(latent, ids, 40, attention_mask=mask)
            found[graphs] = output.scores, santa.access.per_sequence()
            assert all(layer.grouped.stop == 30 + 28 for layer in cache_of(output).layers)
            assert (santa.graphs.captured, santa.graphs.replayed) == ((1, 38) if graphs == "on" else (0, 0))
    assert_close(found["on"][0], found["off"][0])
    assert found["on"][1] == found["off"][1]


def test_a_failure_leaves_no_work_behind(latent, monkeypatch):
    with latent_santa.patch(latent, **CLUSTERED):
        wanted, cache = fed(latent, pending(latent), 9), pending(latent)
        with monkeypatch.context() as changed:
            changed.setattr(regrouping.Making, "advance", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                fed(latent, cache, 1)
        assert all(layer.coming is None for layer in cache.layers)
        assert all(map(torch.equal, fed(latent, cache, 9), wanted))


def test_the_work_goes_with_its_cache(latent):
    """It holds rows, and neither the cache nor its layers."""
    with latent_santa.patch(latent, **CLUSTERED):
        cache = pending(latent)
        left = weakref.ref(cache.layers[0])
        gc.disable()
        try:
            del cache
            assert left() is None
        finally:
            gc.enable()
