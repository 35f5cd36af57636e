"""Parents and teams against the reference's Algorithm 2, and the records they are kept in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from latent_santa import naive as ref
from latent_santa.parents import contiguous_parents, requested_parents
from latent_santa.rows import Rows
from latent_santa.teams import Teams, build_centroids, build_teams, freeze_representatives, join_teams

from .cases import check_records, frozen_teams, team_lists


def random_keys(kind: str, batch: int, groups: int, length: int, dims: int, seed: int) -> torch.Tensor:
    """Keys in general position, or a few lattice points: duplicates and equal distances everywhere.

    Lattice steps are divisible by parent sizes, so that means and ties are exact: by every size up to 16 in float64,
    by ``EXACT_SIZES`` in float32.
    """
    generator = torch.Generator().manual_seed(seed)
    if kind == "normal":
        return torch.randn(batch, groups, length, dims, generator=generator)
    points = torch.randint(-1, 2, (batch, groups, length, dims), generator=generator)
    return points.double() * 720720 if kind == "lattice64" else points.float() * 240


EXACT_SIZES = {"lattice32": {1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 16}, "lattice64": set(range(1, 17))}


def random_member(batch: int, length: int, seed: int, shortest: int = 1) -> torch.Tensor:
    """Left padding and holes; the first sequence is whole."""
    generator = torch.Generator().manual_seed(seed)
    member = torch.rand(batch, length, generator=generator) < 0.7
    member[0] = True
    for b in range(1, batch):
        member[b, : int(torch.randint(0, length - shortest + 1, (1,), generator=generator))] = False
        member[b, length - shortest :] = True
    return member


def make_teams(keys, member, parents, representatives):
    """Teams of rows with a second key part, which distances must not see, as in MLA."""
    rows = Rows((keys, (keys[..., :2] * 7).sin()), keys)
    teams = frozen_teams(rows, keys, parents, representatives)
    check_records(teams, member)
    for b in range(keys.shape[0]):
        for g in range(keys.shape[1]):
            count = int(teams.count[b, g])
            owners = teams.representative[b, g, :count].long()
            for frozen, part in zip(teams.routing_keys, rows.keys, strict=True):
                assert frozen.codes.dtype == part.dtype and frozen.codes[b, g, :count].equal(part[b, g, owners])
    return teams


def expected_teams(keys, member, labels, representatives, b, g):
    """The reference on the compacted sequence, its row numbers put back, and its parents' sizes."""
    real = member[b].nonzero()[:, 0].tolist()
    parents = ref.parents_from_labels(labels[b, g, real].tolist())
    teams = ref.build_teams(keys[b, g, real].double().numpy(), parents, representatives)
    renamed = [([real[i] for i in team.members], real[team.representative]) for team in teams]
    return renamed, {len(parent) for parent in parents}


CASES = [  # length, P, R
    (1, 4, 2), (2, 4, 4), (5, 16, 4), (16, 16, 4), (33, 16, 4), (23, 8, 8), (30, 4, 1), (17, 1, 1), (40, 12, 3),
]  # fmt: skip


@pytest.mark.parametrize("length, parent_size, representatives", CASES)
@pytest.mark.parametrize("kind", ["normal", "lattice32", "lattice64"])
@pytest.mark.parametrize("labelled", [False, True])
def test_teams_equal_the_reference(length, parent_size, representatives, kind, labelled):
    batch, groups, compared = 3, 2, 0
    for seed in range(3):
        keys = random_keys(kind, batch, groups, length, 3, seed)
        member = random_member(batch, length, seed + 50)
        if labelled:  # arbitrary partitions with empty labels, another one for each group
            generator = torch.Generator().manual_seed(seed)
            centers = requested_parents(length, parent_size) + 3
            labels = torch.randint(0, centers, (batch, groups, length), generator=generator)
            labels = torch.where(member[:, None], labels, -1)
        else:
            labels = contiguous_parents(member, parent_size).expand(-1, groups, -1)
        teams = make_teams(keys, member, labels, representatives)
        for b in range(batch):
            for g in range(groups):
                expected, sizes = expected_teams(keys, member, labels, representatives, b, g)
                if sizes <= EXACT_SIZES.get(kind, sizes):
                    assert team_lists(teams, b, g) == expected, (seed, b, g)
                    compared += 1
    assert compared >= 3


