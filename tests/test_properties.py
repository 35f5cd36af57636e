"""What holds for every shape, padding, partition and budget."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from latent_santa import AccessLedger, SantaConfig
from latent_santa.access import MLA_UNIT
from latent_santa.estimator import dense_attention, sampled_attention
from latent_santa.methods.gumbel_rows import sampled_rows
from latent_santa.noise import noise_keys
from latent_santa.parents import form_parents
from latent_santa.rows import Rows
from latent_santa.step import DecodeStep, Draw, Sampling, Suffix
from latent_santa.teams import Teams, build_centroids, join_teams

from .cases import check_records, frozen_teams, own_teams, pick, team_lists

quick = settings(max_examples=120, derandomize=True, deadline=None)


@st.composite
def partitions(draw):
    """(keys (B, G, N, D), member (B, N), parents (B, G, N), R); keys repeat often, not every sequence has real rows."""
    batch, groups, length = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 20))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    levels, dims = draw(st.sampled_from([1, 2, 3, 1000])), draw(st.integers(1, 3))
    keys = torch.randint(0, levels, (batch, groups, length, dims), generator=generator).float()
    member = torch.rand(batch, length, generator=generator) < draw(st.sampled_from([0.3, 0.8, 1.0]))
    member[0, int(torch.randint(0, length, (1,), generator=generator))] = True
    size = draw(st.integers(1, length + 2))
    if draw(st.booleans()):
        labels = torch.randint(0, -(-length // size) + 2, (batch, groups, length), generator=generator)
        parents = torch.where(member[:, None], labels, -1)
    else:
        config = SantaConfig(parents="contiguous", parent_size=size, representatives=1, budget=size)
        parents = form_parents([keys], [], member, config)[0]
    return keys, member, parents, draw(st.integers(1, 6))


def parent_sizes(parents, b, g):
    labels = [label for label in parents[b, g].tolist() if label >= 0]
    return [labels.count(label) for label in sorted(set(labels))]


@quick
@given(partitions())
def test_teams_partition_the_real_rows(drawn):
    keys, member, parents, representatives = drawn
    teams = frozen_teams(Rows((keys,), keys), keys, parents, representatives)
    check_records(teams, member)
    for b in range(keys.shape[0]):
        for g in range(keys.shape[1]):
            lists = team_lists(teams, b, g)
            # R teams per parent, or one per row where the parent is smaller
            assert len(lists) == sum(min(representatives, size) for size in parent_sizes(parents, b, g))
            for rows, owner in lists:
                assert owner in rows
                assert len({int(parents[b, g, row]) for row in rows}) == 1
                assert teams.routing_keys[0].codes[b, g, int(teams.team_of_row[b, g, owner])].equal(keys[b, g, owner])
            # teams come parent after parent
            order = [int(parents[b, g, owner]) for _, owner in lists]
            assert order == sorted(order)
            # no row is nearer to another representative of its parent than to its own
            for rows, owner in lists:
                rivals = [other for _, other in lists if parents[b, g, other] == parents[b, g, owner]]
                for row in set(rows) - {owner}:
                    distances = {r: float((keys[b, g, row] - keys[b, g, r]).square().sum()) for r in rivals}
                    assert distances[owner] == min(distances.values())


@quick
@given(partitions())
def test_centroids_partition_the_real_rows(drawn):
    keys, member, parents, _ = drawn
    teams = build_centroids(Rows((keys,), keys), parents)
    check_records(teams, member)
    for b in range(keys.shape[0]):
        for g in range(keys.shape[1]):
            assert teams.sizes[b, g].tolist()[: int(teams.count[b, g])] == parent_sizes(parents, b, g)


def _later(teams: Teams, length: int) -> Teams:
    """The same teams ``length`` rows further on."""
    shifted = torch.nn.functional.pad(teams.team_of_row, (length, 0), value=-1)
    owners = torch.where(teams.representative >= 0, teams.representative + length, -1)
    return replace(teams, team_of_row=shifted, representative=owners)


@quick
@given(partitions(), st.integers(0, 5))
def test_joined_turns_partition_both(drawn, gap):
    """The second turn takes the first one's partitions in another order of sequences, so counts differ."""
    keys, member, parents, representatives = drawn
    first = frozen_teams(Rows((keys,), keys), keys, parents, representatives)
    flip = torch.arange(keys.shape[0]).flip(0)
    second = _later(first.select_batch(flip), first.length + gap)
    check_records(second, torch.nn.functional.pad(member[flip], (first.length + gap, 0)))
    joined = join_teams(first, second)
    pad = torch.zeros(keys.shape[0], gap, dtype=torch.bool)
    check_records(joined, torch.cat((member, pad, member[flip]), 1))
    for b in range(keys.shape[0]):
        for g in range(keys.shape[1]):
            assert team_lists(joined, b, g) == team_lists(first, b, g) + team_lists(second, b, g)


