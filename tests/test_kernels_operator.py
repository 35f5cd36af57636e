"""The kernels in Triton's interpreter against their PyTorch twin and against the float64 reference."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: the kernels cannot run")

from latent_santa.growth import with_room
from latent_santa.kernels import Workspace, launch, reason_not, sampled_attention, unavailable
from latent_santa.kernels.plan import Shapes, attend_bytes, candidate_blocks, candidates, choose, route_bytes
from latent_santa.kernels.select import TEAMS, select_kernel
from latent_santa.kernels.support import LEAST_TRITON, interpreting
from latent_santa.kernels.workspace import MOST_PLANS
from latent_santa.noise import gumbel_noise, noise_keys
from latent_santa.parents import contiguous_parents
from latent_santa.peers import Peers
from latent_santa.routing_keys import CodedKeys, quantise, quantise_parts
from latent_santa.rows import Rows
from latent_santa.sampling import log_inclusion
from latent_santa.step import DecodeStep, Sampling, Suffix
from latent_santa.teams import join_teams

from .cases import frozen_teams, make_case
from .kernel_cases import ROUNDING, SMALL, check, compare, kernels, make_step, poison, poisoned, twin

if not interpreting():
    pytest.skip("tests/gpu runs the kernels on the GPU", allow_module_level=True)

KINDS = [("per_head", "independent"), ("pooled", "independent"), ("per_head", "shared"), ("pooled", "shared")]


@pytest.mark.parametrize(("estimator", "noise"), KINDS)
def test_mla(estimator: str, noise: str) -> None:
    check(make_step(heads=6, lengths=(70, 33), hidden=2, dtype=torch.float16), 3, estimator, noise)


@pytest.mark.parametrize(("estimator", "noise"), KINDS)
def test_gqa(estimator: str, noise: str) -> None:
    step = make_step("gqa", heads=3, groups=2, lengths=(50,), dims=(24,), values=20, dtype=torch.float16)
    check(step, 2, estimator, noise)


@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
@pytest.mark.parametrize("heads", [3, 18])
def test_rows_listed_by_runs_are_those_listed_one_by_one(heads: int, estimator: str) -> None:
    """Bit for bit, over several looks per share; the plan does it where rows are many and few of them are selected."""
    step = make_step("gqa", heads=heads, groups=2, lengths=(333, 200), dims=(16,), suffix=3, dtype=torch.float16)
    outs = []
    for by_runs in (False, True):
        workspace = poisoned(step, 4, SMALL | {"by_runs": by_runs}, estimator)
        outs.append(kernels(step, 4, workspace, estimator))
    assert torch.equal(outs[0].out, outs[1].out) and torch.equal(outs[0].union, outs[1].union)
    long = Shapes(
        batch=8, groups=4, heads=7, prompt=131072, suffix=64, teams=32768, dims=(128,), values=128, latent=False,
        dtype=torch.bfloat16, split=False, bits=16, teams_per_head=32, most_rows=4000, processors=132,
        shared_memory=227 << 10,
    )  # fmt: skip
    assert choose(long).by_runs and not choose(long._replace(most_rows=40000)).by_runs
    assert not choose(long._replace(prompt=4096)).by_runs


@pytest.mark.parametrize("noise", ["independent", "shared"])
def test_heads_and_groups_are_numbered_in_the_whole_model(noise: str) -> None:
    step = make_step("gqa", heads=3, groups=2, lengths=(50,), dims=(24,), dtype=torch.float16)
    spread = replace(step, draw=replace(step.draw, first=(2, 4)))
    check(spread, 2, "per_head", noise)
    moved, here = (kernels(each, 2, Workspace(SMALL), noise=noise).out for each in (spread, step))
    assert not torch.allclose(moved, here)  # the numbers are read


def test_float32_rows_and_one_head() -> None:
    check(make_step(heads=1, lengths=(40,), dims=(20, 8)), 4)


def test_queries_in_the_rows_dtype() -> None:
    step = make_step(heads=2, lengths=(40,), dtype=torch.float16, query_dtype=torch.float16)
    workspace = Workspace(SMALL)
    # scores are exact products, weights are rounded to the rows' dtype
    compare(kernels(step, 3, workspace), twin(step, 3), 2e-3)


@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
def test_more_heads_than_a_word_has_bits(estimator: str) -> None:
    step = make_step(heads=35, lengths=(20,), dims=(16, 16), suffix=1, dtype=torch.float16)
    check(step, 1, estimator, route_heads=64, attend_heads=32, shares=1)


@pytest.mark.parametrize("k", [1, 6, 9, 500])
def test_budgets_around_the_number_of_teams(k: int) -> None:
    """One sequence has 9 teams of rows, the other 5: K below, between, at and above."""
    step = make_step("gqa", heads=2, lengths=(33, 17), dims=(16,), dtype=torch.float16)
    assert sorted(step.teams.count[:, 0].tolist()) == [5, 9]
    check(step, k, "pooled" if k == 6 else "per_head", shares=2)


@pytest.mark.parametrize("shares", [1, 2, 8, 16, 33])
def test_shares_some_of_them_empty(shares: int) -> None:
    step = make_step("gqa", heads=2, lengths=(60,), dims=(16,), suffix=3, dtype=torch.float16)
    check(step, 2, shares=shares, combine_shares=8)


def test_a_crowd_of_large_scores_is_searched() -> None:
    """Large scores that share coarse maxima make the bound let more through than there is room for."""
    step = make_step(
        "gqa", heads=1, lengths=(5120,), dims=(16,), suffix=0, parent_size=1, representatives=1, dtype=torch.float16
    )
    # 160 teams in the twenty blocks of 8 whose maxima are under one of the 32 coarse maxima
    crowd = step.teams.routing_keys[0].codes.view(1, 1, 20, 256, 16)[:, :, :, :8]
    crowd[:] = step.query[0].half()[:, :, :1, None] * 4
    workspace = Workspace({**SMALL, "route_teams": 128, "block": 8, "coarse": 32})
    compare(kernels(step, 2, workspace), twin(step, 2), ROUNDING)
    (held,) = workspace._buffers.values()
    tops = torch.full((1024,), -torch.inf)
    tops[: 5120 // 8] = held.tops[0, 0, : 5120 // 8]
    bound = tops.view(-1, 32).amax(0).sort(descending=True).values[2]
    assert int((held.noisy[0, 0, :5120] >= bound).sum()) > held.found.shape[-1] == 128


def test_one_workspace_serves_every_budget() -> None:
    """Budgets that differ in one buffer's size only must not share that buffer."""
    step = make_step(
        "gqa", heads=2, lengths=(260, 180), dims=(16,), parent_size=2, representatives=2, dtype=torch.float16
    )
    workspace = Workspace(SMALL)
    for k in (5, 32, 64, 5, 100, 32):
        compare(kernels(step, k, workspace), twin(step, k), ROUNDING)
    held = {buffers.blocks.shape[-1] for buffers in workspace._buffers.values()}
    assert held >= {candidate_blocks(k) for k in (5, 32, 64, 100)}
    assert candidates(32) == candidates(64) and candidate_blocks(32) < candidate_blocks(64)


