"""The paged kernels on a CUDA device against the PyTorch twin on the CPU, and inside CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from latent_santa import paged
from latent_santa.kernels.paged import PagedScratch, paged_attention

from ..paged_cases import Paged, make_paged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
HALF, FULL, BRAIN = torch.float16, torch.float32, torch.bfloat16
LENGTHS = (3000, 0, 20, 1500, 901)


def both(**settings: Any) -> tuple[Paged, Paged]:
    """The same case on the device and on the CPU."""
    settings = {"lengths": LENGTHS, "heads": 16, "rank": 512, "rope": 64, "dtype": BRAIN, "scale": 0.08, **settings}
    settings = {"teams_per_head": 32, "dense_below": 900, **settings}
    return make_paged(device="cuda", **settings), make_paged(**settings)


def compare(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """Every head's output agrees relative to its norm; padding is exactly zero."""
    error = (got.cpu().float() - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-9)
    assert float(error.max()) < tolerance


@pytest.mark.parametrize("estimator", ["per_head", "pooled"])
@pytest.mark.parametrize("noise", ["independent", "shared"])
@pytest.mark.parametrize(
    "settings, tolerance",
    [
        ({"block_size": 16}, 1e-2),
        ({"block_size": 64, "query_dtype": FULL}, 3e-5),
        ({"block_size": 64, "heads": 128, "seed": 2}, 1e-2),  # seed 0 has two scores 1e-6 apart at a threshold
        ({"block_size": 16, "heads": 4, "first_head": 8, "heads_in_model": 16, "query_dtype": FULL}, 3e-5),
        ({"block_size": 16, "heads": 4, "rank": 96, "rope": 16, "dtype": HALF}, 2e-3),
        ({"block_size": 64, "heads": 6, "rank": 20, "rope": 8, "dtype": FULL, "scale": 0.3}, 3e-5),
        ({"block_size": 16, "teams_per_head": 180}, 1e-2),
        ({"block_size": 16, "parents_per_head": 16}, 1e-2),
        ({"block_size": 64, "parents_per_head": 70, "query_dtype": FULL}, 3e-5),
    ],
    ids=["16", "64-float32", "128 heads", "4 of 16 heads", "half", "small", "many", "two stages", "two stages of one"],
)
def test_kernels_are_the_twin(settings: dict[str, Any], tolerance: float, noise: str, estimator: str) -> None:
    case, twin = both(**settings, noise=noise, estimator=estimator)
    for name in ("team", "row", "size"):
        assert torch.equal(getattr(case.records, name).cpu(), getattr(twin.records, name)), name
    if twin.records.mean is not None:  # float32 sums in another order may round to the next bfloat16
        mean = twin.records.mean.float()
        assert float((case.records.mean.cpu().float() - mean).abs().max()) <= float(mean.abs().max()) / 128
        twin = replace(twin, records=replace(twin.records, mean=case.records.mean.cpu()))
    got, counts = case.run()
    want, expected = replace(twin, query=twin.query.float()).run()
    assert torch.equal(counts.cpu(), expected)
    assert got.dtype == case.query.dtype and not got[1].any()
    compare(got, want, tolerance)
    for _ in range(5):
        assert torch.equal(case.run()[0], got)


@pytest.mark.parametrize(
    "settings",
    [{}, {"estimator": "pooled", "block_size": 64}, {"parents_per_head": 16}, {"heads": 128, "seed": 2}],
    ids=["per head", "pooled", "two stages", "128 heads"],
)
def test_long_shares_are_looked_at_by_their_parents(settings: dict[str, Any]) -> None:
    """Such as those of eight requests with 32K rows and more: here made long by few shares and narrow looks."""
    case, _ = both(**settings)
    want, expected = case.run()
    counts = torch.zeros_like(expected)
    where = (case.cache, case.records, case.block_table, case.seq_lens, case.sampling, counts)
    got = paged_attention(case.parts, *where, scratch=PagedScratch({"lanes": 128, "shares": 2}))
    assert torch.equal(counts, expected)
    compare(got, want.cpu().float(), 1e-2)


@pytest.mark.parametrize("settings", [{"dense_below": 1 << 20}, {"teams_per_head": 4096}], ids=["short", "budget"])
def test_dense_requests_read_every_row(settings: dict[str, Any]) -> None:
    case, twin = both(**settings)
    got, counts = case.run()
    assert counts[:, 3].tolist() == list(LENGTHS) and not counts[:, :3].any()
    compare(got, replace(twin, query=twin.query.float()).run()[0], 1e-2)


