"""The kernels on a CUDA device against their PyTorch twin: dtypes, sizes and behaviour the interpreter cannot show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from latent_santa.kernels import Workspace
from latent_santa.step import DecodeStep, Output, Sampling

from ..kernel_cases import compare, kernels, make_step, poison, poisoned, twin
from ..ties import without_tie

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

# rounding: scores, weights and sums in float32; 16-bit rows with a 16-bit query round the weights to 16 bits
EXACT, HALF, BRAIN = 2e-5, 2e-3, 1e-2
MLA: dict[str, Any] = {"layout": "mla", "dims": (512, 64), "scale": 0.06}
GQA: dict[str, Any] = {"layout": "gqa", "dims": (128,), "scale": 0.12}
DTYPES = pytest.mark.parametrize(
    ("dtype", "query_dtype", "tolerance"),
    [
        (torch.bfloat16, torch.bfloat16, BRAIN),
        (torch.bfloat16, torch.float32, EXACT),
        (torch.float16, torch.float16, HALF),
        (torch.float16, torch.float32, EXACT),
    ],
)


def check(
    step: DecodeStep, k: int, tolerance: float, over: dict[str, Any] | None = None, parents: int | None = None
) -> None:
    for estimator in ("per_head", "pooled"):
        for noise in ("independent", "shared"):
            case = without_tie(step, Sampling(k, estimator, noise, parents))
            workspace = poisoned(case, k, over or {}, estimator, noise, parents)
            got = kernels(case, k, workspace, estimator, noise, parents)
            compare(got, twin(case, k, estimator, noise, parents), tolerance)


@pytest.mark.parametrize("heads", [1, 14, 16])
@DTYPES
def test_mla(heads: int, dtype: torch.dtype, query_dtype: torch.dtype, tolerance: float) -> None:
    step = make_step(
        heads=heads, lengths=(2500, 1111), suffix=37, hidden=3, dtype=dtype, query_dtype=query_dtype, device="cuda",
        **MLA,
    )  # fmt: skip
    check(step, 8, tolerance)


def test_mla_float32() -> None:
    check(make_step(heads=5, lengths=(700, 500), dtype=torch.float32, device="cuda", **MLA), 8, EXACT)


@pytest.mark.parametrize("query_dtype", [torch.bfloat16, torch.float32])
def test_mla_128_heads(query_dtype: torch.dtype) -> None:
    step = make_step(heads=128, lengths=(4000,), dtype=torch.bfloat16, query_dtype=query_dtype, device="cuda", **MLA)
    check(step, 4, BRAIN if query_dtype == torch.bfloat16 else EXACT)


@pytest.mark.parametrize(
    ("heads", "dtype"), [(40, torch.bfloat16), (64, torch.float16), (128, torch.bfloat16), (200, torch.bfloat16)]
)
def test_many_heads(heads: int, dtype: torch.dtype) -> None:
    """A query in the rows' dtype: 64 heads at a time, over lists that a launch of their own makes."""
    step = make_step(
        heads=heads, lengths=(5000, 2111), suffix=37, hidden=3, dtype=dtype, query_dtype=dtype, device="cuda",
        summary="mean", **MLA,
    )  # fmt: skip
    tolerance = BRAIN if dtype == torch.bfloat16 else HALF
    for k, parents in ((4, None), (32, None), (4, 16), (16, 16)):
        check(step, k, tolerance, parents=parents)


@pytest.mark.parametrize("summary", ["isotropic", "diagonal"])
def test_many_heads_over_other_parents(summary: str) -> None:
    step = make_step(
        heads=128, lengths=(6000,), dtype=torch.bfloat16, query_dtype=torch.bfloat16, device="cuda", summary=summary,
        **MLA,
    )  # fmt: skip
    check(step, 8, BRAIN, parents=16)


@pytest.mark.parametrize("routing_dtype", ["int8", "int4"])
def test_many_heads_of_coded_keys(routing_dtype: str) -> None:
    step = make_step(
        heads=128, lengths=(6000,), dtype=torch.bfloat16, query_dtype=torch.bfloat16, device="cuda",
        routing_dtype=routing_dtype, summary="mean", **MLA,
    )  # fmt: skip
    check(step, 8, BRAIN)
    check(step, 8, BRAIN, parents=16)


