"""The paged operator in PyTorch: its records, its exactness, its law, and what it may not depend on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from latent_santa import naive as ref
from latent_santa import naive_noise, paged
from latent_santa.estimator import dense_attention, sampled_attention
from latent_santa.noise import noise_keys
from latent_santa.parent_records import summarised
from latent_santa.parents import contiguous_parents
from latent_santa.rows import Rows
from latent_santa.step import DecodeStep, Draw, Sampling, Suffix
from latent_santa.teams import build_teams, freeze_representatives

from .paged_cases import make_paged

SETTINGS = [(e, n) for e in ("per_head", "pooled") for n in ("independent", "shared")]


def one_sequence(case, b, full):
    """The request as one contiguous sequence whose first ``full`` rows are grouped."""
    rank = case.rank
    parts = tuple(part[None, None] for part in case.query[b].split([rank, case.query.shape[2] - rank], 1))
    latent, rotary = (part[None, None] for part in case.rows[b].split([rank, case.rows[b].shape[1] - rank], 1))
    grouped = Rows((latent[:, :, :full], rotary[:, :, :full]), latent[:, :, :full])
    parents = contiguous_parents(torch.ones(1, full, dtype=torch.bool), 16)
    teams = freeze_representatives(build_teams(grouped.keys[0], parents, 4), grouped)
    teams = replace(teams, parents=summarised(teams, parents, grouped, "mean"))
    n, s = len(case.rows[b]), case.sampling
    draw = Draw(noise_keys(s.seed, [0], "cpu"), torch.tensor([n]), s.layer, first=(0, s.first_head))
    return DecodeStep(parts, Rows((latent, rotary), latent), teams, Suffix(torch.arange(full, n)), draw, s.scale)


@pytest.mark.parametrize("block_size", [16, 64])
def test_records_are_the_teams_of_algorithm_2(block_size):
    case = make_paged((3 * block_size + 5,), block_size)
    for logical in range(3):
        block = int(case.block_table[0, logical])
        rows = case.rows[0][logical * block_size : (logical + 1) * block_size, : case.rank]
        teams = ref.build_teams(rows.double().numpy(), ref.contiguous_parents(block_size, 16), 4)
        assert case.records.row[block].tolist() == [team.representative for team in teams]
        assert case.records.size[block].tolist() == [len(team.members) for team in teams]
        owner = {i: g % 4 for g, team in enumerate(teams) for i in team.members}
        assert case.records.team[block].tolist() == [owner[i] for i in range(block_size)]


def test_only_filled_blocks_get_records():
    case = make_paged((40,), 16)
    last, spare = int(case.block_table[0, 2]), set(range(8)) - set(case.block_table[0, :3].tolist())
    for block in (last, *spare):
        assert case.records.size[block].tolist() == [3] * 4
    before = case.records.size.clone()
    cache, new = case.cache.clone(), case.rows[0][:2]
    paged.write_rows(case.cache, case.records, new[:, : case.rank], new[:, case.rank :], torch.tensor([-1, -1]))
    assert torch.equal(case.records.size, before)
    assert torch.equal(case.cache.nan_to_num(), cache.nan_to_num())


@pytest.mark.parametrize("first_head", [0, 6])
@pytest.mark.parametrize("estimator, noise", SETTINGS)
@pytest.mark.parametrize("block_size, n, full", [(16, 150, 144), (16, 144, 128), (64, 200, 192)])
def test_it_is_the_one_sequence_path_on_the_same_rows(block_size, n, full, estimator, noise, first_head):
    case = make_paged((n,), block_size, estimator=estimator, noise=noise, first_head=first_head, heads_in_model=16)
    got, counts = case.run()
    want = sampled_attention(one_sequence(case, 0, full), Sampling(4, estimator, noise))
    assert torch.equal(got, want.out[0])
    assert counts.tolist() == [[full // 4, int(want.union), n - full, 0]]


@pytest.mark.parametrize("estimator, noise", SETTINGS)
def test_two_stages_are_those_of_the_one_sequence_path(estimator, noise):
    case = make_paged((150, 90), 64, estimator=estimator, noise=noise, parents_per_head=3)
    got, counts = case.run()
    for b, full in enumerate((128, 64)):
        want = sampled_attention(one_sequence(case, b, full), Sampling(4, estimator, noise, 3))
        assert torch.equal(got[b], want.out[0, 0])
        assert counts[b].tolist() == [int(want.routing), int(want.union), len(case.rows[b]) - full, 0]
    assert int(counts[0, 0]) < 128 // 4 + 128 // 16  # not every parent's teams were scored


@pytest.mark.parametrize("estimator, noise", SETTINGS)
def test_it_is_the_reference_in_loops(estimator, noise):
    case, full = make_paged((70,), estimator=estimator, noise=noise), 64
    s, rows = case.sampling, case.rows[0].double().numpy()
    teams = ref.build_teams(rows[:full, : case.rank], ref.contiguous_parents(full, 16), 4)
    key = noise_keys(s.seed, [0], "cpu")[0].tolist()
    shared = noise == "shared"
    drawn = [[naive_noise.gumbel(key, 70, s.layer, 0, h, g, shared) for g in range(len(teams))] for h in range(4)]
    want = ref.attention_group(
        case.query[0].double().numpy(), rows, rows[:, : case.rank], teams,
        np.array([rows[team.representative] for team in teams]), range(full, 70), s.scale, s.teams_per_head, drawn,
        estimator, shared,
    )  # fmt: skip
    got, counts = case.run()
    assert np.abs(got[0].numpy() - want.outputs).max() < 2e-6
    assert counts.tolist() == [[want.counts.routing, want.counts.union, want.counts.suffix, 0]]


def test_a_request_is_the_same_alone_in_any_batch_and_in_any_blocks():
    case = make_paged((150, 20, 0, 97, 33), 16, columns=3)
    together, counts = case.run()
    order = [3, 0, 4, 1, 2]
    mixed = replace(
        case, query=case.query[order], block_table=case.block_table[order], seq_lens=case.seq_lens[order]
    )  # fmt: skip
    again, again_counts = mixed.run()
    assert torch.equal(again, together[order]) and torch.equal(again_counts, counts[order])
    for b in range(5):
        alone, alone_counts = case.request(b).run()
        assert torch.equal(alone, together[b : b + 1]) and torch.equal(alone_counts, counts[b : b + 1])
    moved = torch.randperm(case.cache.shape[0], generator=torch.Generator().manual_seed(1))
    place = torch.argsort(moved)
    known = case.block_table < case.cache.shape[0]
    table = torch.where(known, place[case.block_table.long() * known].int(), case.block_table)
    records = replace(case.records, **{name: getattr(case.records, name)[moved] for name in ("team", "row", "size")})
    elsewhere = replace(case, cache=case.cache[moved], records=records, block_table=table)
    assert torch.equal(elsewhere.run()[0], together)


def test_shared_blocks_and_rows_that_grow_over_a_border():
    """A request decodes row by row, its blocks are grouped as they fill, and another shares its first ones."""
    case, size = make_paged((60,), 16), 16
    fresh = paged.empty_records(case.cache.shape[0], size, 16, 4, "cpu")
    grown = replace(case, records=fresh)
    slots = (case.block_table[0, :4].long()[:, None] * size + torch.arange(size)).flatten()
    case.cache.fill_(float("nan"))

    def write(first, end):
        new = case.rows[0][first:end]
        paged.write_rows(case.cache, fresh, new[:, : case.rank], new[:, case.rank :], slots[first:end])

    write(0, 41)  # a prompt in two chunks
    write(41, 45)
    for n in range(46, 61):
        write(n - 1, n)
        now = torch.tensor([n, min(n, 47)], dtype=torch.int32)
        two = replace(
            grown, rows=case.rows * 2, query=case.query.expand(2, -1, -1), block_table=case.block_table.expand(2, -1),
            seq_lens=now,
        )  # fmt: skip
        out, counts = two.run()
        full = (n - 1) // 16 * 16
        fixed = replace(case, rows=[case.rows[0][:n]])
        want = sampled_attention(one_sequence(fixed, 0, full), Sampling(4))
        assert torch.equal(out[:1], want.out[0]) and int(counts[0, 2]) == n - full


@pytest.mark.parametrize("n, settings", [(150, {"dense_below": 151}), (150, {"teams_per_head": 36}), (16, {}), (1, {})])
def test_short_requests_and_large_budgets_attend_to_every_row(n, settings):
    case = make_paged((n, 0), **settings)
    got, counts = case.run()
    step = one_sequence(case, 0, (n - 1) // 16 * 16) if n > 16 else None
    rows = Rows((case.rows[0][None, None, :, :32], case.rows[0][None, None, :, 32:]), case.rows[0][None, None, :, :32])
    query = (case.query[:1, None, :, :32], case.query[:1, None, :, 32:])
    want, _ = dense_attention(query, rows, None, 0.3)
    assert torch.equal(got[:1], want[0]) and counts.tolist() == [[0, 0, 0, n], [0, 0, 0, 0]]
    assert not got[1].any()
    if step is not None:  # the last row more, or one team less, is sampled
        limit = {"dense_below": n} if "dense_below" in settings else {"teams_per_head": 35}
        _, counts = case.run(**{**settings, **limit})
        assert counts[0, 3] == 0 and counts[0, 0] == 36


def test_counts_add_up_over_steps():
    case = make_paged((150, 20))
    counts = torch.full((3, 4), 5)
    for layer in range(2):
        sampling = replace(case.sampling, layer=layer)
        paged.paged_attention(case.parts, case.cache, case.records, case.block_table, case.seq_lens, sampling, counts)
    _, one = case.run(layer=0)
    _, two = case.run(layer=1)
    assert torch.equal(counts[:2], 5 + one + two) and counts[2].tolist() == [5] * 4


@pytest.mark.parametrize("estimator, noise", SETTINGS)
def test_sums_are_unbiased_over_seeds(estimator, noise):
    """Numerators and denominators of 120 seeds against all rows, within 4.5 standard errors per head and dimension."""
    case = make_paged((60,), 16, heads=2, rank=6, rope=2, estimator=estimator, noise=noise, teams_per_head=3, scale=0.5)
    blocks = case.block_table[0, :4].long()

    def sums(sampling):
        """U and Z, ``(H, rank + 1)``."""
        query = (case.parts[0][0], case.parts[1][0])
        out, lse, _ = paged.attend_request(query, case.rows[0], blocks, case.records, sampling)
        mass = lse.double().exp()[:, None]
        return torch.cat((out * mass, mass), 1)

    want = sums(replace(case.sampling, dense_below=61))
    drawn = torch.stack([sums(replace(case.sampling, seed=seed)) for seed in range(120)])
    spread = drawn.std(0)
    assert bool((spread > 0.01 * want[:, -1:]).any())  # something was sampled
    assert float(((drawn.mean(0) - want) / (spread / 120**0.5)).abs().max()) < 4.5


def test_noise_shared_between_heads_differs_from_independent_noise():
    case = make_paged((150,))
    assert not torch.equal(case.run(noise="shared")[0], case.run()[0])
    assert not torch.equal(case.run(seed=18)[0], case.run()[0])


@pytest.mark.parametrize(
    "arguments, named", [((2, 24, 16, 4), "multiple"), ((2, 16, 16, 17), "representatives"), ((2, 512, 16, 4), "256")]
)
def test_records_that_no_block_can_have_are_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        paged.empty_records(*arguments, "cpu")