def test_contiguous_parents_equal_the_reference():
    for length in (1, 4, 5, 13, 16):
        for size in (1, 4, 16):
            spans = contiguous_parents(torch.ones(1, length, dtype=torch.bool), size)[0, 0].tolist()
            assert ref.parents_from_labels(spans) == ref.contiguous_parents(length, size)


def test_contiguous_spans_count_real_rows():
    member = torch.tensor([[False, False, True, True, False, True, True, True]])
    assert contiguous_parents(member, 2).tolist() == [[[-1, -1, 0, 0, -1, 1, 1, 2]]]


def test_requested_parents():
    for n in range(1, 70):
        for size in (1, 2, 16):
            assert requested_parents(n, size) == ref.requested_parents(n, size)


def teams_of(points: list[float], representatives: int) -> list[tuple[list[int], int]]:
    keys = torch.tensor(points).view(1, 1, -1, 1)
    member = torch.ones(1, len(points), dtype=torch.bool)
    return team_lists(make_teams(keys, member, torch.zeros(1, 1, len(points)).long(), representatives), 0, 0)


def test_tie_rules_by_hand():
    """Appendix A: lowest index on selection ties, earliest representative on assignment ties, forced self-ownership."""
    # mean 0, rows 1 and 3 tie for it; then rows 0 and 4 tie at distance 2 from row 1
    assert teams_of([-2.0, 0.0, 1.0, 0.0, 2.0, -1.0], 1) == [([0, 1, 2, 3, 4, 5], 1)]
    # row 2 lies halfway between representatives 1 (chosen first) and 0
    assert teams_of([-2.0, 0.0, -1.0, 0.0, 2.0, 1.0], 2) == [([1, 2, 3, 4, 5], 1), ([0], 0)]
    # the duplicate of a representative goes to the earliest; a representative that duplicates one owns itself
    assert teams_of([5.0, 5.0, 5.0, 5.0], 3) == [([0, 3], 0), ([1], 1), ([2], 2)]
    assert teams_of([0.0, 4.0, 4.0], 3) == [([1], 1), ([0], 0), ([2], 2)]


def test_two_rows_tie_for_their_mean():
    """Whatever rounding says, the lower index is the first representative."""
    keys = torch.randn(1, 1, 400, 3, generator=torch.Generator().manual_seed(0))
    member = torch.ones(1, 400, dtype=torch.bool)
    teams = make_teams(keys, member, contiguous_parents(member, 2), 1)
    assert teams.representative[0, 0].tolist() == list(range(0, 400, 2))


def test_one_team_a_row_when_representatives_suffice():
    assert sorted(teams_of([3.0, 1.0, 2.0], 8)) == [([0], 0), ([1], 1), ([2], 2)]
    assert teams_of([3.0, 1.0, 2.0], 10**12) == teams_of([3.0, 1.0, 2.0], 8)  # work is bound by rows, not by R


def test_batch_equals_alone_and_padding_changes_nothing():
    lengths, size, representatives = (37, 64, 21), 8, 4
    longest = max(lengths)
    keys = random_keys("normal", 3, 2, longest, 4, 7)
    member = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    batch = make_teams(keys, member, contiguous_parents(member, size).expand(-1, 2, -1), representatives)
    for b, n in enumerate(lengths):
        own, whole = keys[b : b + 1, :, longest - n :].clone(), torch.ones(1, n, dtype=torch.bool)
        alone = make_teams(own, whole, contiguous_parents(whole, size).expand(-1, 2, -1), representatives)
        for g in range(2):
            moved = [([i + longest - n for i in rows], j + longest - n) for rows, j in team_lists(alone, 0, g)]
            assert team_lists(batch, b, g) == moved
            count = int(alone.count[0, g])
            for together, single in zip(batch.routing_keys, alone.routing_keys, strict=True):
                assert together.codes[b, g, :count].equal(single.codes[0, g, :count])


