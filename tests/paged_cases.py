"""Requests in a paged cache, for the tests of :mod:`latent_santa.paged` and of its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from latent_santa.integers import ceil_div
from latent_santa.paged import PagedRecords, PagedSampling, empty_records, paged_attention, write_rows


@dataclass
class Paged:
    """One step of some requests; ``rows`` are each request's own ``(n, rank + rope)``, in logical order."""

    query: Tensor
    rows: list[Tensor]
    cache: Tensor
    records: PagedRecords
    block_table: Tensor
    seq_lens: Tensor
    sampling: PagedSampling
    rank: int

    def run(self, **changes: Any) -> tuple[Tensor, Tensor]:
        """Output and counts, which start from zero."""
        counts = torch.zeros(len(self.rows), 4, dtype=torch.int64, device=self.cache.device)
        sampling = replace(self.sampling, **changes)
        where = (self.cache, self.records, self.block_table, self.seq_lens)
        return paged_attention(self.parts, *where, sampling, counts), counts

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Content and rotary queries; an engine's come with strides of their own, so these do as well."""
        content, rotary = self.query.split([self.rank, self.query.shape[2] - self.rank], 2)
        return content.transpose(0, 1).contiguous().transpose(0, 1), rotary

    def request(self, b: int) -> Paged:
        """Request b alone."""
        part = slice(b, b + 1)
        return replace(
            self, query=self.query[part], rows=self.rows[part], block_table=self.block_table[part],
            seq_lens=self.seq_lens[part],
        )  # fmt: skip


def make_paged(
    lengths: Sequence[int] = (150,),
    block_size: int = 16,
    heads: int = 4,
    rank: int = 32,
    rope: int = 16,
    dtype: torch.dtype = torch.float32,
    query_dtype: torch.dtype | None = None,
    device: str = "cpu",
    spare: int = 5,
    columns: int = 2,
    seed: int = 0,
    **sampling: Any,
) -> Paged:
    """Draw requests of ``lengths`` rows, 0 for padding, in blocks at random places of a cache with ``spare`` others.

    Rows that no request has hold NaN, block numbers beyond a request's rows, ``columns`` more than the longest needs,
    point nowhere, and the records of all blocks were those of other rows before.
    """
    generator = torch.Generator().manual_seed(seed)
    needed = [ceil_div(n, block_size) for n in lengths]
    blocks = sum(needed) + spare
    place = torch.randperm(blocks, generator=generator)
    cache = torch.full((blocks, block_size, rank + rope), float("nan"), dtype=dtype)
    block_table = torch.full((len(lengths), max(needed) + columns), 2**31 - 1, dtype=torch.int32)
    means = cache.to(device) if "parents_per_head" in sampling else None
    records = empty_records(blocks, block_size, 16, 4, device, means)
    for part in (records.team, records.row, records.size, *(() if records.mean is None else (records.mean,))):
        part.fill_(3)
    rows, slots, start = [], [], 0
    for b, n in enumerate(lengths):
        mine = place[start : start + needed[b]]
        start += needed[b]
        block_table[b, : needed[b]] = mine
        slots.append((mine[:, None] * block_size + torch.arange(block_size)).flatten()[:n])
        rows.append(torch.randn(n, rank + rope, generator=generator).to(dtype))
    query = torch.randn(len(lengths), heads, rank + rope, generator=generator).to(query_dtype or dtype).to(device)
    cache, padding = cache.to(device), 3
    new = torch.cat((*rows, torch.zeros(padding, rank + rope, dtype=dtype))).to(device)
    where = torch.cat((*slots, torch.full((padding,), -1))).to(device)
    write_rows(cache, records, new[:, :rank], new[:, rank:], where)
    settings = {"teams_per_head": 4, "heads_in_model": heads, "layer": 3, "seed": 17, "scale": 0.3, **sampling}
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    rows = [part.to(device) for part in rows]
    return Paged(
        query, rows, cache, records, block_table.to(device), seq_lens, PagedSampling(**settings), rank
    )  # fmt: skip
