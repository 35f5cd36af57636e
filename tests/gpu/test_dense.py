"""The dense operators on a CUDA device against plain float32 products, padded and not, and in a captured graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from latent_santa import dense
from latent_santa.estimator import dense_attention
from latent_santa.rows import Rows
from latent_santa.step import DecodeStep

from ..cases import make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DIMS = {"mla": (512, 64), "gqa": (128,)}


def on_gpu(layout: str, masked: bool, length: int = 700) -> DecodeStep:
    """A step of two sequences, of which the second is padded if ``masked``, with rows reserved behind the last."""
    groups, heads = (1, 16) if layout == "mla" else (4, 7)
    case = make_case(layout, heads, groups, (length, length - 250 if masked else length), suffix=3)
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    keys = tuple(normal(2, groups, 1024, dim).bfloat16() for dim in DIMS[layout])
    rows = Rows(keys, keys[0] if layout == "mla" else normal(2, groups, 1024, 128).bfloat16())
    query = tuple(normal(2, groups, heads, dim) for dim in DIMS[layout])
    visible = torch.nn.functional.pad(case.step.visible, (0, 1024 - length - 3)).cuda()
    if not masked:
        parts = tuple(part[:, :, : length + 3] for part in rows.keys)
        rows = Rows(parts, parts[0] if layout == "mla" else rows.values[:, :, : length + 3])
    draw = replace(case.draw, key=case.draw.key.cuda(), step=case.draw.step.cuda())
    return DecodeStep(query, rows, None, case.suffix, draw, 0.05, visible if masked else None)


@pytest.mark.parametrize("layout", ["mla", "gqa"])
@pytest.mark.parametrize("masked", [True, False])
def test_every_operator_that_runs_equals_plain_products(layout: str, masked: bool) -> None:
    step = on_gpu(layout, masked)
    seen = dense._seen_of(step)
    wanted = dense_attention(step.query, step.rows, step.visible, step.scale)
    for operator in dense.OPERATORS:
        if operator.reason_not(step, seen) is not None:
            continue
        try:
            found = operator.attend(step, seen)
        except RuntimeError as error:  # left out by the choice too, with a warning
            print(operator.name, error)
            assert operator.name != "products"
            continue
        for ours, theirs in zip(found, wanted, strict=True):
            assert (ours - theirs).norm() / theirs.norm() < 0.01, operator.name
    out, _ = dense.attend_all(step)
    assert (out - wanted[0]).norm() / wanted[0].norm() < 0.01
    assert dense.last_used() in [operator.name for operator in dense.OPERATORS]


@pytest.mark.parametrize("layout", ["mla", "gqa"])
def test_a_captured_call_follows_the_mask_that_changes_on_the_device(layout: str) -> None:
    step = on_gpu(layout, True)
    assert step.visible is not None
    for _ in range(2):
        dense.attend_all(step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = dense.attend_all(step)
    step.visible[:, 703:800] = True
    graph.replay()
    wanted, _ = dense_attention(step.query, step.rows, step.visible, step.scale)
    assert (out - wanted).norm() / wanted.norm() < 0.01
