"""The whole decoding call, for both row layouts, against the reference and against dense attention."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from latent_santa import estimator as operator_module
from latent_santa import naive as ref
from latent_santa.ahead import Ahead, Need
from latent_santa.estimator import dense_attention, sampled_attention
from latent_santa.parents import contiguous_parents
from latent_santa.routing_keys import PlainKeys
from latent_santa.rows import Rows, scores
from latent_santa.sampling import listed
from latent_santa.step import Sampling, Suffix
from latent_santa.teams import build_centroids

from .cases import frozen_teams, make_case, reference_noise

LAYOUTS = {
    "mla-1": {"layout": "mla", "heads": 1},
    "mla-7": {"layout": "mla", "heads": 7},
    "gqa-1": {"layout": "gqa", "heads": 1, "groups": 3},
    "gqa-7": {"layout": "gqa", "heads": 7, "groups": 2},
}
SUFFIXES = {
    "none": {},
    "open": {"suffix": 3},
    "padded": {"suffix": 3, "hidden": ((0, 0), (0, 1), (2, 1))},
}
LENGTHS = (21, 34, 9)
ADDED = operator_module._added


def assert_equals_reference(case, output, k, estimator, noise, method="santa++", tolerance=1e-5):
    batch, groups = output.union.shape
    for b, g in itertools.product(range(batch), range(groups)):
        expected = case.reference(b, g, k, estimator, noise, method)
        counts = (int(output.routing[b, g]), int(output.union[b, g]), int(output.suffix[b, g]))
        assert counts == expected.counts[:3], (b, g)
        found = output.out[b, g].double().numpy(), output.lse[b, g].double().numpy()
        np.testing.assert_allclose(found[0], expected.outputs, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(found[1], expected.lse, rtol=tolerance, atol=tolerance)
    assert output.out.dtype == output.lse.dtype == torch.float32


@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_halves_of_the_union_give_what_the_whole_gives(layout, suffix, estimator, monkeypatch):
    """Half of the room for rows is unused in the shortest sequence: its second half may hold no row at all."""
    monkeypatch.setattr(operator_module, "ROWS_AT_ONCE", 1)
    pieces = []
    monkeypatch.setattr(operator_module, "_added", lambda sums: pieces.append(len(sums)) or ADDED(sums))
    for seed in range(2):
        case = make_case(lengths=LENGTHS, seed=seed, **LAYOUTS[layout], **SUFFIXES[suffix])
        for k in (2, 5):
            assert_equals_reference(case, case.run(k, estimator, "independent"), k, estimator, "independent")
    assert set(pieces) == {2}


@pytest.mark.parametrize("noise", ["independent", "shared"])
@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sampled_attention_equals_the_reference(layout, suffix, estimator, noise):
    """K = 5 is below the team count of two sequences and reaches that of the short one; K = 2 is below all."""
    for seed in range(2):
        case = make_case(lengths=LENGTHS, seed=seed, **LAYOUTS[layout], **SUFFIXES[suffix])
        for k in (2, 5):
            assert_equals_reference(case, case.run(k, estimator, noise), k, estimator, noise)


@pytest.mark.parametrize("noise", ["independent", "shared"])
@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gumbel_rows_equal_the_reference(layout, suffix, estimator, noise):
    case = make_case(lengths=LENGTHS, seed=3, **LAYOUTS[layout], **SUFFIXES[suffix])
    for k in (4, 9):
        assert_equals_reference(case, case.run(k, estimator, noise, "gumbel_rows"), k, estimator, noise, "gumbel_rows")


@pytest.mark.parametrize("parent_size, representatives", [(1, 1), (16, 1), (4, 4), (64, 3)])
def test_other_team_shapes(parent_size, representatives):
    case = make_case(
        "mla", heads=3, lengths=LENGTHS, suffix=2, parent_size=parent_size, representatives=representatives, seed=5
    )
    for k, estimator in itertools.product((1, 2), ("per_head", "pooled")):
        assert_equals_reference(case, case.run(k, estimator), k, estimator, "independent")


@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
def test_centroid_routing_equals_the_reference(estimator):
    """Appendix B.2 through the same estimator: parents as teams, routed by their mean keys at prefill."""
    case = make_case("mla", heads=3, lengths=LENGTHS, suffix=2, seed=6)
    length = case.prompt.shape[1]
    parents = contiguous_parents(case.prompt, 4)
    teams = build_centroids(Rows(case.frozen, case.frozen[0]), parents)
    k = ref.centroid_budget(13, 4, teams.M)
    assert k == 3
    case = replace(case, teams=teams)
    output = case.run(k, estimator)
    for b in range(3):
        real = case.prompt[b].nonzero()[:, 0].tolist()
        order = [*real, length, length + 1]
        prefill = torch.cat([part[b, 0, real] for part in case.frozen], -1).double().numpy()
        keys = torch.cat([part[b, 0, order] for part in case.rows.keys], -1).double().numpy()
        queries = torch.cat([part[b, 0] for part in case.query], -1).double().numpy()
        groups = ref.centroid_groups(prefill, ref.contiguous_parents(len(real), 4))
        draws = reference_noise(case.draw, b, 0, 3, len(groups), False)
        expected = ref.attention_group(
            queries, keys, case.rows.values[b, 0, order].double().numpy(), groups, [mean for _, mean in groups],
            range(len(real), len(order)), case.scale, k, draws, estimator,
        )  # fmt: skip
        assert (int(output.routing[b, 0]), int(output.union[b, 0])) == expected.counts[:2]
        np.testing.assert_allclose(output.out[b, 0].double().numpy(), expected.outputs, rtol=1e-5, atol=1e-5)


def seen_rows(case):
    """(B, L) bool, what dense attention sees."""
    visible = case.suffix.visible
    if visible is None:
        visible = torch.ones(case.prompt.shape[0], case.suffix.index.numel(), dtype=torch.bool)
    return torch.cat((case.prompt, visible), 1)


@pytest.mark.parametrize("method", ["santa++", "gumbel_rows"])
@pytest.mark.parametrize("noise", ["independent", "shared"])
@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_when_k_reaches_m(layout, suffix, estimator, noise, method):
    case = make_case(lengths=LENGTHS, seed=7, **LAYOUTS[layout], **SUFFIXES[suffix])
    visible = seen_rows(case)
    out, lse = dense_attention(case.query, case.rows, visible, case.scale)
    for k in (34, 1000):
        output = case.run(k, estimator, noise, method)
        torch.testing.assert_close(output.out, out, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(output.lse, lse, rtol=2e-6, atol=2e-6)
        assert output.union[:, 0].tolist() == list(LENGTHS)
        assert output.routing[:, 0].tolist() == (visible.sum(1).tolist() if method == "gumbel_rows" else [0, 0, 0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_attention_equals_the_reference(layout):
    case = make_case(lengths=LENGTHS, seed=8, **LAYOUTS[layout])
    out, _ = dense_attention(case.query, case.rows, case.prompt, case.scale)
    for b, g in itertools.product(range(3), range(out.shape[1])):
        real = case.prompt[b].nonzero()[:, 0].tolist()
        keys = torch.cat([part[b, g, real] for part in case.rows.keys], -1).double().numpy()
        queries = torch.cat([part[b, g] for part in case.query], -1).double().numpy()
        expected = ref.dense(queries, keys, case.rows.values[b, g, real].double().numpy(), case.scale)
        np.testing.assert_allclose(out[b, g].double().numpy(), expected, rtol=1e-5, atol=1e-5)
    whole = make_case(lengths=(12,), seed=8, **LAYOUTS[layout])
    masked = dense_attention(whole.query, whole.rows, whole.prompt, whole.scale)
    torch.testing.assert_close(dense_attention(whole.query, whole.rows, None, whole.scale), masked)


@pytest.mark.parametrize("method", ["santa++", "gumbel_rows"])
@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
@pytest.mark.parametrize("layout", ["mla-7", "gqa-7"])
def test_sequence_alone_equals_sequence_in_a_padded_batch(layout, estimator, method):
    """Same teams, draws and counts whatever the padding; outputs differ by rounding alone."""
    case = make_case(lengths=LENGTHS, suffix=2, seed=9, **LAYOUTS[layout])
    together = case.run(4, estimator, "independent", method)
    longest = max(LENGTHS)
    for b, n in enumerate(LENGTHS):
        cut = slice(longest - n, None)
        keys = tuple(part[b : b + 1, :, cut] for part in case.rows.keys)
        frozen = Rows(tuple(part[b : b + 1, :, cut] for part in case.frozen), case.points[b : b + 1, :, cut])
        member = torch.ones(1, n, dtype=torch.bool)
        parents = contiguous_parents(member, case.parent_size).expand(-1, keys[0].shape[1], -1)
        alone = replace(
            case,
            query=tuple(part[b : b + 1] for part in case.query),
            rows=Rows(keys, keys[0] if LAYOUTS[layout]["layout"] == "mla" else case.rows.values[b : b + 1, :, cut]),
            prompt=member,
            teams=frozen_teams(frozen, frozen.keys[0], parents, case.representatives),
            suffix=Suffix(torch.arange(n, n + 2)),
            draw=replace(case.draw, key=case.draw.key[b : b + 1], step=case.draw.step[b : b + 1]),
        ).run(4, estimator, "independent", method)
        for name in ("routing", "union", "suffix"):
            assert getattr(alone, name)[0].tolist() == getattr(together, name)[b].tolist()
        torch.testing.assert_close(alone.out[0], together.out[b], rtol=5e-6, atol=5e-6)
        torch.testing.assert_close(alone.lse[0], together.lse[b], rtol=5e-6, atol=5e-6)


def integer_case(seed, size, offset=0.0):
    """Integer rows and queries, so that float32 holds every score exactly and only log c_g is rounded."""
    case = make_case("mla", heads=3, lengths=(21, 34), suffix=2, seed=seed, scale=1.0)
    for part in (*case.query, *case.rows.keys, *case.frozen, case.points):
        part.mul_(size).round_()
    for part in (case.query[1], case.rows.keys[1], case.frozen[1]):
        part[..., 0] = offset
    parents = contiguous_parents(case.prompt, case.parent_size)
    return replace(case, teams=frozen_teams(Rows(case.frozen, case.frozen[0]), case.points, parents, 2))


@pytest.mark.parametrize("method", ["santa++", "gumbel_rows"])
@pytest.mark.parametrize("noise", ["independent", "shared"])
@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
def test_scores_around_ten_thousand(estimator, noise, method):
    for seed in range(3):
        case = integer_case(seed, 2, offset=100.0)
        assert float(scores(case.query, case.rows.keys, 1.0)[0].min()) > 9000
        output = case.run(4, estimator, noise, method)
        assert_equals_reference(case, output, 4, estimator, noise, method, tolerance=2e-3)


@pytest.mark.parametrize("noise", ["independent", "shared"])
@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
def test_scores_ten_thousand_apart(estimator, noise):
    """Sampled rows may all lie thousands below the best row, so the scaling must follow the sampled ones."""
    lowest = 0.0
    for seed in range(3):
        case = integer_case(seed, 50)
        output = case.run(4, estimator, noise)
        for b, h in itertools.product(range(2), range(3)):
            inputs = case.reference_inputs(b, 0, 4, estimator, noise)
            with np.errstate(all="ignore"):  # the reference's own sums are scaled by the best row, and underflow
                group = ref.attention_group(**inputs)
            weights = ref.row_log_weights(inputs["teams"], group.log_corrections[h], inputs["suffix"])
            query, keys, values = inputs["queries"][h], inputs["keys"], inputs["values"]
            shift = max(ref.score(query, keys[i], 1.0) + weight for i, weight in weights.items())
            total, mass = ref.weighted_sums(query, keys, values, weights, 1.0, shift)
            np.testing.assert_allclose(output.out[b, 0, h].double().numpy(), total / mass, rtol=5e-3, atol=5e-3)
            assert float(output.lse[b, 0, h]) == pytest.approx(np.log(mass) + shift, rel=1e-6, abs=5e-3)
            lowest = min(lowest, shift - group.shift[h])
    assert lowest < -4000  # a head whose every sampled row lies that far down was among the cases


@pytest.mark.parametrize("method", ["santa++", "gumbel_rows"])
@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
@pytest.mark.parametrize("layout", ["mla-7", "gqa-7"])
def test_bfloat16_rows_are_computed_in_float32(layout, estimator, method):
    case = make_case(lengths=LENGTHS, suffix=2, seed=2, dtype=torch.bfloat16, **LAYOUTS[layout])
    assert case.rows.keys[0].dtype == case.teams.routing_keys[0].codes.dtype == torch.bfloat16
    low = case.run(4, estimator, "independent", method)
    assert_equals_reference(case, low, 4, estimator, "independent", method)
    keys = tuple(part.float() for part in case.rows.keys)
    upcast = replace(
        case,
        rows=Rows(keys, keys[0] if LAYOUTS[layout]["layout"] == "mla" else case.rows.values.float()),
        teams=replace(case.teams, routing_keys=tuple(PlainKeys(part.float()) for part in case.teams.routing_keys)),
    ).run(4, estimator, "independent", method)
    torch.testing.assert_close(low.out, upcast.out, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(low.lse, upcast.lse, rtol=1e-6, atol=1e-6)
    dense = dense_attention(case.query, case.rows, seen_rows(case), case.scale)
    torch.testing.assert_close(dense, dense_attention(case.query, Rows(keys, case.rows.values.float()),
                                                      seen_rows(case), case.scale))  # fmt: skip


def test_selection_reads_frozen_keys_and_sums_read_current_ones():
    """After the cache changes under the teams, who is selected stays and what is summed moves."""
    case = make_case("mla", heads=2, lengths=(24,), seed=1)
    before = case.run(3)
    for part in case.rows.keys:
        part.mul_(0.5)
    after = case.run(3)
    assert_equals_reference(case, after, 3, "per_head", "independent")
    assert after.union.tolist() == before.union.tolist()
    assert not torch.allclose(after.out, before.out, atol=1e-2)


def test_invisible_suffix_rows_change_nothing():
    case = make_case("gqa", heads=2, lengths=(20, 20), suffix=3, hidden=((1, 0), (1, 2)), seed=2)
    before = case.run(3)
    for part in (*case.rows.keys, case.rows.values):
        part[1, :, [20, 22]] = -7.0
    after = case.run(3)
    assert after.out.equal(before.out) and after.lse.equal(before.lse)
    assert after.suffix.tolist() == [[3], [1]]


@pytest.mark.parametrize("noise", ["independent", "shared"])
def test_draws_made_beforehand(noise):
    """Draws made with other layers', which have more teams, are the layer's own."""
    case = make_case("gqa", heads=3, groups=2, lengths=(20, 9), suffix=1, seed=2)
    ahead = Ahead([Need(case.draw.key.device, 2, teams, teams) for teams in (40, 40, 40, case.teams.M, 40)])
    given = replace(case, draw=replace(case.draw, ahead=ahead))
    for estimator in ("per_head", "pooled"):
        own, other = case.run(3, estimator, noise), given.run(3, estimator, noise)
        assert own.out.equal(other.out) and own.union.equal(other.union)


@pytest.mark.parametrize("method", ["santa++", "gumbel_rows"])
@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
def test_a_sequence_without_a_real_row(estimator, method):
    """A chunk of a long prompt may be nothing but padding for a short one: zeros, no count, no harm to the others."""
    case = make_case("mla", heads=3, lengths=(20, 0, 9), seed=2)
    assert case.teams.count[:, 0].tolist() == [10, 0, 5]
    for k in (3, 100):
        output = case.run(k, estimator, "independent", method)
        assert bool((output.out[1] == 0).all()) and bool((output.lse[1] == -torch.inf).all())
        assert int(output.routing[1, 0]) == int(output.union[1, 0]) == int(output.suffix[1, 0]) == 0
        for b in (0, 2):
            expected = case.reference(b, 0, k, estimator, "independent", method)
            np.testing.assert_allclose(output.out[b, 0].double().numpy(), expected.outputs, rtol=1e-5, atol=1e-5)
    out, _ = dense_attention(case.query, case.rows, case.prompt, case.scale)
    assert bool((out[1] == 0).all()) and bool(out.isfinite().all())


def test_suffix_need_not_be_the_last_rows():
    """Between the prompts of two turns lies an exact span."""
    case = make_case("gqa", heads=2, lengths=(20,), suffix=4, seed=3)
    order = torch.tensor([20, 21, *range(20), 22, 23])
    inverse = torch.argsort(order)
    moved_rows = Rows(tuple(part[:, :, order] for part in case.rows.keys), case.rows.values[:, :, order])
    team = torch.full((1, 1, 24), -1, dtype=torch.int32)
    team[:, :, 2:22] = case.teams.team_of_row
    teams, suffix = replace(case.teams, team_of_row=team[:, :, :22]), Suffix(inverse[case.suffix.index])
    moved = sampled_attention(replace(case.step, rows=moved_rows, teams=teams, suffix=suffix), Sampling(3))
    still = case.run(3)
    torch.testing.assert_close(moved.out, still.out)
    torch.testing.assert_close(moved.lse, still.lse)
    assert moved.union.equal(still.union) and moved.suffix.equal(still.suffix)


def test_listed_rows_are_compact():
    case = make_case("gqa", groups=2, lengths=(21, 34, 9), seed=0)
    generator = torch.Generator().manual_seed(0)
    union = torch.rand(*case.teams.sizes.shape, generator=generator) < 0.4
    union &= case.teams.sizes > 0
    team = case.teams.team_of_row
    held = (case.teams.sizes * union).sum(-1)
    for capacity in (int(held.max()), 34, 60):
        rows = listed(union, case.teams.team_of_row, capacity)
        assert rows.shape == (3, 2, capacity) and rows.dtype == torch.int64
        for b, g in itertools.product(range(3), range(2)):
            wanted = [i for i, t in enumerate(team[b, g].tolist()) if t >= 0 and union[b, g, t]]
            assert rows[b, g].tolist() == wanted + [-1] * (capacity - len(wanted))


def test_rows_take():
    case = make_case("mla", lengths=(6,), dtype=torch.bfloat16)
    part = case.rows.take(torch.tensor([[[4, 1, -1]]]))
    assert part.values is part.keys[0] and part.keys[0].dtype == torch.float32
    assert part.keys[1].equal(case.rows.keys[1][:, :, [4, 1, 0]].float())
    case = make_case("gqa", lengths=(6,))
    part = case.rows.take(torch.tensor([[[4, 1]]]))
    assert part.values.equal(case.rows.values[:, :, [4, 1]])


def test_scores():
    case = make_case("mla", heads=3, lengths=(6,))
    found = scores(case.query, case.rows.keys, 0.25)
    q, k = torch.cat(case.query, -1).double(), torch.cat(case.rows.keys, -1).double()
    torch.testing.assert_close(found.double(), 0.25 * q @ k.mT, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError):
        scores(case.query, case.rows.keys[:1], 1.0)
    double = scores(tuple(p.double() for p in case.query), tuple(p.double() for p in case.rows.keys), 1.0)
    assert double.dtype == torch.float64
