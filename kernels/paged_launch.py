"""The launches of one paged step: each gets its arguments by keyword."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from latent_santa.integers import ceil_div
from latent_santa.noise import noise_keys

from .device import launches_early, processors, shared_memory
from .launch import ELEMENT
from .paged import PagedScratch, sizes_of
from .paged_attend import paged_attend_kernel, paged_combine_kernel
from .paged_route import paged_route_kernel
from .paged_select import paged_pool_kernel, paged_select_kernel
from .plan import (
    Plan,
    Shapes,
    candidate_blocks,
    candidates,
    choose,
    mask_words,
    padded_teams,
    power,
    ranked,
    ranking_warps,
    tiles,
)
from .select import TEAMS

if TYPE_CHECKING:
    from latent_santa.paged import PagedRecords, PagedSampling


@lru_cache
def planned(shapes: Shapes, overrides: tuple[tuple[str, Any], ...]) -> Plan:
    """The plan for these shapes, with overrides."""
    return replace(choose(shapes), **dict(overrides))


@lru_cache
def noise_seed(seed: int) -> int:
    """The Philox key of all requests as one signed 64-bit integer."""
    low, high = noise_keys(seed, [0], "cpu")[0].tolist()
    key = low | high << 32
    return key - (1 << 64) if key >> 63 else key


def shapes_of(
    table: tuple[int, int],
    heads: int,
    dims: tuple[int, int],
    query_dtype: torch.dtype,
    dtype: torch.dtype,
    block_size: int,
    sampling: PagedSampling,
    device: torch.device,
) -> Shapes:
    """Shapes of a step with a block table of ``table`` = (requests, columns)."""
    p, r, k, k1 = (
        sampling.parent_size, sampling.representatives, sampling.teams_per_head, sampling.parents_per_head
    )  # fmt: skip
    batch, rows = table[0], table[1] * block_size
    teams, parents = rows // p * r, rows // p
    first = {}
    if teams > k and sampling.dense_below <= rows and k1 is not None and parents > k1:
        first = {"parents": parents, "parents_per_head": k1, "most_teams": r}
    shapes = Shapes(
        batch=batch,
        groups=1,
        heads=heads,
        prompt=rows,
        suffix=power(block_size, 64),
        teams=teams,
        dims=dims,
        values=dims[0],
        latent=True,
        dtype=dtype,
        split=query_dtype == torch.float32 and dtype != torch.float32,
        bits=16,
        teams_per_head=k,
        # no team has more rows than the others of its parent leave
        most_rows=min(heads * k * (p - r + 1), rows),
        processors=processors(device),
        shared_memory=shared_memory(device),
        joint=False,  # rows are in blocks of many requests
        **first,
    )
    return shapes._replace(teams_per_head=min(k, shapes.places))


def scratch_bytes(
    table: tuple[int, int],
    heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    block_size: int,
    sampling: PagedSampling,
    device: torch.device,
) -> int:
    """Bytes that :class:`PagedScratch` holds after a step with such a block table; queries are of the cache's dtype."""
    s = shapes_of(table, heads, dims, dtype, dtype, block_size, sampling, device)
    sizes = sizes_of(s, planned(s, ()), sampling.estimator == "pooled", sampling.parent_size)
    return sum(math.prod(shape) * held.itemsize for held, shape in sizes.values())


