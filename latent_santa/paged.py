"""SANTA++ over a paged cache of MLA latents, for engines that keep rows in blocks shared by many requests.

Contiguous parents never cross a block, so a parent's teams (Algorithm 2) belong to the physical block: they are made
when its last row is written and live as long as the block. Chunked prefill, shared prefixes and recomputed requests
need nothing else. A request samples the teams of its full blocks; the block of its newest token is the exact suffix.

A parent of P rows always has R teams, R at most P, so team g of a request belongs to its logical block g // slots.
These are the numbers that the same rows have in one contiguous cache (:func:`latent_santa.teams.build_teams`).

CUDA tensors take the Triton kernels (:mod:`latent_santa.kernels.paged`), CPU tensors the PyTorch functions here, one
request after another: a request has the same bits in any batch and in any blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .estimator import dense_attention, sampled_attention
from .integers import ceil_div
from .noise import noise_keys
from .parent_records import ParentRecords
from .partition import Partition
from .routing_keys import PlainKeys
from .rows import Rows
from .step import DecodeStep, Draw, Sampling, Suffix
from .teams import Teams, assign_rows


@dataclass(frozen=True)
class PagedRecords:
    """Team records of one layer's blocks. A block that is not full has none yet, or those of rows it held before.

    Attributes:
        team: ``(blocks, block_size)`` uint8, each row's team among the R of its parent.
        row: ``(blocks, slots)`` uint8, offset in the block of each team's representative; parent after parent, R each.
        size: ``(blocks, slots)`` uint8, n_g; 0 until the block was first filled.
        parent_size: P.
        representatives: R.
        mean: ``(blocks, block_size / P, rank + rope)`` in the cache's dtype, each parent's mean row, which two-stage
            routing scores; or None.
    """

    team: Tensor
    row: Tensor
    size: Tensor
    parent_size: int
    representatives: int
    mean: Tensor | None = None

    @property
    def block_size(self) -> int:
        """Rows of a block."""
        return self.team.shape[1]

    @property
    def slots(self) -> int:
        """Teams of a block."""
        return self.row.shape[1]

    def bytes(self) -> int:
        """Memory held, in bytes."""
        held = sum(part.numel() for part in (self.team, self.row, self.size))
        return held + (0 if self.mean is None else self.mean.numel() * self.mean.element_size())


@dataclass(frozen=True, kw_only=True)
class PagedSampling:
    """How one layer samples; host values only.

    Attributes:
        teams_per_head: K.
        estimator: ``"per_head"`` or ``"pooled"``.
        noise: ``"independent"`` or ``"shared"``.
        seed: base seed of the noise, below 2**64.
        layer: layer index, which keys the noise.
        first_head: number in the whole model of this process's first head.
        heads_in_model: query heads of the layer over all processes.
        dense_below: requests with fewer rows attend to all of them.
        parents_per_head: K1, parents that a first stage samples (:mod:`latent_santa.two_stage`), for records with
            means; or None for one stage.
        parent_size: P; ``representatives`` R: those of the records.
        scale: the attention module's own scaling.
    """

    teams_per_head: int
    estimator: str = "per_head"
    noise: str = "independent"
    seed: int = 0
    layer: int = 0
    first_head: int = 0
    heads_in_model: int
    dense_below: int = 0
    parents_per_head: int | None = None
    parent_size: int = 16
    representatives: int = 4
    scale: float


def empty_records(
    blocks: int,
    block_size: int,
    parent_size: int,
    representatives: int,
    device: torch.device | str,
    means_of: Tensor | None = None,
) -> PagedRecords:
    """Records of blocks that nothing has filled; with the parents' means of the cache ``means_of``, for two stages.

    Raises:
        ValueError: a parent would cross a block or have fewer than R rows, or offsets would not fit in a byte.
    """
    if parent_size < 1 or block_size % parent_size:
        raise ValueError(f"block_size {block_size} must be a multiple of parent_size {parent_size}")
    if not 1 <= representatives <= parent_size:
        raise ValueError(f"representatives {representatives} must lie between 1 and parent_size {parent_size}")
    if block_size > 256:
        raise ValueError(f"block_size {block_size} is above 256, the most rows that records number in a byte")
    slots = block_size // parent_size * representatives
    team, row, size = (torch.zeros(blocks, n, dtype=torch.uint8, device=device) for n in (block_size, slots, slots))
    mean = None
    if means_of is not None:
        mean = torch.zeros(blocks, block_size // parent_size, means_of.shape[2], dtype=means_of.dtype, device=device)
    return PagedRecords(team, row, size, parent_size, representatives, mean)


def write_rows(cache: Tensor, records: PagedRecords, latent: Tensor, rotary: Tensor, slot_mapping: Tensor) -> None:
    """Write a step's rows into their slots and make the teams of every block that they fill.

    Args:
        cache: ``(blocks, block_size, rank + rope)``, a row's content latent and its rotary key, written in place.
        records: of these blocks, written in place.
        latent: ``(>= tokens, rank)``; Algorithm 2 measures distances on these dimensions as the cache's dtype has them.
        rotary: ``(>= tokens, rope)``.
        slot_mapping: ``(tokens,)`` int64, block * block_size + offset of each token's row, those of a request one after
            another; -1 for padding.
    """
    if cache.is_cuda:
        from .kernels import paged

        return paged.write_rows(cache, records, latent, rotary, slot_mapping)
    real, size = slot_mapping >= 0, records.block_size
    slots, tokens = slot_mapping[real], slot_mapping.numel()
    cache[slots // size, slots % size] = torch.cat((latent[:tokens], rotary[:tokens]), -1)[real].to(cache.dtype)
    filled = slots[slots % size == size - 1] // size
    if filled.numel():
        _group(cache[filled], filled, records, latent.shape[1])


def _group(rows: Tensor, filled: Tensor, records: PagedRecords, rank: int) -> None:
    """The records of the blocks ``filled``, which hold ``rows (filled, block_size, rank + rope)``."""
    r, size = records.representatives, records.parent_size
    parents = (torch.arange(records.block_size) // size).expand(filled.numel(), -1)
    bound = records.block_size // size
    team, chosen = assign_rows(rows[..., :rank], parents, r, bound)
    slot = parents * r + team
    offset = torch.arange(records.block_size).expand_as(slot)
    spare = torch.zeros(filled.numel(), records.slots + 1, dtype=torch.int64)
    row = spare.scatter(1, torch.where(chosen, slot, records.slots), offset)
    records.team[filled] = team.to(torch.uint8)
    records.row[filled] = row[:, :-1].to(torch.uint8)
    if records.mean is not None:
        mean = Partition(parents, bound).mean(rows)[:-1]
        records.mean[filled] = mean.view(-1, *records.mean.shape[1:]).to(rows.dtype)
    records.size[filled] = spare.scatter_add(1, slot, torch.ones_like(slot))[:, :-1].to(torch.uint8)


def paged_attention(
    query: tuple[Tensor, Tensor],
    cache: Tensor,
    records: PagedRecords,
    block_table: Tensor,
    seq_lens: Tensor,
    sampling: PagedSampling,
    counts: Tensor,
    out: Tensor | None = None,
    dense: Tensor | None = None,
) -> Tensor:
    """Sampled attention (Algorithm 1) of one new token of every request.

    A request of n rows has (n - 1) // block_size full blocks. It attends to all n rows where n < ``dense_below`` or
    where these blocks hold at most K teams (lines 3-5). Its noise is keyed by seed, n, layer, head in the whole model
    and team, and so by nothing that the batch or the blocks' places decide.

    Args:
        query: absorbed content queries ``(B, H, rank)`` and rotary queries ``(B, H, rope)``.
        cache: as in :func:`write_rows`; the newest tokens' rows are written.
        records: of these blocks.
        block_table: ``(B, most_blocks)`` int32, the physical blocks of each request; beyond its rows anything.
        seq_lens: ``(B,)`` int32, n; 0 for padding of a graph's batch.
        sampling: settings of this layer.
        counts: ``(>= B, 4)`` int64, added to in place: rows routed, of the union, of the suffix, and read densely.
        out: ``(B, H, rank)`` in the query's dtype to write into, or None for a new tensor.
        dense: ``(>= B,)`` bool or uint8; where it is not 0 the request attends to all of its rows in this step.

    Returns:
        ``(B, H, rank)`` in the query's dtype: the normalised estimate in latent space; zeros for padding.
    """
    if cache.is_cuda:
        from .kernels import paged

        return paged.paged_attention(query, cache, records, block_table, seq_lens, sampling, counts, out, dense=dense)
    out = torch.empty_like(query[0], memory_format=torch.contiguous_format) if out is None else out
    for b, n in enumerate(seq_lens.tolist()):
        if n == 0:
            out[b] = 0
            continue
        blocks = block_table[b, : ceil_div(n, records.block_size)].long()
        rows = cache[blocks].flatten(0, 1)[:n]
        own = sampling if dense is None or not dense[b] else replace(sampling, dense_below=n + 1)
        out[b], _, counted = attend_request((query[0][b], query[1][b]), rows, blocks, records, own)
        counts[b] += torch.tensor(counted)
    return out


def attend_request(
    query: tuple[Tensor, Tensor], rows: Tensor, blocks: Tensor, records: PagedRecords, sampling: PagedSampling
) -> tuple[Tensor, Tensor, tuple[int, int, int, int]]:
    """One request with queries ``(H, rank)`` and ``(H, rope)``, rows ``(n, rank + rope)`` and their ``blocks``.

    Returns:
        ``out (H, rank)`` and ``lse (H,)``, float32, and what :func:`paged_attention` counts.
    """
    n, full = rows.shape[0], (rows.shape[0] - 1) // records.block_size
    parts = tuple(part[None, None] for part in query)
    latent, rotary = (part[None, None] for part in rows.split([part.shape[1] for part in query], 1))
    held = Rows((latent, rotary), latent)
    if n < sampling.dense_below or full * records.slots <= sampling.teams_per_head:
        out, lse = dense_attention(parts, held, None, sampling.scale)
        return out[0, 0], lse[0, 0], (0, 0, 0, n)
    key, first = noise_keys(sampling.seed, [0], "cpu"), (0, sampling.first_head)
    step = DecodeStep(
        parts,
        held,
        teams=_teams_of(held, blocks[:full], records),
        suffix=Suffix(torch.arange(full * records.block_size, n)),
        draw=Draw(key, torch.tensor([n]), sampling.layer, first=first),
        scale=sampling.scale,
    )
    how = Sampling(sampling.teams_per_head, sampling.estimator, sampling.noise, sampling.parents_per_head)
    found = sampled_attention(step, how)
    return found.out[0, 0], found.lse[0, 0], (int(found.routing), int(found.union), int(found.suffix), 0)


def _teams_of(held: Rows, blocks: Tensor, records: PagedRecords) -> Teams:
    """The teams of a request's full ``blocks`` as records of its rows ``held``, numbered through its logical blocks."""
    r, p, size = records.representatives, records.parent_size, records.block_size
    first = torch.arange(blocks.numel())[:, None]
    sizes = records.size[blocks].flatten()[None, None].int()
    parent = first * (size // p) + torch.arange(size) // p
    team = (parent * r + records.team[blocks]).flatten()[None, None].int()
    representative = (first * size + records.row[blocks]).flatten()[None, None].int()
    place = representative.long()[..., None]
    keys = tuple(PlainKeys(part.gather(2, place.expand(-1, -1, -1, part.shape[-1]))) for part in held.keys)
    count = torch.full((1, 1), sizes.shape[-1], dtype=torch.int32)
    row_bound = sizes.flatten().sort(descending=True).values.cumsum(0).tolist()
    parents = None if records.mean is None else _parents_of(held, blocks, records)
    return Teams(sizes, count, team, representative, row_bound, keys, parents)


def _parents_of(held: Rows, blocks: Tensor, records: PagedRecords) -> ParentRecords:
    """The parents of a request's full ``blocks``."""
    assert records.mean is not None
    r, p, means = records.representatives, records.parent_size, records.mean[blocks].flatten(0, 1)[None, None]
    number = means.shape[2]
    sizes = torch.full((1, 1, number), p, dtype=torch.int32)
    of_team = (torch.arange(number * r) // r)[None, None].int()
    count = torch.full((1, 1), number, dtype=torch.int32)
    parts = means.split([part.shape[-1] for part in held.keys], -1)
    return ParentRecords("mean", sizes, count, of_team, r, tuple(PlainKeys(part) for part in parts))