def test_a_wide_table_and_another_batch_change_no_team() -> None:
    case, _ = both(columns=9000)
    narrow, _ = both()
    got, counts = case.run()
    want, expected = narrow.run()
    assert torch.equal(counts, expected)
    compare(got, want.cpu().float(), 1e-2)
    for b in (0, 3, 4):
        alone, alone_counts = narrow.request(b).run()
        assert torch.equal(alone_counts, counts[b : b + 1])
        compare(alone, want[b : b + 1].cpu().float(), 1e-2)


@pytest.mark.parametrize("settings", [{}, {"estimator": "pooled"}, {"parents_per_head": 16}])
def test_a_graph_serves_steps_that_grow_over_block_borders(settings: dict[str, Any]) -> None:
    """One graph groups and attends while requests grow over borders and past ``dense_below``, bit for bit the same."""
    case, _ = both(lengths=(2990, 890, 40), columns=4, **settings)
    size, steps, batch = case.records.block_size, 40, 3
    table = case.block_table.clone()
    spare = [block for block in range(case.cache.shape[0]) if block not in set(table.flatten().tolist())]
    spare += list(range(case.cache.shape[0], case.cache.shape[0] + 12))
    cache = torch.cat((case.cache, torch.zeros_like(case.cache[:12])))
    names = ("team", "row", "size", "mean")
    records = paged.empty_records(cache.shape[0], size, 16, 4, "cuda", cache)
    for name in names[: 3 if case.records.mean is None else 4]:
        getattr(records, name)[: case.cache.shape[0]] = getattr(case.records, name)
    lengths, taken = case.seq_lens.tolist(), iter(spare)
    for b, n in enumerate(lengths):
        for column in range(-(-n // size), -(-(n + steps) // size)):
            table[b, column] = next(taken)
    copies = {name: getattr(records, name).clone() for name in names}
    plain = replace(records, **copies)
    query, seq_lens = case.query.clone(), case.seq_lens.clone()
    slots, out = torch.full((batch,), -1, device="cuda"), torch.empty_like(case.parts[0])
    new = torch.zeros(batch, cache.shape[2], dtype=BRAIN, device="cuda")
    counts = {key: torch.zeros(batch, 4, dtype=torch.int64, device="cuda") for key in ("graph", "plain")}

    def step(held: paged.PagedRecords, key: str, into: torch.Tensor | None) -> torch.Tensor:
        paged.write_rows(cache, held, new[:, : case.rank], new[:, case.rank :], slots)
        where = (cache, held, table, seq_lens, case.sampling, counts[key])
        return paged.paged_attention((query[..., : case.rank], query[..., case.rank :]), *where, into)

    step(records, "graph", out)
    counts["graph"].zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(records, "graph", out)
    counts["graph"].zero_()
    generator = torch.Generator(device="cuda").manual_seed(5)
    for _ in range(steps):
        seq_lens += 1
        last = seq_lens.long() - 1
        slots.copy_(table.gather(1, (last // size)[:, None])[:, 0].long() * size + last % size)
        new.copy_(torch.randn(new.shape, generator=generator, device="cuda"))
        query.copy_(torch.randn(query.shape, generator=generator, device="cuda"))
        graph.replay()
        assert torch.equal(out, step(plain, "plain", None))
    assert torch.equal(counts["graph"], counts["plain"]) and bool((counts["graph"][:, 2:] > 0).any(1).all())
    assert int(counts["graph"][1, 3]) > 0 and int(counts["graph"][1, 0]) > 0  # it was short, then sampled
    for name in names:
        assert torch.equal(getattr(records, name), getattr(plain, name))
    rows = [cache[table[b, : -(-int(n) // size)].long()].flatten(0, 1)[: int(n)] for b, n in enumerate(seq_lens)]
    moved = {name: getattr(records, name).cpu() for name in names}
    twin = Paged(
        query.float().cpu(), rows, cache.cpu(), replace(records, **moved), table.cpu(), seq_lens.cpu(), case.sampling,
        case.rank,
    )  # fmt: skip
    compare(out, twin.run()[0], 1e-2)