@quick
@given(
    st.integers(0, 2**20), st.integers(1, 3), st.integers(1, 9), st.integers(1, 12),
    st.sampled_from(["per_head", "pooled"]), st.booleans(),
)  # fmt: skip
def test_selections_are_consistent(seed, heads, teams, k, estimator, shared):
    generator = torch.Generator().manual_seed(seed)
    count = torch.randint(1, teams + 1, (3, 2), generator=generator)
    count[0, 0] = teams
    phi = torch.randn(3, 2, heads, teams, generator=generator) * 5
    phi.masked_fill_((torch.arange(teams) >= count[..., None])[:, :, None], -torch.inf)
    noise = -torch.rand(3, 2, 1 if shared else heads, teams, generator=generator).log().neg().log().expand_as(phi)
    picked, own = pick(phi, noise, k, estimator, shared), own_teams(phi, noise, k)
    real = phi > -torch.inf
    assert own.sum(-1).equal(count.clamp_max(k)[..., None].expand(-1, -1, heads))
    assert not bool((own & ~real).any())
    assert picked.union.equal(own.any(2))
    used = picked.log_correction < torch.inf
    assert used.expand_as(own).equal(own if estimator == "per_head" else picked.union[:, :, None].expand_as(own))
    assert bool((picked.log_correction[used] <= 0).all()) and bool(picked.log_correction[used].isfinite().all())
    whole = (count <= k)[..., None, None]
    assert bool((picked.log_correction[whole & used] == 0).all())
    assert picked.routing.equal(torch.where(count > k, count, 0))


@quick
@given(partitions(), st.integers(1, 12), st.integers(0, 3), st.sampled_from(["per_head", "pooled"]), st.booleans())
def test_counts_add_up(drawn, k, suffix, estimator, shared):
    """Union and suffix never exceed what is visible, meet it when K reaches M, and the ledger adds them up."""
    keys, member, parents, representatives = drawn
    batch, groups, length, dims = keys.shape
    teams = frozen_teams(Rows((keys,), keys), keys, parents, representatives)
    generator = torch.Generator().manual_seed(k)
    keys = torch.cat((keys / keys.max().clamp_min(1), torch.randn(batch, groups, suffix, dims, generator=generator)), 2)
    rows = Rows((keys,), keys)
    query = (torch.randn(batch, groups, 3, dims, generator=generator),)
    exact = Suffix(torch.arange(length, length + suffix))
    visible = member.sum(-1) + suffix
    draw = Draw(noise_keys(k, range(batch), "cpu"), visible, 0)
    sampling = Sampling(k, estimator, "shared" if shared else "independent")
    seen = torch.nn.functional.pad(member, (0, suffix), value=True)
    step = DecodeStep(query, rows, teams, exact, draw, 1.0, seen)
    output = sampled_attention(step, sampling)
    assert bool(output.out.isfinite().all()) and bool(output.lse[visible > 0].isfinite().all())
    assert output.suffix.tolist() == [[suffix] * groups] * batch
    held = member.sum(-1)[:, None].expand(-1, groups)
    assert bool((output.union <= held).all())
    assert bool((output.union >= teams.count.clamp_max(k)).all())  # a team has a row of its own
    assert bool((output.union[teams.count <= k] == held[teams.count <= k]).all())
    assert bool((output.union <= teams.most_rows(3 * k)).all())
    single = sampled_rows(step, sampling)
    assert bool((single.union >= held.clamp_max(k)).all()) and bool((single.union <= held.clamp_max(3 * k)).all())
    assert single.routing.equal(visible[:, None].expand(-1, groups))
    out, lse = dense_attention(query, rows, seen, 1.0)
    exactly = sampled_attention(step, replace(sampling, k=100))
    torch.testing.assert_close(exactly.out, out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(exactly.lse, lse, rtol=1e-5, atol=1e-5)
    ledger = AccessLedger()
    for result in (output, exactly):
        ledger.record(0, MLA_UNIT, result.routing, result.union, result.suffix, visible[:, None].expand(-1, groups))
    totals = ledger.totals()
    read = sum(int(part.sum()) for r in (output, exactly) for part in (r.routing, r.union, r.suffix))
    assert totals["numerator"] == read and totals["denominator"] == 2 * groups * int(visible.sum())
    assert sum(row["numerator"] for row in ledger.per_sequence()) == read
    assert ledger.per_step()[1]["percent"] == 100.0
