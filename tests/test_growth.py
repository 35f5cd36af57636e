"""Teams of generated rows, written into room behind the prompt's: records, draws, reference and law."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from latent_santa import naive as ref
from latent_santa.config import SantaConfig
from latent_santa.estimator import dense_attention, sampled_attention
from latent_santa.growth import append_, has_room, joined_bound, with_room
from latent_santa.methods import METHODS
from latent_santa.routing_keys import quantise_parts
from latent_santa.rows import Rows
from latent_santa.step import Draw, Sampling, Suffix
from latent_santa.teams import join_teams
from latent_santa.two_stage import select_teams

from .cases import _array, _joined, make_case, reference_noise
from .test_unbiased import DRAWS, one_hot, repeat, sums

P, R = 4, 2
SPANS = 2  # parents of generated rows that are grouped
LAYOUTS = ["mla", "gqa"]
KINDS = list(itertools.product(("per_head", "pooled"), ("independent", "shared")))
STAGES = ["one_stage", "two_stage"]


def settings(routing="one_stage", summary="mean", **more):
    return SantaConfig(
        parents="contiguous",
        parent_size=P,
        representatives=R,
        budget=8,
        routing=routing,
        parent_summary=summary,
        **more,
    )


def built(case, start, stop, member, config, bound=None):
    """Teams of the rows from ``start`` to ``stop`` by the method itself."""
    rows = Rows(tuple(part[:, :, start:stop] for part in case.rows.keys), case.rows.values[:, :, start:stop])
    (teams,) = METHODS[config.method].build([rows.keys[0]], [rows], member, config, bound)
    return teams


def grown(case, config, room=None):
    """The case after its first ``SPANS`` parents of generated rows became teams; joined, or in ``room`` for parents."""
    start, rows = case.prompt.shape[1], SPANS * P
    first = built(case, 0, start, case.prompt, config)
    seen = case.suffix.visible
    member = torch.ones(len(case.prompt), rows, dtype=torch.bool) if seen is None else seen[:, :rows]
    teams = first if room is None else with_room(first, room, P, R)
    for place in range(0, rows, P):  # one parent after the other, as a generation does
        here = start + place
        bound = None if room is None else 1
        part = built(case, here, here + P, member[:, place : place + P], config, bound)
        if room is None:
            teams = join_teams(teams, part.behind(here))
        else:
            append_([teams], [part], here, 1)
    left = Suffix(case.suffix.index[rows:], None if seen is None else seen[:, rows:])
    return replace(case, teams=teams, suffix=left)


def batch(layout, hidden=True, **more):
    """Two sequences, one of them padded; with ``hidden`` generated rows that only one of them has."""
    places = [(1, 1), (1, 2), (0, 9)] if hidden else []
    return make_case(layout, heads=3, groups=2, lengths=(21, 17), suffix=11, hidden=places, seed=3, **more)


def same_records(roomy, joined):
    """Whether records with room say what joined ones do."""
    M, N = joined.M, joined.length
    assert roomy.count.equal(joined.count)
    assert roomy.sizes[..., :M].equal(joined.sizes) and not roomy.sizes[..., M:].any()
    assert roomy.representative[..., :M].equal(joined.representative) and (roomy.representative[..., M:] == -1).all()
    assert roomy.team_of_row[..., :N].equal(joined.team_of_row) and (roomy.team_of_row[..., N:] == -1).all()
    real = joined.sizes > 0
    for ours, theirs in zip(roomy.routing_keys, joined.routing_keys, strict=True):
        assert ours.float()[:, :, :M][real].equal(theirs.float()[real])
    assert roomy.covered == N and roomy.most_teams >= int(joined.count.max())
    assert (roomy.parents is None) == (joined.parents is None)
    if joined.parents is not None:
        ours, theirs = roomy.parents, joined.parents
        C, real = theirs.C, theirs.sizes > 0
        assert ours.count.equal(theirs.count)
        assert ours.sizes[..., :C].equal(theirs.sizes) and not ours.sizes[..., C:].any()
        assert ours.of_team[..., :M].equal(theirs.of_team) and (ours.of_team[..., M:] == -1).all()
        assert ours.most_teams >= theirs.most_teams and roomy.most_parents >= int(theirs.count.max())
        for a, b in zip((*ours.keys, *ours.spread), (*theirs.keys, *theirs.spread), strict=True):
            a, b = (part if isinstance(part, torch.Tensor) else part.float() for part in (a, b))
            assert a[:, :, :C][real].equal(b[real])


@pytest.mark.parametrize("summary", [None, "mean", "isotropic", "diagonal"])
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_records_with_room_are_those_of_a_join(layout, hidden, summary):
    case = batch(layout, hidden)
    config = settings() if summary is None else settings("two_stage", summary)
    joined, roomy = grown(case, config), grown(case, config, room=3)
    same_records(roomy.teams, joined.teams)
    counts = joined.teams.count[:, 0].tolist()
    assert (counts[0] == counts[1] + 2) != hidden or counts[0] != counts[1]  # padding made numbers differ
    # the records that the room was made from are as they were, and full room is made anew
    assert has_room(roomy.teams, 1) and not has_room(roomy.teams, 2)
    more = with_room(roomy.teams, 4, P, R)
    same_records(more, joined.teams)
    assert more.M == roomy.teams.most_teams + 4 * R and has_room(more, 4)


def test_room_that_somebody_else_keeps_is_not_written_into():
    roomy = grown(batch("mla"), settings(), room=3).teams
    roomy.room.shared = True
    assert not has_room(roomy, 1)
    fresh = with_room(roomy, 1, P, R)
    assert has_room(fresh, 1) and not has_room(roomy, 1)
    assert fresh.sizes.data_ptr() != roomy.sizes.data_ptr() and fresh.count.data_ptr() != roomy.count.data_ptr()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_codes_are_written_under_the_first_center(dtype):
    case = make_case("gqa", lengths=(21, 17), suffix=11, seed=4)
    wide = tuple(torch.cat([part] * 8, -1)[..., :32] for part in case.rows.keys)
    case = replace(case, rows=Rows(wide, case.rows.values))
    config = settings()
    start, members = 21, torch.ones(2, SPANS * P, dtype=torch.bool)
    first = built(case, 0, start, case.prompt, config)
    first = replace(first, routing_keys=quantise_parts(first.routing_keys, dtype, first.sizes > 0))
    for bound in (None, SPANS):
        new = built(case, start, start + SPANS * P, members, config, bound)
        coded = quantise_parts(new.routing_keys, dtype, new.sizes > 0, first.routing_keys)
        new = replace(new, routing_keys=coded)
        if bound is None:
            joined = join_teams(first, new.behind(start))
    roomy = with_room(first, 3, P, R)
    append_([roomy], [new], start, SPANS)
    same_records(roomy, joined)
    assert all(part.scales.is_contiguous() for part in roomy.routing_keys)


@pytest.mark.parametrize("estimator, noise", KINDS)
@pytest.mark.parametrize("routing", STAGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_room_moves_no_draw(layout, routing, estimator, noise):
    """The same teams with room and without. A matrix product of another width rounds otherwise, so sums are close."""
    case, config = batch(layout), settings(routing)
    sampling = Sampling(4, estimator, noise, 3 if routing == "two_stage" else None)
    joined, roomy = grown(case, config).step, grown(case, config, room=9).step
    want, found = select_teams(joined, sampling), select_teams(roomy, sampling)
    M = joined.teams.M
    assert roomy.teams.M > M
    assert found.union[..., :M].equal(want.union) and not found.union[..., M:].any()
    assert found.routing.equal(want.routing) and bool((want.routing > 0).all())
    torch.testing.assert_close(found.log_correction[..., :M], want.log_correction, rtol=1e-4, atol=1e-5)
    ours, theirs = sampled_attention(roomy, sampling), sampled_attention(joined, sampling)
    torch.testing.assert_close(ours.out, theirs.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.lse, theirs.lse, rtol=1e-5, atol=1e-6)
    assert ours.union.equal(theirs.union) and ours.suffix.equal(theirs.suffix)


@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reference_of_grown_teams(layout, estimator):
    """The loops of the paper, given the prompt's teams and then those of the generated rows."""
    case = grown(batch(layout), settings(), room=4)
    found = sampled_attention(case.step, Sampling(4, estimator))
    start, rows = case.prompt.shape[1], SPANS * P
    seen = batch(layout).suffix.visible
    for b, g in itertools.product(range(2), range(2)):
        prompt = case.prompt[b].nonzero()[:, 0].tolist()
        spans = [[start + s * P + i for i in range(P) if seen[b, s * P + i]] for s in range(SPANS)]
        rest = [start + e for e in range(rows, 11) if seen[b, e]]
        order = prompt + sum(spans, []) + rest
        keys, points = _joined(case.rows.keys, b, g)[order], _array(case.rows.keys[0][b, g])[order]
        parents, begin = ref.contiguous_parents(len(prompt), P), len(prompt)
        for span in spans:
            parents.append(list(range(begin, begin + len(span))))
            begin += len(span)
        teams = ref.build_teams(points, parents, R)
        queries = _joined(case.query, b, g)
        want = ref.attention_group(
            queries=queries, keys=keys, values=_array(case.rows.values[b, g])[order], teams=teams,
            routing_keys=[keys[team.representative] for team in teams], k=4, suffix=range(begin, len(order)),
            scale=case.scale, noise=reference_noise(case.draw, b, g, len(queries), len(teams), False),
            estimator=estimator, shared=False,
        )  # fmt: skip
        torch.testing.assert_close(found.out[b, g].double(), torch.from_numpy(want.outputs), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.lse[b, g].double(), torch.from_numpy(want.lse), rtol=1e-4, atol=1e-5)
        counts = tuple(int(part[b, g]) for part in (found.routing, found.union, found.suffix))
        assert counts == tuple(want.counts)[:3] and counts[2] == len(rest)


