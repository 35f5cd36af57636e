"""Two-stage routing through the kernels, in Triton's interpreter against the PyTorch twin with the same noise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: the kernels cannot run")

import triton
import triton.language as tl

from latent_santa.growth import with_room
from latent_santa.kernels import Workspace, reason_not
from latent_santa.kernels.launch import launches_of
from latent_santa.kernels.parents import parents_at
from latent_santa.kernels.support import interpreting
from latent_santa.parent_records import summarised
from latent_santa.parents import contiguous_parents
from latent_santa.rows import Rows
from latent_santa.sampling import select
from latent_santa.step import DecodeStep, Sampling, Suffix
from latent_santa.teams import join_teams
from latent_santa.two_stage import select_teams

from .cases import frozen_teams
from .kernel_cases import ROUNDING, SMALL, check, compare, kernels, make_step, poison, poisoned, twin

if not interpreting():
    pytest.skip("tests/gpu runs the kernels on the GPU", allow_module_level=True)

KINDS = [("per_head", "independent"), ("pooled", "independent"), ("per_head", "shared"), ("pooled", "shared")]
SUMMARIES = ["mean", "isotropic", "diagonal"]


@pytest.mark.parametrize(("estimator", "noise"), KINDS)
def test_both_stages_select_what_the_twin_selects(estimator: str, noise: str) -> None:
    """And give its output, twice over with the same bits."""
    step = make_step(heads=3, lengths=(90,), dtype=torch.float16, parent_size=8, representatives=3, summary="mean")
    sampling = Sampling(3, estimator, noise, 4)
    workspace = poisoned(step, 3, SMALL, estimator, noise, 4)
    got = kernels(step, 3, workspace, estimator, noise, 4)
    compare(got, twin(step, 3, estimator, noise, 4), ROUNDING)
    (held,) = workspace._buffers.values()
    parents, count, teams = step.teams.parents, step.teams.parents.C, step.teams.M
    gumbels = step.draw.parent_gumbels(1, 3, count, sampling.shared)
    first = select(parents.routing_scores(step.query, step.scale), gumbels, 4, "per_head", sampling.shared)
    bits = held.parent_flags[0, 0, :count, None] >> torch.arange(3) & 1
    assert torch.equal(bits.T.bool(), first.log_correction[0, 0] < torch.inf)
    log_c = select_teams(step, sampling).log_correction[0, 0]
    if estimator == "per_head":
        used, found = (held.flags[0, 0, :teams, None] >> torch.arange(3) & 1).T.bool(), held.corrections[0, :teams].T
    else:
        used, found = (held.flags[0, :, :teams] != 0), held.pooled[:, :teams]
    assert torch.equal(used, log_c < torch.inf)
    torch.testing.assert_close(found[used], log_c[used], rtol=1e-4, atol=2e-5)
    poison(workspace)
    again = kernels(step, 3, workspace, estimator, noise, 4)
    assert torch.equal(got.out, again.out) and torch.equal(got.lse, again.lse)


@pytest.mark.parametrize("summary", SUMMARIES[1:])
def test_spreads_of_one_key_part_and_of_two(summary: str) -> None:
    check(make_step(heads=2, lengths=(60,), dims=(20, 8), parent_size=8, summary=summary), 3, parents=2)
    step = make_step(
        "gqa", heads=2, groups=2, lengths=(60,), dims=(24,), values=20, dtype=torch.float16, summary=summary
    )
    check(step, 2, "pooled", parents=2)


@pytest.mark.parametrize(
    ("k1", "k", "estimator"),
    [(1, 1, "pooled"), (5, 3, "per_head"), (6, 100, "pooled"), (4, 6, "per_head"), (2, 40, "per_head")],
)
def test_budgets_around_the_numbers_of_parents_and_teams(k1: int, k: int, estimator: str) -> None:
    """9 and 5 parents of up to 4 teams: K1 below and at both, K2 below, between and above theirs."""
    step = make_step("gqa", heads=2, lengths=(36, 18), dims=(16,), dtype=torch.float16, parent_size=4, summary="mean")
    assert sorted(step.teams.parents.count[:, 0].tolist()) == [5, 9]
    check(step, k, estimator, parents=k1, shares=2)


def test_room_behind_the_records_changes_no_bit() -> None:
    """Room for later parents (:mod:`latent_santa.growth`) is padding, of teams and of parents."""
    step = make_step(
        heads=2, lengths=(28, 20), dims=(16, 16), parent_size=4, representatives=2, summary="isotropic", spare=0
    )
    roomy = replace(step, teams=with_room(step.teams, 3, 4, 2))
    assert roomy.teams.parents.C == step.teams.parents.C + 3 and roomy.teams.length > step.rows.length
    ours, theirs = (kernels(each, 3, Workspace(SMALL), "pooled", parents=2) for each in (roomy, step))
    compare(ours, theirs, 0)


@pytest.mark.parametrize("representatives", [1, 20])
def test_parents_of_one_team_and_of_more_than_a_block(representatives: int) -> None:
    step = make_step(
        "gqa", heads=2, lengths=(120,), dims=(16,), dtype=torch.float16, parent_size=24,
        representatives=representatives, summary="mean",
    )  # fmt: skip
    check(step, 5, "pooled", parents=2)


def test_more_heads_than_a_word_has_bits() -> None:
    step = make_step(
        heads=33, lengths=(12,), dims=(16, 16), suffix=1, dtype=torch.float16, parent_size=4, representatives=2,
        summary="mean",
    )  # fmt: skip
    check(step, 1, "pooled", parents=1, route_heads=64, attend_heads=32, shares=1, combine_values=64)


def test_queries_in_the_rows_dtype() -> None:
    step = make_step(
        heads=2, lengths=(50,), dtype=torch.float16, query_dtype=torch.float16, parent_size=8, summary="diagonal"
    )
    workspace = poisoned(step, 3, SMALL, parents=3)
    compare(kernels(step, 3, workspace, parents=3), twin(step, 3, parents=3), 2e-3)


@pytest.mark.parametrize("routing_dtype", ["int8", "int4"])
def test_coded_means_and_representatives(routing_dtype: str) -> None:
    step = make_step(
        heads=1, lengths=(60,), dims=(64, 32), routing_dtype=routing_dtype, dtype=torch.float16, parent_size=8,
        summary="mean",
    )  # fmt: skip
    check(step, 3, parents=3)


@pytest.mark.parametrize("summary", SUMMARIES[1:])
def test_parents_of_several_turns(summary: str) -> None:
    step = make_step("gqa", heads=1, groups=2, lengths=(40, 20), dims=(32,), suffix=28, dtype=torch.float16)
    rows = Rows((step.rows.keys[0][:, :, :64],), step.rows.values[:, :, :64])

    def turn(member: torch.Tensor) -> object:
        parents = contiguous_parents(member, 8).expand(-1, 2, -1)
        teams = frozen_teams(rows, rows.keys[0].float(), parents, 3)
        return replace(teams, parents=summarised(teams, parents, rows, summary))

    place = torch.arange(64)
    real = place >= 40 - torch.tensor([40, 20])[:, None]
    teams = join_teams(turn(real & (place < 40)), turn((place >= 40).expand(2, -1)))
    check(replace(step, teams=teams, suffix=Suffix(torch.arange(64, 68))), 3, "pooled", parents=3)


def test_a_sequence_that_is_all_padding_gets_zeros() -> None:
    step = make_step(
        "gqa", heads=2, lengths=(33, 1), dims=(16,), suffix=0, dtype=torch.float16, parent_size=4, summary="mean"
    )
    parents = step.teams.parents
    for part in (step.teams.count, step.teams.sizes, parents.count, parents.sizes):
        part[1] = 0
    step.teams.team_of_row[1], parents.of_team[1] = -1, -1
    got = kernels(step, 2, poisoned(step, 2, SMALL, "pooled", parents=3), "pooled", parents=3)
    want = twin(step, 2, "pooled", parents=3)
    assert not want.out[1].any() and torch.equal(got.out[1], want.out[1]) and torch.equal(got.lse[1], want.lse[1])
    assert got.routing.tolist() == want.routing.tolist() and got.routing[1].item() == 0
    torch.testing.assert_close(got.out[0], want.out[0], rtol=ROUNDING, atol=ROUNDING)


def reserved(step: DecodeStep, teams: int, parents: int, rows: int) -> DecodeStep:
    """The step with records that have room for more teams, parents and rows, as padding."""
    pad = torch.nn.functional.pad
    had, held = step.teams, step.teams.parents
    more, most = teams - had.M, parents - held.C

    def keys(parts: tuple, by: int) -> tuple:
        return tuple(replace(part, codes=pad(part.codes, (0, 0, 0, by), value=float("nan"))) for part in parts)

    records = replace(
        held,
        sizes=pad(held.sizes, (0, most)),
        of_team=pad(held.of_team, (0, more), value=-1),
        keys=keys(held.keys, most),
    )
    wider = replace(
        had, sizes=pad(had.sizes, (0, more)), team_of_row=pad(had.team_of_row, (0, rows - had.length), value=-1),
        representative=pad(had.representative, (0, more), value=-1), routing_keys=keys(had.routing_keys, more),
        parents=records,
    )  # fmt: skip
    return replace(step, teams=wider)


def test_records_with_room_and_a_suffix_that_is_mostly_hidden() -> None:
    """What a captured graph has: capacities, and reserved suffix rows of which a mask says which are real."""
    step = make_step(
        "gqa", heads=2, lengths=(60, 40), dims=(16,), suffix=40, hidden=33, dtype=torch.float16, parent_size=8,
        summary="mean",
    )  # fmt: skip
    wide = reserved(step, 90, 40, 90)
    got = kernels(wide, 3, poisoned(wide, 3, SMALL, parents=4), parents=4)
    compare(got, twin(step, 3, parents=4), ROUNDING)


@triton.jit
def parents_kernel(union, out, words, first, PT: tl.constexpr, LANES: tl.constexpr):
    i_rank = first + tl.arange(0, PT)
    i_parent, total = parents_at(union, words, i_rank, LANES=LANES)
    tl.store(out + i_rank, tl.where(i_rank < total, i_parent, -1))


def test_parents_are_found_by_their_rank() -> None:
    """In more words than are looked at in one go, with words that are empty or full."""
    parents = torch.randperm(352, generator=torch.Generator().manual_seed(4))[:60]
    chosen = torch.zeros(11, 32, dtype=torch.int64)
    chosen.view(-1)[parents] = 1
    chosen[2:5], chosen[6] = 0, 1
    words = (chosen << torch.arange(32)).sum(1)
    union = torch.where(words >= 2**31, words - 2**32, words).int()
    out = torch.full((96,), -7, dtype=torch.int32)
    for first in (0, 32, 64):
        parents_kernel[(1,)](union, out, 11, first, PT=32, LANES=4)
    want = chosen.view(-1).nonzero()[:, 0].tolist()
    assert out.tolist() == want + [-1] * (96 - len(want))


def test_launches() -> None:
    step = make_step("gqa", heads=2, lengths=(60,), dims=(16,), dtype=torch.float16, parent_size=8, summary="mean")

    def names(estimator: str, parents: int | None) -> list[str]:
        return list(launches_of(step, Sampling(2, estimator, parents=parents), Workspace(SMALL)).routing())

    assert names("per_head", 3) == ["route parents", "select parents", "route", "select"]
    assert names("pooled", 3) == ["route parents", "select parents", "route", "select", "pool"]
    # all parents sampled for certain: one stage
    assert names("per_head", 8) == names("per_head", None) == ["route", "select"]


def test_refusals() -> None:
    step = make_step("gqa", heads=2, lengths=(60,), dims=(16,), dtype=torch.float16, summary="diagonal")
    parents = step.teams.parents

    def reason(**changed: object) -> str:
        teams = replace(step.teams, parents=replace(parents, **changed))
        return str(reason_not(replace(step, teams=teams), Sampling(2, parents=2)))

    assert reason() == "None"
    assert "parents' spread 0 must be contiguous torch.float16, and is torch.float32" in reason(
        spread=(parents.spread[0].float(),)
    )
    double = replace(parents.keys[0], codes=parents.keys[0].codes.double())
    assert "parents' key part 0 must be contiguous torch.float16" in reason(keys=(double,))
    bare = replace(step, teams=replace(step.teams, parents=None))
    assert "these teams carry none" in str(reason_not(bare, Sampling(2, parents=2)))


def test_a_number_of_parents_whose_words_are_no_power_of_two() -> None:
    step = make_step("gqa", heads=2, lengths=(900,), dims=(16,), dtype=torch.float16, parent_size=3, summary="mean")
    assert step.teams is not None and step.teams.parents is not None and step.teams.parents.C == 300
    check(step, 5, parents=7)
