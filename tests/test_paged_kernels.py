"""The paged kernels in Triton's interpreter against the PyTorch twin: same teams, same rows, outputs to rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from latent_santa import paged

from .paged_cases import Paged, make_paged

kernels = pytest.importorskip("latent_santa.kernels.paged")
pytest.importorskip("triton")

# small blocks, so that small cases have several of everything, and programs that walk over several tiles
SMALL = {"route_teams": 16, "attend_rows": 16, "shares": 2, "combine_shares": 2, "pool_teams": 16}
LENGTHS = (70, 0, 85)


def run(case: Paged, dense=None, lanes=32, **changes):
    """Output and counts of the kernels, from scratch memory full of NaN."""
    scratch = kernels.PagedScratch({**SMALL, "lanes": lanes}, programs=1)
    sampling = replace(case.sampling, **changes)
    counts = torch.zeros(len(case.rows) + 1, 4, dtype=torch.int64)
    from latent_santa.kernels.paged_launch import PagedLaunches

    where = (case.cache, case.records, case.block_table, case.seq_lens, sampling)
    for held in PagedLaunches(case.parts, *where, scratch).buffers.values():
        held.fill_(float("nan") if held.is_floating_point() else torch.iinfo(held.dtype).max)
    out = torch.full((len(case.rows), 2 * case.query.shape[1], case.rank), 9.0, dtype=case.query.dtype)[:, ::2]
    got = kernels.paged_attention(case.parts, *where, counts, out, scratch, dense)
    assert got is out and not counts[-1].any()
    return got, counts[:-1]


def check(case: Paged, tolerance: float = 5e-6, lanes: int = 32, **changes):
    got, counts = run(case, lanes=lanes, **changes)
    want, expected = replace(case, query=case.query.float()).run(**changes)
    assert torch.equal(counts, expected)
    assert float((got - want).abs().max()) < tolerance


@pytest.mark.parametrize(
    "block_size, settings",
    [
        (16, {}),
        (16, {"estimator": "pooled", "noise": "shared"}),
        (64, {"estimator": "pooled", "first_head": 4, "heads_in_model": 8}),
        (16, {"noise": "shared", "dense_below": 80}),
        (16, {"parents_per_head": 2}),
        (64, {"parents_per_head": 3, "estimator": "pooled"}),
    ],
)
def test_kernels_are_the_twin(block_size, settings):
    check(make_paged(LENGTHS, block_size, **settings))


@pytest.mark.parametrize("settings, lanes", [({}, 64), ({"heads": 36}, 16)])
def test_a_share_is_looked_at_in_one_go_or_by_its_parents(settings, lanes):
    check(make_paged((38,), **settings), lanes=lanes)


def test_flagged_requests_attend_to_every_row():
    case = make_paged(LENGTHS, estimator="pooled")
    got, counts = run(case, torch.tensor([False, True, True, False]))
    want, expected = case.run()
    every, all_rows = case.run(dense_below=1000)
    assert torch.equal(counts, torch.stack((expected[0], expected[1], all_rows[2])))
    assert float((got - torch.stack((want[0], want[1], every[2]))).abs().max()) < 5e-6


def test_sixteen_bit_rows_take_a_float32_query():
    check(make_paged((70,), heads=6, dtype=torch.float16, query_dtype=torch.float32, rank=20, rope=8), 1e-5)


def test_nothing_is_scored_where_the_table_holds_no_more_than_k_teams():
    check(make_paged((30, 0)), teams_per_head=16)


def test_budgets_beyond_the_ranks_are_searched_by_digits(monkeypatch):
    from latent_santa.kernels import paged_launch

    monkeypatch.setattr(paged_launch, "ranked", lambda k, blocks: False)
    check(make_paged((70,)))


@pytest.mark.parametrize("block_size, dtype", [(16, torch.float32), (64, torch.float16)])
def test_rows_and_records_are_the_twins(block_size, dtype):
    """Blocks that one step fills alone, that it ends, that it leaves open, padding; then single tokens of two requests.

    Rows that come with a step are NaN in the cache before, where a program would read another's before it was written.
    """
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(3 * block_size, 28, generator=generator).to(dtype)
    rows[block_size : 2 * block_size] = 0.5  # a block of equal rows: all ties
    cut = 2 * block_size - 8
    first = torch.cat((torch.arange(3, 3 + cut), torch.tensor([-1]), 4 * block_size + torch.arange(block_size - 1)))
    chosen = torch.cat((rows[:cut], rows[-1:], rows[2 * block_size :][: block_size - 1]))
    held = []
    for write in (paged.write_rows, kernels.write_rows):
        cache = torch.full((6, block_size, 28), float("nan"), dtype=dtype)
        records = paged.empty_records(6, block_size, 16, 4, "cpu", cache)
        cache[0, :3] = 0.25
        write(cache, records, chosen[:, :20], chosen[:, 20:], first)
        assert records.size[0].sum() == block_size and not records.size[4].any()
        for n in range(3 + cut, 2 * block_size):  # the second is written once more
            new = rows[n - 3 : n - 1].float()  # an engine's rows may have more digits than its cache
            write(cache, records, new[:, :20], new[:, 20:], torch.tensor([n, 5 * block_size - 1]))
        assert records.size[1].sum() == records.size[4].sum() == block_size and not records.size[2:4].any()
        held.append((cache, records))
    (want_cache, want), (cache, found) = held
    assert torch.equal(cache.nan_to_num(9.0), want_cache.nan_to_num(9.0))
    for name in ("team", "row", "size"):
        assert torch.equal(getattr(found, name), getattr(want, name)), name
    assert float((found.mean.float() - want.mean.float()).abs().max()) <= (1e-6 if dtype == torch.float32 else 2e-3)


def test_reasons_name_what_the_kernels_do_not_take():
    case = make_paged((20,))

    def reason(case=case, **changes):
        sampling = replace(case.sampling, **changes)
        return kernels.reason_not(case.parts, case.cache, case.records, case.block_table, sampling)

    assert reason() is None
    assert "first_head is 2" in reason(first_head=2) and reason(first_head=2, noise="shared") is None
    assert "blocks" in reason(replace(case, cache=case.cache[::2]))
    assert "bfloat16" in reason(replace(case, cache=case.cache.bfloat16(), query=case.query.float()))
    assert "float64" in reason(replace(case, query=case.query.double()))
    with pytest.raises(RuntimeError, match="first_head"):
        run(case, first_head=2)


def test_scratch_grows_to_the_largest_step_and_is_shared():
    scratch = kernels.PagedScratch()
    large = scratch.buffers({"a": (torch.float32, (4, 8))}, torch.device("cpu"))["a"]
    small = scratch.buffers({"a": (torch.float32, (2, 3))}, torch.device("cpu"))["a"]
    assert small.shape == (2, 3) and small.data_ptr() == large.data_ptr() and scratch.bytes() == 128
    assert scratch.buffers({"a": (torch.float32, (5, 8))}, torch.device("cpu"))["a"].numel() == 40
    assert scratch.bytes() == 160


@pytest.mark.parametrize("settings", [{}, {"estimator": "pooled", "parents_per_head": 2}])
def test_scratch_of_a_step_is_known_before(settings):
    from latent_santa.kernels.paged_launch import scratch_bytes

    case, scratch = make_paged((70, 0, 50), columns=1, **settings), kernels.PagedScratch()
    where = (case.cache, case.records, case.block_table, case.seq_lens, case.sampling)
    kernels.paged_attention(case.parts, *where, torch.zeros(3, 4, dtype=torch.int64), None, scratch)
    dims = (case.rank, case.query.shape[2] - case.rank)
    known = scratch_bytes((3, 6), case.query.shape[1], dims, torch.float32, 16, case.sampling, torch.device("cpu"))
    assert known == scratch.bytes()