def test_many_teams_a_head() -> None:
    step = make_step(
        "gqa", heads=1, lengths=(560,), dims=(16,), suffix=0, parent_size=2, representatives=2, dtype=torch.float16
    )
    check(step, 130, shares=2, lanes=512, attend_rows=64)


@pytest.mark.parametrize(("routing_dtype", "dims"), [("int8", (64, 16)), ("int4", (64, 32)), ("int4", (48, 16))])
def test_quantised_routing_keys(routing_dtype: str, dims: tuple[int, int]) -> None:
    check(make_step(heads=2, lengths=(60,), dims=dims, routing_dtype=routing_dtype, dtype=torch.float16), 3)


@pytest.mark.parametrize("routing_dtype", ["model", "int8", "int4"])
def test_teams_of_several_turns(routing_dtype: str) -> None:
    """Joined records are views with spare places between the sequences and groups."""
    step = make_step("gqa", heads=2, groups=2, lengths=(60, 40), dims=(32,), suffix=24, dtype=torch.float16)
    rows = Rows((step.rows.keys[0][:, :, :80],), step.rows.values[:, :, :80])
    turn = (torch.arange(80) >= 60).expand(2, -1)
    second = frozen_teams(rows, rows.keys[0].float(), contiguous_parents(turn, 16).expand(-1, 2, -1), 4)
    first, second = (
        replace(t, routing_keys=quantise_parts(t.routing_keys, routing_dtype, t.sizes > 0))
        for t in (step.teams, second)
    )
    check(replace(step, teams=join_teams(first, second), suffix=Suffix(torch.arange(80, 84))), 3)