def test_many_heads_of_a_wide_rotary_part() -> None:
    sizes = {**MLA, "dims": (512, 160)}
    step = make_step(
        heads=128, lengths=(6000,), dtype=torch.bfloat16, query_dtype=torch.bfloat16, device="cuda", summary="mean",
        **sizes,
    )  # fmt: skip
    check(step, 8, BRAIN, parents=16)


@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
def test_many_heads_in_a_graph(estimator: str) -> None:
    """A graph draws anew and gives the same bits again, and no call waits for the device."""
    step = make_step(
        heads=128, lengths=(40000, 30000), dtype=torch.bfloat16, query_dtype=torch.bfloat16, device="cuda",
        summary="mean", **MLA,
    )  # fmt: skip
    workspace = Workspace()
    graph, held = captured(step, 16, workspace, estimator, 16, "shared")
    for _ in range(3):
        poison(workspace)
        graph.replay()
        first = held.out.clone()
        compare(held, twin(step, 16, estimator, "shared", 16), BRAIN)
        poison(workspace)
        graph.replay()
        assert torch.equal(first, held.out)
        step.draw.step.add_(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels(step, 16, workspace, estimator, "shared", 16)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("groups", "heads", "dim"), [(4, 7, 128), (2, 1, 64), (1, 5, 96), (2, 8, 256), (1, 40, 64)])
@pytest.mark.parametrize("query_dtype", [torch.bfloat16, torch.float32])
def test_gqa(groups: int, heads: int, dim: int, query_dtype: torch.dtype) -> None:
    step = make_step(
        layout="gqa", dims=(dim,), groups=groups, heads=heads, lengths=(3000, 1700), suffix=11, hidden=2,
        dtype=torch.bfloat16, query_dtype=query_dtype, scale=dim**-0.5, device="cuda",
    )  # fmt: skip
    check(step, 16, BRAIN if query_dtype == torch.bfloat16 else EXACT)


@pytest.mark.parametrize("query_dtype", [torch.float16, torch.float32])
def test_gqa_float16(query_dtype: torch.dtype) -> None:
    step = make_step(
        heads=7, groups=4, lengths=(3000, 1700), suffix=11, dtype=torch.float16, query_dtype=query_dtype, device="cuda",
        **GQA,
    )  # fmt: skip
    check(step, 16, HALF if query_dtype == torch.float16 else EXACT)


@pytest.mark.parametrize("k", [1, 5, 100, 200])
def test_budgets(k: int) -> None:
    step = make_step(heads=7, groups=2, lengths=(3000, 700), dtype=torch.bfloat16, device="cuda", **GQA)
    check(step, k, EXACT)


@pytest.mark.parametrize("k", [128, 172, 340, 341, 1024, 2048])
def test_large_budgets(k: int) -> None:
    step = make_step(heads=6, lengths=(20000, 6000), dtype=torch.bfloat16, device="cuda", summary="mean", **MLA)
    check(step, k, EXACT)
    check(step, k, EXACT, parents=200)


def test_a_rotary_part_of_160() -> None:
    sizes = {**MLA, "dims": (512, 160)}
    check(make_step(heads=16, lengths=(3000,), dtype=torch.bfloat16, device="cuda", **sizes), 8, EXACT)


def test_one_workspace_serves_every_budget() -> None:
    step = make_step(heads=14, lengths=(8000, 5000), dtype=torch.bfloat16, device="cuda", **MLA)
    workspace = Workspace()
    for k in (32, 64, 16, 128, 256, 64, 32):
        for estimator in ("per_head", "pooled"):
            compare(kernels(step, k, workspace, estimator), twin(step, k, estimator), EXACT)


@pytest.mark.parametrize("routing_dtype", ["int8", "int4"])
@DTYPES
@pytest.mark.parametrize("layout", [MLA, GQA], ids=["mla", "gqa"])
def test_routing_dtypes(
    layout: dict[str, Any], dtype: torch.dtype, query_dtype: torch.dtype, tolerance: float, routing_dtype: str
) -> None:
    step = make_step(
        heads=14, lengths=(2500, 1111), dtype=dtype, query_dtype=query_dtype, device="cuda",
        routing_dtype=routing_dtype, **layout,
    )  # fmt: skip
    check(step, 8, tolerance)