@pytest.mark.parametrize("estimator, noise", [("per_head", "independent"), ("pooled", "shared")])
@pytest.mark.parametrize("routing", STAGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_sums_are_unbiased(layout, routing, estimator, noise):
    """Over prompt, regrouped rows and suffix, by the bound of tests/test_unbiased.py."""
    case = make_case(layout, heads=3, lengths=(16,), suffix=10, seed=23, scale=0.45)
    case = grown(case if layout == "mla" else one_hot(case), settings(routing), room=4)
    out, shift = dense_attention(case.query, case.rows, None, case.scale)
    expected = torch.cat((out.double(), torch.ones_like(shift).double()[..., None]), -1)[0]
    many = replace(repeat(case).step, visible=None)
    sampling = Sampling(4, estimator, noise, 3 if routing == "two_stage" else None)
    found = sums(sampled_attention(many, sampling), shift)
    deviation = found.std(0)
    assert bool(deviation.max() > 0.01)  # something was sampled
    error = ((found.mean(0) - expected).abs() - 1e-6).clamp_min(0)
    assert float((error / (deviation / DRAWS**0.5 + 1e-9)).max()) < 5


def test_bound_of_room_holds_whatever_the_teams_are():
    """No n teams of records with room hold more rows than their bound says."""
    for seed in range(20):
        case = make_case("gqa", lengths=(23, 9), suffix=11, seed=seed)
        joined, roomy = grown(case, settings()).teams, grown(case, settings(), room=3).teams
        for n in range(1, roomy.M + 2):
            assert roomy.most_rows(n) >= joined.most_rows(n)
        assert roomy.most_rows(roomy.M) <= roomy.length
    assert joined_bound([7, 9], 2, 4, 2) == [7, 10, 13, 15, 16, 17]


def test_draws_follow_a_draws_place_not_the_room():
    """The noise of team t is that of number t: a later team's draw is the one that a longer prompt's would be."""
    case, config = batch("mla", hidden=False), settings()
    draw = Draw(case.draw.key, case.draw.step, 1)
    joined, roomy = (grown(case, config, room).teams for room in (None, 6))
    few, many = (draw.gumbels(2, 3, teams.M, False) for teams in (joined, roomy))
    assert many[..., : joined.M].equal(few) and many.shape[-1] > few.shape[-1]
