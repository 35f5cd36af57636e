"""Teams, suffixes and caches of unusual sizes and strides, in Triton's interpreter against the PyTorch twin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: the kernels cannot run")

from latent_santa.kernels import Workspace
from latent_santa.kernels.support import interpreting
from latent_santa.rows import Rows
from latent_santa.step import Suffix

from .kernel_cases import check, kernels, make_step

if not interpreting():
    pytest.skip("tests/gpu runs the kernels on the GPU", allow_module_level=True)


def test_one_team_and_no_suffix() -> None:
    step = make_step("gqa", heads=2, lengths=(9,), dims=(16,), suffix=0, representatives=1, dtype=torch.float16)
    assert step.teams.M == 1
    check(step, 1, shares=1)


def test_large_teams_and_small() -> None:
    step = make_step(
        "gqa", heads=2, lengths=(130,), dims=(16,), parent_size=100, representatives=2, dtype=torch.float16
    )
    assert int(step.teams.sizes.max()) > 32 > 16 > int(step.teams.sizes[step.teams.sizes > 0].min())
    check(step, 1, shares=2)


def test_teams_of_hundreds() -> None:
    step = make_step(
        "gqa", heads=2, lengths=(650,), dims=(16,), parent_size=300, representatives=1, dtype=torch.float16
    )
    assert step.teams.sizes.flatten().tolist() == [300, 300, 50]
    check(step, 1, "pooled", shares=2)


def test_no_team_but_a_suffix() -> None:
    step = make_step(heads=2, lengths=(20,), suffix=6, dims=(16, 16), dtype=torch.float16)
    teams = step.teams
    none = torch.full_like(teams.team_of_row, -1)
    empty = {"sizes": torch.zeros_like(teams.sizes), "count": torch.zeros_like(teams.count), "team_of_row": none}
    step = replace(step, teams=replace(teams, **empty))
    check(step, 2, shares=2)
    assert kernels(step, 2, Workspace()).union.tolist() == [[0]]


@pytest.mark.parametrize("layout", ["mla", "gqa"])
def test_rows_that_lie_apart(layout: str) -> None:
    """Caches as ``(B, N, G, D)``, or as slices of wider rows: no stride of a row is its width."""
    step = make_step(layout, heads=2, groups=1 if layout == "mla" else 3, lengths=(50, 31), dims=(32, 16), hidden=2)

    def moved(part: Tensor) -> Tensor:
        batch, groups, length, width = part.shape
        room = torch.full((batch, length, groups, width + 5), float("nan"))
        view = room[..., 2 : 2 + width].transpose(1, 2)
        assert view.stride(2) == groups * (width + 5) > width
        return view.copy_(part)

    keys = tuple(moved(part) for part in step.rows.keys)
    rows = Rows(keys, keys[0] if layout == "mla" else moved(step.rows.values))
    check(replace(step, rows=rows), 3, shares=2)


def test_a_suffix_given_as_a_view() -> None:
    step = make_step("gqa", heads=2, lengths=(30, 20), suffix=8, hidden=2, dims=(16,), dtype=torch.float16)
    wide = torch.zeros(8, 2, dtype=torch.int64)
    wide[:, 0] = step.suffix.index
    assert step.suffix.visible is not None
    visible = step.suffix.visible.t().contiguous().t()
    assert wide[:, 0].stride(0) == 2 and visible.stride(1) == 2
    check(replace(step, suffix=Suffix(wide[:, 0], visible)), 2, shares=2)


def test_a_suffix_longer_than_the_prompt() -> None:
    check(make_step(heads=2, lengths=(20, 12), suffix=75, hidden=40, dims=(16, 16), dtype=torch.float16), 2)