@pytest.mark.parametrize("shares", [1, 2, 3, 8, 16, 33, 128])
def test_shares(shares: int) -> None:
    step = make_step(heads=16, lengths=(1500,), dtype=torch.bfloat16, device="cuda", **MLA)
    check(step, 4, EXACT, {"shares": shares})


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from latent_santa.kernels import launch

    monkeypatch.setattr(launch, "shared_memory", lambda device: 48 << 10)
    check(make_step(heads=16, lengths=(1500,), dtype=torch.bfloat16, device="cuda", **MLA), 4, EXACT)


def test_rows_beyond_two_to_the_31st_element() -> None:
    """The last rows of the buffer lie behind 2**31 elements; the prompt is all of it."""
    length, width = 4_200_000, 512
    cache = torch.zeros(1, 1, length, width, dtype=torch.float16, device="cuda")
    small = make_step(heads=4, lengths=(1000,), suffix=0, dtype=torch.float16, device="cuda", **MLA)
    rotary = torch.zeros(1, 1, length, 64, dtype=torch.float16, device="cuda")
    rows = small.rows
    cache[:, :, -1000:], rotary[:, :, -1000:] = rows.keys[0], rows.keys[1]
    shift = length - 1000
    teams = small.teams
    want = twin(small, 8)
    far = replace(teams, team_of_row=torch.nn.functional.pad(teams.team_of_row, (shift, 0), value=-1))
    moved = replace(small, rows=type(rows)((cache, rotary), cache), teams=far)
    got = kernels(moved, 8, Workspace())
    compare(got, want, EXACT)


@pytest.mark.parametrize(
    ("layout", "heads", "estimator", "routing_dtype"),
    [
        (MLA, 16, "per_head", "model"),
        (MLA, 14, "pooled", "int4"),
        (GQA, 7, "per_head", "int8"),
        (GQA, 7, "pooled", "model"),
    ],
    ids=["mla", "mla-pooled-int4", "gqa-int8", "gqa-pooled"],
)
def test_a_graph_draws_fresh_noise(layout: dict[str, Any], heads: int, estimator: str, routing_dtype: str) -> None:
    step = make_step(
        heads=heads, lengths=(3000,), dtype=torch.bfloat16, device="cuda", routing_dtype=routing_dtype, **layout
    )
    workspace = Workspace()
    graph, held = captured(step, 8, workspace, estimator)
    seen = []
    for _ in range(3):
        poison(workspace)
        graph.replay()
        compare(held, twin(step, 8, estimator), EXACT)
        seen.append(held.out.clone())
        step.draw.step.add_(1)
    assert not torch.allclose(seen[0], seen[1]) and not torch.allclose(seen[1], seen[2])
    step.draw.key.add_(1)
    graph.replay()
    compare(held, twin(step, 8, estimator), EXACT)


def captured(
    step: DecodeStep,
    k: int,
    workspace: Workspace,
    estimator: str,
    parents: int | None = None,
    noise: str = "independent",
) -> tuple[torch.cuda.CUDAGraph, Output]:
    """A graph of one step, and the outputs that it fills."""
    with torch.cuda.stream(torch.cuda.Stream()):
        kernels(step, k, workspace, estimator, noise, parents)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = kernels(step, k, workspace, estimator, noise, parents)
    return graph, held


def test_a_graph_of_a_call_that_selects_every_team() -> None:
    step = make_step(heads=16, lengths=(300,), dtype=torch.bfloat16, device="cuda", **MLA)
    workspace = Workspace()
    graph, held = captured(step, step.teams.M, workspace, "per_head")
    poison(workspace)
    graph.replay()
    compare(held, twin(step, step.teams.M), EXACT)


@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
def test_no_call_waits_for_the_device(estimator: str) -> None:
    step = make_step(heads=16, lengths=(3000, 2000), dtype=torch.bfloat16, device="cuda", **MLA)
    workspace = Workspace()
    kernels(step, 8, workspace, estimator)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = kernels(step, 8, workspace, estimator)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    compare(got, twin(step, 8, estimator), EXACT)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
