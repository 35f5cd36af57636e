"""Exact attention split over the rows, in Triton's interpreter, against loops in float64 and PyTorch's products."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: the kernels cannot run")

from latent_santa import dense
from latent_santa.estimator import dense_attention as products
from latent_santa.kernels import dense_reason_not
from latent_santa.kernels.dense import Tiles, dense_attention
from latent_santa.kernels.support import interpreting
from latent_santa.rows import Rows
from latent_santa.step import DecodeStep

from .cases import make_case
from .test_absorbed import in_loops

if not interpreting():
    pytest.skip("tests/gpu runs the kernels on the GPU", allow_module_level=True)

SMALL = Tiles(16, 16, 2, 4, False, 1)


def close(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...], tolerance: float) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def in_reserved_room(step: DecodeStep, room: int) -> DecodeStep:
    """The same rows as the first of buffers of ``room`` rows, of which the others hold large numbers."""

    def moved(part: torch.Tensor) -> torch.Tensor:
        buffer = part.new_full((*part.shape[:2], room, part.shape[-1]), 50.0)
        buffer[:, :, : part.shape[2]] = part
        return buffer

    keys = tuple(moved(part) for part in step.rows.keys)
    values = keys[0] if len(keys) == 2 else moved(step.rows.values)
    assert step.visible is not None
    visible = torch.nn.functional.pad(step.visible, (0, room - step.rows.length))
    return replace(step, rows=Rows(keys, values), visible=visible)


@pytest.mark.parametrize("layout", ["mla", "gqa"])
@pytest.mark.parametrize("tall", [False, True])
def test_equals_loops_over_the_visible_rows_of_each_sequence(layout: str, tall: bool) -> None:
    """Padding on the left, a hole, reserved rows behind, several shares, and more heads than a tile has."""
    groups = 1 if layout == "mla" else 2
    case = make_case(layout, 19, groups, (37, 5, 22), suffix=3, hidden=((1, 0),))
    step = in_reserved_room(case.step, 64)
    seen = dense._forms(step.visible, torch.float32)
    assert not seen.unbroken and seen.start is not None
    tiles = replace(SMALL, tall=tall)
    out, lse = dense_attention(step, seen.start, seen.stop, True, tiles)
    for b in range(3):
        for g in range(groups):
            wanted = (torch.as_tensor(part).float() for part in in_loops(case, b, g))
            close((out[b, g], lse[b, g]), tuple(wanted), 2e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float16, 4e-3)])
def test_begins_and_ends_are_read_where_they_stand(dtype: torch.dtype, tolerance: float) -> None:
    """One launch serves every length: what is written into ``stop`` in place counts."""
    step = in_reserved_room(make_case("mla", 4, 1, (37, 37), suffix=3, dtype=dtype).step, 64)
    stop = torch.tensor([40, 40], dtype=torch.int32)
    for rows in (40, 17, 16, 1):
        stop[1] = rows
        visible = torch.arange(64) < stop[:, None]
        wanted = products(step.query, step.rows, visible, step.scale)
        close(dense_attention(step, None, stop, False, SMALL), wanted, tolerance)


def test_without_a_mask_all_rows_count_and_without_rows_nothing_does() -> None:
    step = replace(make_case("gqa", 3, 2, (20, 20), suffix=3).step, visible=None)
    close(dense.SplitRows().attend(step, None), products(step.query, step.rows, None, step.scale), 2e-5)
    out, lse = dense_attention(step, None, torch.tensor([23, 0], dtype=torch.int32), False, SMALL)
    assert not out[1].any() and bool((lse[1] == -torch.inf).all()) and bool(out[0].any())


def test_a_query_in_float32_is_rounded_to_the_rows_dtype() -> None:
    step = replace(make_case("mla", 3, 1, (20,), suffix=3, dtype=torch.float16).step, visible=None)
    halved = replace(step, query=tuple(part.half() for part in step.query))
    assert all(map(torch.equal, dense_attention(step, None, None, False), dense_attention(halved, None, None, False)))


def test_what_it_cannot_take_is_named() -> None:
    step = make_case("gqa", 3, 2, (20,)).step
    assert dense_reason_not(step) is None
    keys = step.rows.keys[0]
    turned = replace(step, rows=Rows((keys.mT.contiguous().mT,), step.rows.values))
    assert "stride" in str(dense_reason_not(turned))
    wide = torch.zeros(*keys.shape[:-1], 600)
    assert "at most 512" in str(dense_reason_not(replace(step, rows=Rows((keys,), wide))))