def test_distances_by_differences_tell_close_points_apart():
    """Far from the origin the expanded square q2 - 2qk + k2 would lose these distances in float32."""
    keys = 300.0 + torch.tensor([0.0, 0.5, 0.75, 4.0]).view(1, 1, 4, 1).expand(-1, -1, -1, 64)
    member = torch.ones(1, 4, dtype=torch.bool)
    labels = torch.zeros(1, 1, 4).long()
    assert team_lists(make_teams(keys, member, labels, 3), 0, 0) == expected_teams(keys, member, labels, 3, 0, 0)[0]


def test_bfloat16_rows():
    keys = random_keys("normal", 1, 1, 30, 4, 3).bfloat16()
    member = torch.ones(1, 30, dtype=torch.bool)
    labels = contiguous_parents(member, 8)
    teams = make_teams(keys, member, labels, 4)
    assert teams.routing_keys[0].codes.dtype == torch.bfloat16
    assert team_lists(teams, 0, 0) == expected_teams(keys, member, labels, 4, 0, 0)[0]


def test_many_rows_in_pieces():
    """A large batch measures its distances in pieces of rows; where a piece ends must not show."""
    keys = random_keys("normal", 32, 2, 300, 512, 5)
    labels = contiguous_parents(torch.ones(32, 300, dtype=torch.bool), 16).expand(-1, 2, -1)
    whole = build_teams(keys, labels, 3)
    for b in (0, 31):
        alone = build_teams(keys[b : b + 1], labels[b : b + 1], 3)
        assert alone.team_of_row[0].equal(whole.team_of_row[b])
        assert alone.representative[0].equal(whole.representative[b])


def test_layers_stacked_in_one_batch_split_again():
    """Teams of several layers formed at once are those of each layer, with its own frozen keys."""
    layers = [random_keys("normal", 2, 2, 30, 3, seed) for seed in range(3)]
    member = random_member(2, 30, 4)
    labels = contiguous_parents(member, 8).expand(-1, 2, -1)
    stacked = build_teams(torch.cat(layers), labels.repeat(3, 1, 1), 2)
    for keys, part in zip(layers, stacked.split(3), strict=True):
        rows = Rows((keys, keys.neg()), keys)
        frozen, alone = freeze_representatives(part, rows), frozen_teams(rows, keys, labels, 2)
        check_records(frozen, member)
        for b in range(2):
            for g in range(2):
                assert team_lists(frozen, b, g) == team_lists(alone, b, g)
        assert all(one.codes.equal(two.codes) for one, two in zip(frozen.routing_keys, alone.routing_keys, strict=True))


@pytest.mark.parametrize("labelled", [False, True])
def test_centroids_equal_the_reference(labelled):
    batch, groups, length, size = 3, 2, 29, 6
    keys = random_keys("normal", batch, groups, length, 3, 1)
    rotary = random_keys("normal", batch, groups, length, 2, 2)
    member = random_member(batch, length, 9)
    labels = contiguous_parents(member, size).expand(-1, groups, -1)
    if labelled:
        drawn = torch.randint(0, 9, labels.shape, generator=torch.Generator().manual_seed(1))
        labels = torch.where(member[:, None], drawn, -1)
    teams = build_centroids(Rows((keys, rotary), keys), labels)
    assert bool((teams.representative == -1).all())
    for b in range(batch):
        real = member[b].nonzero()[:, 0].tolist()
        for g in range(groups):
            parents = ref.parents_from_labels(labels[b, g, real].tolist())
            joined = torch.cat((keys[b, g, real], rotary[b, g, real]), -1).double().numpy()
            expected = ref.centroid_groups(joined, parents)
            found = team_lists(teams, b, g)
            assert [rows for rows, _ in found] == [[real[i] for i in rows] for rows, _ in expected]
            means = torch.cat([part.codes[b, g, : len(found)] for part in teams.routing_keys], -1)
            np.testing.assert_allclose(means.double().numpy(), [mean for _, mean in expected], atol=1e-6)
    assert all(bool(part.codes.isfinite().all()) for part in teams.routing_keys)