def test_rows_on_another_device_than_the_current_one(estimator: str) -> None:
    step = make_step(heads=16, lengths=(3000,), dtype=torch.bfloat16, device="cuda:1", **MLA)
    assert torch.cuda.current_device() == 0
    compare(kernels(step, 8, Workspace(), estimator), twin(step, 8, estimator), EXACT)
    assert torch.cuda.current_device() == 0


def test_scratch_of_a_captured_graph_outlasts_the_limit() -> None:
    step = make_step(heads=16, lengths=(3000,), dtype=torch.bfloat16, device="cuda", **MLA)
    workspace = Workspace(limit_bytes=0)
    kernels(step, 8, workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = kernels(step, 8, workspace)
    longer = make_step(heads=16, lengths=(5000,), dtype=torch.bfloat16, device="cuda", **MLA)
    compare(kernels(longer, 8, workspace), twin(longer, 8), EXACT)
    graph.replay()
    compare(held, twin(step, 8), EXACT)
    assert len(workspace._buffers) == 2


def test_repeats_are_bitwise_equal() -> None:
    step = make_step(heads=16, lengths=(5000, 4000), dtype=torch.bfloat16, device="cuda", **MLA)
    workspace = Workspace()
    first = kernels(step, 32, workspace)
    for _ in range(20):
        poison(workspace)
        again = kernels(step, 32, workspace)
        assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)


@pytest.mark.parametrize("summary", ["mean", "isotropic", "diagonal"])
@pytest.mark.parametrize("layout", ["mla", "gqa"])
@pytest.mark.parametrize("query_dtype", [torch.bfloat16, torch.float32])
def test_two_stages(layout: str, summary: str, query_dtype: torch.dtype) -> None:
    sizes = {**MLA, "heads": 16} if layout == "mla" else {**GQA, "heads": 7, "groups": 4}
    step = make_step(
        lengths=(6000, 2500), suffix=37, hidden=3, dtype=torch.bfloat16, query_dtype=query_dtype, device="cuda",
        summary=summary, **sizes,
    )  # fmt: skip
    for k1, k in ((8, 8), (64, 32), (100, 32), (200, 8), (4, 100)):
        check(step, k, BRAIN if query_dtype == torch.bfloat16 else EXACT, parents=k1)


@pytest.mark.parametrize("heads", [1, 40, 128])
def test_two_stages_with_many_heads(heads: int) -> None:
    step = make_step(heads=heads, lengths=(6000,), dtype=torch.bfloat16, device="cuda", summary="mean", **MLA)
    check(step, 8, EXACT, parents=16)


@pytest.mark.parametrize("parent_size, representatives", [(16, 1), (32, 12), (256, 128)])
def test_parents_of_other_sizes(parent_size: int, representatives: int) -> None:
    step = make_step(
        heads=7, groups=2, lengths=(9000,), dtype=torch.bfloat16, device="cuda", summary="mean",
        parent_size=parent_size, representatives=representatives, **GQA,
    )  # fmt: skip
    check(step, 16, EXACT, parents=9)


@pytest.mark.parametrize("routing_dtype", ["int8", "int4"])
@pytest.mark.parametrize("layout", [MLA, GQA], ids=["mla", "gqa"])
def test_two_stages_of_coded_keys(layout: dict[str, Any], routing_dtype: str) -> None:
    step = make_step(
        heads=14, lengths=(5000, 2000), dtype=torch.bfloat16, device="cuda", routing_dtype=routing_dtype,
        summary="mean", **layout,
    )  # fmt: skip
    check(step, 8, EXACT, parents=32)


@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
def test_two_stages_of_a_long_prompt_in_a_graph(estimator: str) -> None:
    """A graph draws anew, does not wait for the device, and gives the same bits again."""
    step = make_step(heads=16, lengths=(40000, 30000), dtype=torch.bfloat16, device="cuda", summary="mean", **MLA)
    workspace = Workspace()
    graph, held = captured(step, 32, workspace, estimator, 64)
    for _ in range(3):
        poison(workspace)
        graph.replay()
        first = held.out.clone()
        compare(held, twin(step, 32, estimator, parents=64), EXACT)
        poison(workspace)
        graph.replay()
        assert torch.equal(first, held.out)
        step.draw.step.add_(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels(step, 32, workspace, estimator, parents=64)
    finally:
        torch.cuda.set_sync_debug_mode("default")