@pytest.mark.parametrize(("estimator", "dtype"), [("per_head", "model"), ("pooled", "int4")])
def test_room_behind_the_records_changes_no_bit(estimator: str, dtype: str) -> None:
    step = make_step(heads=2, lengths=(24,), dims=(16, 16), parent_size=4, representatives=2, routing_dtype=dtype)
    roomy = replace(step, teams=with_room(step.teams, 4, 4, 2))
    assert roomy.teams.M > step.teams.M and roomy.teams.length > step.rows.length
    ours, theirs = (kernels(each, 3, Workspace(SMALL), estimator) for each in (roomy, step))
    assert ours.out.equal(theirs.out) and ours.lse.equal(theirs.lse)


def test_a_sequence_that_is_all_padding_gets_zeros() -> None:
    step = make_step("gqa", heads=2, lengths=(33, 1), dims=(16,), suffix=0, dtype=torch.float16)
    for part in (step.teams.count, step.teams.sizes):
        part[1] = 0
    step.teams.team_of_row[1] = -1
    for k in (2, 500):
        got, want = kernels(step, k, poisoned(step, k, SMALL)), twin(step, k)
        assert not want.out[1].any() and torch.equal(got.out[1], want.out[1]) and torch.equal(got.lse[1], want.lse[1])
        torch.testing.assert_close(got.out[0], want.out[0], rtol=ROUNDING, atol=ROUNDING)


# one head that selects among 128 teams in one stage
ALONE: dict[str, Any] = {
    **dict.fromkeys(("union", "listed_teams", "listed_parents", "parent_log_c"), torch.zeros(1, dtype=torch.int32)),
    **dict.fromkeys(("of_team", "first_team", "team_flags"), torch.zeros(1, dtype=torch.int32)),
    "PLACES": 128, "MP": 128, "CP": 0, "TEAMS": 0, "TEAMS_PADDED": 0, "G": 1, "H": 1, "WORDS": 1, "BLOCK": 8, "NT": 16,
    "OF": TEAMS, "POOLED": False, "SHARED": False, "PREPARE": 512, "PDL": False,
}  # fmt: skip
ODD = float(torch.nextafter(torch.tensor(1000.0), torch.tensor(2000.0)))


@pytest.mark.parametrize(
    ("places", "score", "want"),
    [([77], torch.inf, [77, 126, 127]), (range(1, 128, 3), torch.inf, [1, 4, 7]), (range(1, 128, 3), ODD, [1, 4, 7])],
)
def test_crowds_at_the_maximum_stay_within_the_scratch(places: Sequence[int], score: float, want: list[int]) -> None:
    """The bound must get past the middle that rounds down to it, and below infinity there is no middle."""
    scores = torch.arange(128.0)
    scores[list(places)] = score
    flags, corrections = torch.zeros(1, 128, dtype=torch.int32), torch.zeros(1, 128)
    blocks, found = torch.full((64,), -7, dtype=torch.int32), torch.full((64,), -7, dtype=torch.int64)
    threshold = torch.zeros(2)
    select_kernel[(1, 1)](
        tops=scores.view(16, 8).amax(1), noisy=scores, flags=flags, corrections=corrections,
        count=torch.tensor([128], dtype=torch.int32), key=noise_keys(1, [0], "cpu"), step=torch.tensor([9]),
        blocks=blocks, found=found, tau=threshold[:1], kth=threshold[1:], layer=2, quad=0, K=3, **ALONE,
        NB=8, ROOM=8, COARSE=0,
    )  # fmt: skip
    assert bool((blocks[8:] == -7).all()) and bool((found[8:] == -7).all())
    assert flags[0].nonzero()[:, 0].tolist() == want