class PagedLaunches:
    """One step's arguments, and a method for each launch; arguments as in :func:`latent_santa.paged.paged_attention`.

    Attributes:
        everything: no request of this block table can have more than K teams, so none is scored.
    """

    def __init__(
        self,
        query: tuple[Tensor, Tensor],
        cache: Tensor,
        records: PagedRecords,
        block_table: Tensor,
        seq_lens: Tensor,
        sampling: PagedSampling,
        scratch: PagedScratch,
        dense: Tensor | None = None,
    ) -> None:
        self.records, self.table, self.seq_lens, self.sampling = records, block_table, seq_lens, sampling
        # without flags any tensor does: it is not read
        self.flagged, self.dense = dense is not None, seq_lens if dense is None else dense.view(torch.uint8)
        batch, heads, rank = query[0].shape
        self.query, self.parts = query, (cache[..., :rank], cache[..., rank:])
        table, dims = (batch, block_table.shape[1]), (rank, query[1].shape[2])
        self.shapes = shapes_of(
            table, heads, dims, query[0].dtype, cache.dtype, records.block_size, sampling, cache.device
        )  # fmt: skip
        rows, teams = self.shapes.prompt, self.shapes.teams
        self.everything = teams <= sampling.teams_per_head or sampling.dense_below > rows
        self.two_stage = self.shapes.parents > 0
        self.pooled = sampling.estimator == "pooled"
        self.plan = planned(self.shapes, tuple(scratch.overrides.items()))
        self.buffers = scratch.buffers(sizes_of(self.shapes, self.plan, self.pooled, records.parent_size), cache.device)
        self.walking = scratch.programs * self.shapes.processors
        self.early = launches_early(cache.device)

    def routing(self) -> dict[str, Callable[[], None]]:
        """The launches before :meth:`attend`, by name and in order."""
        if self.everything:
            return {}
        if self.two_stage:
            from .paged_two_stage import TwoStages

            return TwoStages(self).routing()
        return {"route": self.route, "select": self.select, **({"pool": self.pool} if self.pooled else {})}

    def options(self, warps: int, first: bool = False) -> dict[str, Any]:
        """As in :class:`.launch.Launches`."""
        return {"num_warps": warps, "launch_pdl": True} if self.early and not first else {"num_warps": warps}

    def _requests(self) -> dict[str, Any]:
        """Arguments that tell what each request samples."""
        s, records = self.sampling, self.records
        return {
            "seq_lens": self.seq_lens, "dense": self.dense, "FLAGGED": self.flagged, "K": s.teams_per_head,
            "dense_below": s.dense_below, "H": self.shapes.heads, "SIZE": records.block_size, "SLOTS": records.slots,
        }  # fmt: skip

    def _queries(self) -> dict[str, Any]:
        """The queries' parts, and their strides (request, 0, head)."""
        return {
            name: value
            for i, part in enumerate(self.query)
            for name, value in ((f"query{i}", part), (f"query{i}_strides", (part.stride(0), 0, part.stride(1))))
        }

    def _draws(self) -> dict[str, Any]:
        """Arguments that key the noise."""
        s = self.sampling
        shared = s.noise == "shared"
        return {
            "seed": noise_seed(s.seed), "layer": s.layer, "quad": 0 if shared else s.first_head // 4, "SHARED": shared
        }  # fmt: skip

    def programs(self, most: int, tile: int, heads: int = 1) -> int:
        """Programs that walk over the requests' tiles, each of them at most ``most`` teams or parents in tiles of
        ``tile``, for each of so many blocks of heads."""
        return min(self.shapes.batch * ceil_div(most, tile), max(1, self.walking // heads))

    def scoring(self, keys: tuple[Tensor, Tensor]) -> dict[str, Any]:
        """Arguments of a launch that scores rows of ``keys``, a latent part and a rotary one ``(..., D_i)``."""
        s, p = self.shapes, self.plan
        return {
            **self._requests(),
            **self._draws(),
            **self._queries(),
            "latents": keys[0],
            "rotary": keys[1],
            "table": self.table,
            "row": self.records.row,
            "scale": self.sampling.scale,
            "row_strides": (0, 0, keys[0].stride(-2)),
            "table_stride": self.table.stride(0),
            "WORDS": mask_words(s.heads),
            "D0": s.dims[0],
            "D1": s.dims[1],
            "DC0": min(p.route_dims, power(s.dims[0], 16)),
            "DC1": min(p.route_dims, power(s.dims[1], 16)),
            "T": p.route_teams,
            "HB": p.route_heads,
            "SPLIT": s.split,
            "STAGES": p.route_stages,
            "DTYPE": ELEMENT[s.dtype],
            "PDL": self.early,
            "num_stages": p.route_stages,
        }

    def route(self) -> None:
        """Lines 7-8: score the representatives of full blocks and add noise."""
        s, p, b = self.shapes, self.plan, self.buffers
        blocks = ceil_div(s.heads, p.route_heads)
        paged_route_kernel[(self.programs(s.teams, p.route_teams, blocks), blocks)](
            **self.scoring(self.parts),
            size=self.records.size,
            phi=b["phi"] if self.pooled else b["noisy"],
            noisy=b["noisy"],
            tops=b["tops"],
            flags=b["flags"],
            union=b["flags"],
            team_flags=b["flags"],
            MP=padded_teams(s.teams),
            TEAMS_PADDED=0,
            B=s.batch,
            BATCH=power(s.batch),
            BLOCK=p.block,
            PHI=self.pooled,
            EACH=0,
            **self.options(p.route_warps, first=True),
        )

    def selecting(self, places: int, k: int, block: int, coarse: int) -> dict[str, Any]:
        """Arguments of a launch that selects ``k`` of so many scores."""
        p, blocks = self.plan, padded_teams(places) // block
        sizes, warps = {"NT": 0, "COARSE": 0, "NB": 1, "ROOM": power(k)}, p.select_many_warps
        if ranked(k, blocks):
            sizes = {"NT": power(blocks), "COARSE": coarse, "NB": candidate_blocks(k), "ROOM": candidates(k)}
            warps = ranking_warps(p, k)
        return {
            **self._requests(),
            **self._draws(),
            "WANTED": k,
            "PLACES": padded_teams(places),
            "WORDS": mask_words(self.shapes.heads),
            "BLOCK": block,
            "LANES": min(power(max(blocks, k)), p.select_lanes),
            **sizes,
            "POOLED": self.pooled,
            "PDL": self.early,
            **self.options(warps),
        }

    def select(self) -> None:
        """Lines 9-11: find every head's threshold, flag its teams and write their corrections."""
        s, p, b = self.shapes, self.plan, self.buffers
        nothing = b["flags"]
        paged_select_kernel[(s.heads, s.batch)](
            **self.selecting(s.teams, s.teams_per_head, p.block, p.coarse),
            tops=b["tops"],
            noisy=b["noisy"],
            flags=b["flags"],
            union=nothing,
            corrections=b["corrections"],
            places=nothing,
            listed_teams=nothing,
            listed_parents=nothing,
            parent_log_c=nothing,
            blocks=b["blocks"],
            found=b["found"],
            tau=b["tau"],
            kth=b["kth"],
            MP=padded_teams(s.teams),
            CP=0,
            OF=TEAMS,
            EACH=1,
        )

    def pool(self) -> None:
        """One correction per team for all heads (pooled only)."""
        s, p, b = self.shapes, self.plan, self.buffers
        paged_pool_kernel[(self.programs(s.teams, p.pool_teams),)](
            **self._requests(),
            phi=b["phi"],
            tau=b["tau"],
            kth=b["kth"],
            flags=b["flags"],
            pooled=b["pooled"],
            MP=padded_teams(s.teams),
            B=s.batch,
            WORDS=mask_words(s.heads),
            T=p.pool_teams,
            HB=min(power(s.heads), 32),
            BATCH=power(s.batch),
            SHARED=self.sampling.noise == "shared",
            PDL=self.early,
            **self.options(4),
        )

    def attend(self) -> None:
        """Lines 13-18: read the rows of the union and those that are exact."""
        s, p, b, records = self.shapes, self.plan, self.buffers, self.records
        paged_attend_kernel[(p.shares, ceil_div(s.heads, p.attend_heads), s.batch)](
            **self._requests(),
            **self._queries(),
            latents=self.parts[0],
            rotary=self.parts[1],
            table=self.table,
            team=records.team,
            flags=b["flags"],
            corrections=b["pooled"] if self.pooled else b["corrections"],
            list_rows=b["list_rows"],
            list_teams=b["list_teams"],
            list_bits=b["list_teams"] if self.pooled else b["list_bits"],
            list_parents=b["list_parents"],
            part_out=b["part_out"],
            part_max=b["part_max"],
            part_sum=b["part_sum"],
            part_rows=b["part_rows"],
            scale=self.sampling.scale,
            row_stride=self.parts[0].stride(1),
            table_stride=self.table.stride(0),
            MP=padded_teams(s.teams),
            CAPACITY=b["list_rows"].shape[-1],
            PARENTS=b["list_parents"].shape[-1],
            D0=s.dims[0],
            D1=s.dims[1],
            BD0=power(s.dims[0], 16),
            BD1=power(s.dims[1], 16),
            HB=p.attend_heads,
            BN=p.attend_rows,
            LANES=p.lanes,
            WORDS=mask_words(s.heads),
            P=records.parent_size,
            R=records.representatives,
            TALL=p.attend_tall,
            SPLIT=s.split,
            POOLED=self.pooled,
            ALL=self.everything,
            DTYPE=ELEMENT[s.dtype],
            STAGES=p.attend_stages,
            PDL=self.early and not self.everything,
            num_stages=p.attend_stages,
            **self.options(p.attend_warps, first=self.everything),
        )

    def combine(self, out: Tensor, counts: Tensor) -> None:
        """Line 19: put the shares together, into ``out``; add to ``counts``."""
        s, p, b = self.shapes, self.plan, self.buffers
        paged_combine_kernel[(ceil_div(s.values, p.combine_values), s.heads, s.batch)](
            **self._requests(),
            part_out=b["part_out"],
            part_max=b["part_max"],
            part_sum=b["part_sum"],
            part_rows=b["part_rows"],
            teams_scored=b["teams_scored"] if self.two_stage else b["part_rows"],
            out=out,
            counts=counts,
            out_strides=out.stride()[:2],
            counts_stride=counts.stride(0),
            K1=s.parents_per_head,
            TILES=tiles(s, p) if self.two_stage else 0,
            shares=p.shares,
            V=s.values,
            BV=p.combine_values,
            NS=power(p.shares),
            BS=p.combine_shares,
            EACH=s.most_teams,
            PDL=self.early,
            **self.options(p.combine_warps),
        )