def second_turn(centroid: bool) -> tuple[Teams, Teams, Teams, torch.Tensor, torch.Tensor, Rows]:
    """Two turns of unequal lengths across the batch; rows 20 to 23 between them stay in the suffix."""
    first_rows, length, groups = 20, 44, 2
    keys = random_keys("normal", 3, groups, length, 3, 4)
    rows = Rows((keys, random_keys("normal", 3, groups, length, 2, 5)), keys)
    # one sequence has many teams in the first turn and few in the second, another the other way round
    early = torch.arange(first_rows) >= torch.tensor([0, 17, 9])[:, None]
    late = torch.arange(length) >= torch.tensor([41, 24, 30])[:, None]
    before = Rows(tuple(part[:, :, :first_rows] for part in rows.keys), keys[:, :, :first_rows])
    built = []
    for part, member in ((before, early), (rows, late)):
        parents = contiguous_parents(member, 6).expand(-1, groups, -1)
        built.append(build_centroids(part, parents) if centroid else frozen_teams(part, part.keys[0], parents, 3))
    return built[0], built[1], join_teams(*built), early, late, rows


@pytest.mark.parametrize("centroid", [False, True])
def test_join_teams(centroid):
    first, second, joined, early, late, rows = second_turn(centroid)
    member = torch.nn.functional.pad(early, (0, late.shape[1] - early.shape[1])) | late
    check_records(joined, member)
    assert joined.count.tolist() == (first.count + second.count).tolist()
    for b in range(3):
        for g in range(2):
            assert team_lists(joined, b, g) == team_lists(first, b, g) + team_lists(second, b, g)
            a, c = int(first.count[b, g]), int(second.count[b, g])
            for part, one, two in zip(joined.routing_keys, first.routing_keys, second.routing_keys, strict=True):
                assert part.codes[b, g, : a + c].equal(torch.cat((one.codes[b, g, :a], two.codes[b, g, :c])))


def test_join_keeps_the_first_turns_frozen_keys():
    """The joined records must not read the cache again: its replayed rows have changed since."""
    first, second, joined, *_ = second_turn(False)
    for part in first.routing_keys:
        part.codes.neg_()
    again = join_teams(first, second)
    assert again.team_of_row.equal(joined.team_of_row)
    assert again.routing_keys[0].codes[0, 0, 0].equal(-joined.routing_keys[0].codes[0, 0, 0])


def test_frozen_keys_are_copies():
    keys = random_keys("normal", 1, 1, 12, 3, 0)
    member = torch.ones(1, 12, dtype=torch.bool)
    teams = make_teams(keys, member, contiguous_parents(member, 4), 2)
    before = teams.routing_keys[0].codes.clone()
    keys.zero_()
    assert teams.routing_keys[0].codes.equal(before)


def test_select_batch():
    _, _, joined, early, late, _ = second_turn(False)
    index = torch.tensor([2, 0, 0, 1])
    picked = joined.select_batch(index)
    for b, source in enumerate(index.tolist()):
        for g in range(2):
            assert team_lists(picked, b, g) == team_lists(joined, source, g)
            for part, whole in zip(picked.routing_keys, joined.routing_keys, strict=True):
                assert part.codes[b, g].equal(whole.codes[source, g])
    member = torch.nn.functional.pad(early, (0, late.shape[1] - early.shape[1])) | late
    check_records(picked, member[index])
    # after a selection M may be larger than needed, and the bound looser, but never too small
    few = joined.select_batch(torch.tensor([0]))
    assert few.M == joined.M and few.most_rows(3) >= int(few.sizes.sort(-1).values[..., -3:].sum(-1).max())


def test_most_rows_is_reached():
    """The bound is the largest teams' sum where one sequence holds them all."""
    keys = random_keys("normal", 1, 1, 50, 3, 2)
    member = torch.ones(1, 50, dtype=torch.bool)
    teams = make_teams(keys, member, contiguous_parents(member, 10), 3)
    sizes = sorted(teams.sizes[0, 0].tolist(), reverse=True)
    assert [teams.most_rows(n) for n in range(len(sizes) + 1)] == [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    assert teams.most_rows(10**6) == 50


def test_bytes_counts_every_record():
    keys = random_keys("normal", 1, 1, 12, 3, 0)
    member = torch.ones(1, 12, dtype=torch.bool)
    teams = make_teams(keys, member, contiguous_parents(member, 4), 2)
    # int32: team_of_row (12), sizes, representative (6 each), count (1); float32 keys 3 + 2
    assert teams.bytes() == 4 * (12 + 2 * 6 + 1) + 4 * 6 * (3 + 2)