@pytest.mark.parametrize("coarse", [0, 16])
def test_equal_scores_select_the_lower_teams_and_exactly_k(coarse: int) -> None:
    """phi makes up for the noise, so that every noisy score is 5000 and more blocks tie than there is room for."""
    teams, k = 100, 3
    key, step = noise_keys(1, [0], "cpu"), torch.tensor([9])
    noise = gumbel_noise(key, step, 2, 1, 1, 128, False)[0, 0]
    phi = 5000 - noise
    assert bool((phi + noise == 5000).all())
    flags, corrections = torch.zeros(1, 128, dtype=torch.int32), torch.full((1, 128), torch.nan)
    tau, kth = torch.full((1,), torch.nan), torch.full((1,), torch.nan)
    select_kernel[(1, 1)](
        tops=torch.full((16,), 5000.0), noisy=torch.full((128,), 5000.0), flags=flags, corrections=corrections,
        count=torch.tensor([teams], dtype=torch.int32), key=key, step=step,
        blocks=torch.full((8,), 10**6, dtype=torch.int32), found=torch.full((16,), 10**12, dtype=torch.int64), tau=tau,
        kth=kth, layer=2, quad=0, K=k, **ALONE, NB=8, ROOM=16, COARSE=coarse,
    )  # fmt: skip
    assert flags[0].nonzero()[:, 0].tolist() == [0, 1, 2] and tau.item() == kth.item() == 5000
    want = log_inclusion(phi[0, :k] - 5000)
    torch.testing.assert_close(corrections[0, :k], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
@pytest.mark.parametrize("layout", ["mla", "gqa"])
def test_the_float64_reference(layout: str, estimator: str) -> None:
    case = make_case(layout, heads=2, groups=1, lengths=(21, 13), suffix=3, hidden=((1, 0),), dtype=torch.float32)
    workspace = Workspace({**SMALL, "shares": 2})
    got = sampled_attention(case.step, Sampling(3, estimator), workspace)
    for b in range(2):
        want = case.reference(b, 0, 3, estimator)
        np.testing.assert_allclose(got.out[b, 0].numpy(), want.outputs, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got.lse[b, 0].numpy(), want.lse, rtol=1e-5, atol=1e-5)
        counts = want.counts
        for name in ("routing", "union", "suffix"):
            assert int(getattr(got, name)[b, 0]) == getattr(counts, name), name


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks shrink until they fit, and a step with the smallest ones is as right as any."""
    shapes = Shapes(
        batch=1, groups=1, heads=128, prompt=9000, suffix=0, teams=2000, dims=(512, 64), values=512,
        latent=True, dtype=torch.bfloat16, split=True, bits=16, teams_per_head=8, most_rows=9000, processors=132,
        shared_memory=227 << 10,
    )  # fmt: skip
    wide, narrow = choose(shapes), choose(shapes._replace(shared_memory=99 << 10))
    assert route_bytes(shapes, wide) <= 227 << 10 and attend_bytes(shapes, wide) <= 227 << 10
    assert route_bytes(shapes, narrow) <= 99 << 10 and attend_bytes(shapes, narrow) <= 99 << 10
    assert narrow != wide
    monkeypatch.setattr(launch, "shared_memory", lambda device: 1)
    step = make_step(heads=17, lengths=(20,), dims=(16, 16), suffix=1, dtype=torch.float16)
    workspace = Workspace({"shares": 1})
    compare(kernels(step, 1, workspace), twin(step, 1), ROUNDING)
    ((plan, _),) = workspace._plans.values()
    assert (plan.route_stages, plan.route_heads, plan.attend_rows, plan.attend_heads) == (2, 16, 16, 16)


def test_step_key_and_suffix_are_read_on_each_call() -> None:
    step = make_step("gqa", heads=2, lengths=(60,), dims=(16,), dtype=torch.float16)
    workspace = Workspace(SMALL)
    first = kernels(step, 2, workspace).out.clone()
    step.draw.step.add_(1)
    second = kernels(step, 2, workspace)
    compare(second, twin(step, 2), ROUNDING)
    poison(workspace)
    assert torch.equal(second.out, kernels(step, 2, workspace).out)
    assert not torch.allclose(first, second.out)
    # a suffix that grows by a few rows needs no new scratch memory
    assert len(workspace._buffers) == 1
    shorter = replace(step, suffix=Suffix(step.suffix.index[:2]))
    compare(kernels(shorter, 2, workspace), twin(shorter, 2), ROUNDING)
    assert len(workspace._buffers) == len(workspace._plans) == 1


def test_threads_on_one_stream_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that comes in the middle of another's step finds their common scratch taken."""
    steps = [make_step("gqa", heads=2, lengths=(60,), dims=(16,), dtype=torch.float16, seed=seed) for seed in (0, 1)]
    workspace = Workspace(SMALL)
    outputs: dict[int, Any] = {}

    def run(number: int) -> None:
        outputs[number] = kernels(steps[number], 2, workspace)

    other = threading.Thread(target=run, args=(1,))
    select = launch.Launches.select

    def interrupted(self: launch.Launches) -> None:
        if self.query[0] is steps[0].query[0]:
            other.start()
            other.join(0.5)
        select(self)

    monkeypatch.setattr(launch.Launches, "select", interrupted)
    run(0)
    other.join()
    for number, step in enumerate(steps):
        compare(outputs[number], twin(step, 2), ROUNDING)


def test_launches_are_made_on_the_rows_device(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[torch.device] = []
    launched: list[list[torch.device]] = []

    @contextmanager
    def current(device: torch.device) -> Any:
        inside.append(device)
        yield
        inside.pop()

    monkeypatch.setattr(launch, "current", current)
    for name in ("route", "select", "pool", "attend", "combine"):
        original = getattr(launch.Launches, name)
        monkeypatch.setattr(launch.Launches, name, lambda self, f=original: (launched.append(list(inside)), f(self))[1])
    step = make_step("gqa", heads=2, lengths=(60,), dims=(16,), dtype=torch.float16)
    kernels(step, 2, Workspace(SMALL), "pooled")
    assert launched == [[torch.device("cpu")]] * 5 and not inside


def test_scratch_that_was_used_least_recently_goes_first() -> None:
    steps = [make_step("gqa", heads=2, lengths=(n,), dims=(16,), dtype=torch.float16) for n in (60, 600, 1200)]
    workspace = Workspace(SMALL)
    for step in steps[:2]:
        kernels(step, 2, workspace)
    small, middle = workspace._buffers
    # as if a CUDA graph had been captured with it
    workspace._captured.add(small)
    workspace.limit_bytes = workspace.bytes()
    compare(kernels(steps[2], 2, workspace), twin(steps[2], 2), ROUNDING)
    assert small in workspace._buffers and middle not in workspace._buffers and len(workspace._buffers) == 2
    workspace._captured.clear()
    workspace.limit_bytes = 0
    compare(kernels(steps[1], 2, workspace), twin(steps[1], 2), ROUNDING)
    assert list(workspace._buffers) == [middle]


def test_plans_of_many_shapes_do_not_pile_up() -> None:
    step = make_step("gqa", heads=2, lengths=(20,), dims=(16,), dtype=torch.float16)
    workspace = Workspace(SMALL)
    kernels(step, 2, workspace)
    (shapes,) = workspace._plans
    for most in range(2 * MOST_PLANS):
        workspace._planned(shapes._replace(most_rows=most))
    assert len(workspace._plans) <= MOST_PLANS


def test_outputs_are_float32_under_any_default_dtype() -> None:
    step = make_step("gqa", heads=2, lengths=(20,), dims=(16,), dtype=torch.float16)
    want = twin(step, 2)
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = kernels(step, 2, Workspace(SMALL))
    finally:
        torch.set_default_dtype(torch.float32)
    compare(got, want, ROUNDING)


def reason(step: DecodeStep, k: int = 1) -> str:
    return str(reason_not(step, Sampling(k)))


def test_refusals_say_what_and_why() -> None:
    step = make_step("gqa", heads=2, lengths=(20,), dims=(16,), dtype=torch.float16)
    assert reason_not(step, Sampling(1)) is None
    brain = make_step("gqa", heads=2, lengths=(20,), dims=(16,), dtype=torch.bfloat16)
    assert "interpreter" in reason(brain)
    wide = make_step("gqa", heads=2, lengths=(20,), dims=(520,), dtype=torch.float16)
    assert "520 dimensions" in reason(wide)
    with pytest.raises(RuntimeError, match="520 dimensions"):
        kernels(wide, 2, Workspace(SMALL))
    short = Rows((step.rows.keys[0][:, :, :10],), step.rows.values[:, :, :10])
    assert "cache holds 10" in reason(replace(step, rows=short))
    assert "no teams" in reason(replace(step, teams=None))
    assert "from number 2 on" in reason(replace(step, draw=replace(step.draw, first=(0, 2))))
    assert "whole quads" in reason(replace(step, peers=Peers(None, 0, 2)))  # the other process says it too
    pair = make_step(heads=2, lengths=(20,), dims=(48, 16), dtype=torch.float16)
    assert pair.teams is not None
    latents, rotary = pair.teams.routing_keys
    for bits, words in ((4, "24 dimensions"), (8, "2 scales: the kernels need one")):
        parts = (CodedKeys.of(latents.codes, bits, 24), quantise(rotary.codes, f"int{bits}"))
        assert words in reason(replace(pair, teams=replace(pair.teams, routing_keys=parts)))
    mixed = replace(pair.teams, routing_keys=(quantise(latents.codes, "int8"), rotary))
    assert "several formats" in reason(replace(pair, teams=mixed))


def test_triton_missing_or_too_old_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is too old is what pyproject.toml says."""
    import triton

    cpu = torch.device("cpu")
    assert unavailable(cpu) is None
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    assert "triton 3.5.1 is installed, the kernels need 3.6: pip install 'latent-santa[gpu]'" == unavailable(cpu)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "triton is not installed: pip install 'latent-santa[gpu]'" == unavailable(cpu)
    asked = [line for line in metadata.requires("latent-santa") or () if line.startswith("triton")]
    assert asked and all(f">={'.'.join(map(str, LEAST_TRITON))}" in line for line in asked)
