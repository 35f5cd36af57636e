"""The two selections on scores made up for them: the same teams, thresholds and corrections, whatever the ties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: the kernels cannot run")

from latent_santa.kernels.select import TEAMS, select_kernel
from latent_santa.kernels.select_many import select_many_kernel
from latent_santa.kernels.support import interpreting
from latent_santa.noise import noise_keys

from .kernel_cases import check, make_step

if not interpreting():
    pytest.skip("tests/gpu runs the kernels on the GPU", allow_module_level=True)


def selected(kernel: Any, scores: Tensor, k: int, **sizes: int) -> tuple[Tensor, ...]:
    """Flags, tau, the K-th score, and the flagged teams' corrections of one head."""
    places = -(-len(scores) // 128) * 128
    noisy = torch.full((places,), torch.nan)
    noisy[: len(scores)] = scores
    padded = torch.full((places,), -torch.inf)
    padded[: len(scores)] = scores
    flags, corrections = torch.zeros(1, places, dtype=torch.int32), torch.full((1, places), torch.nan)
    tau, kth = torch.full((1,), torch.nan), torch.full((1,), torch.nan)
    none = torch.zeros(1, dtype=torch.int32)
    kernel[(1, 1)](
        tops=padded.view(-1, 8).amax(1), noisy=noisy, flags=flags, union=none, corrections=corrections,
        count=torch.tensor([len(scores)], dtype=torch.int32), key=noise_keys(1, [0], "cpu"), step=torch.tensor([9]),
        listed_teams=none, listed_parents=none, parent_log_c=none, of_team=none, first_team=none, team_flags=none,
        blocks=torch.full((places // 8,), 10**6, dtype=torch.int32),
        found=torch.full((128,), 10**12, dtype=torch.int64), tau=tau, kth=kth, layer=2, quad=0, K=k, PLACES=places,
        MP=places, CP=0, TEAMS=0, TEAMS_PADDED=0, G=1, H=1, WORDS=1, ROOM=128, BLOCK=8, OF=TEAMS, POOLED=False,
        SHARED=False, PREPARE=512, PDL=False, **sizes,
    )  # fmt: skip
    used = flags[0].nonzero()[:, 0]
    return used, tau, kth, corrections[0, used]


def crowds(kind: str, count: int) -> Tensor:
    """Scores of a kind that a search could trip over."""
    scores = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 3
    if kind == "equal":
        return torch.full((count,), 5000.0)
    if kind == "pairs":
        return scores[: count // 2].repeat(2)[torch.arange(2 * (count // 2)) * 7 % (2 * (count // 2))]
    if kind == "close":
        return 1000 + scores.sign() * 2.0**-13  # neighbours in float32
    if kind == "far":
        scores[::5] = -torch.inf
        scores[1] = torch.inf
    if kind == "few":
        scores[3:] = -torch.inf
    return scores


@pytest.mark.parametrize("kind", ["plain", "equal", "pairs", "close", "far", "few"])
@pytest.mark.parametrize("k", [1, 5, 40])
def test_selections_by_ranks_and_by_digits_agree(kind: str, k: int) -> None:
    scores = crowds(kind, 150 if kind != "few" else 45)
    want = selected(select_kernel, scores, k, NT=32, COARSE=0, NB=32)
    got = selected(select_many_kernel, scores, k, LANES=16)
    for one, two in zip(got, want, strict=True):
        assert torch.equal(one, two)
    expected = scores.sort(descending=True, stable=True)
    assert got[0].tolist() == sorted(expected.indices[:k][expected.values[:k] > -torch.inf].tolist())
    assert got[1] == expected.values[k]


@pytest.mark.parametrize(("estimator", "parents"), [("per_head", None), ("pooled", 350)])
def test_budgets_beyond_what_is_ranked(estimator: str, parents: int | None) -> None:
    """K = 345, in one stage and as K1 and K2 of two."""
    step = make_step(
        "gqa", heads=1, lengths=(720,), dims=(16,), suffix=0, parent_size=2, representatives=2, dtype=torch.float16,
        summary="mean",
    )  # fmt: skip
    check(step, 345, estimator, parents=parents, shares=2, lanes=512, attend_rows=64, route_teams=64, select_lanes=256)


def test_a_rotary_part_of_160() -> None:
    check(make_step(heads=2, lengths=(40,), dims=(32, 160), dtype=torch.float16), 3)
