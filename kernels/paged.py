"""The kernels over block tables: the twin of :mod:`latent_santa.paged`, whose functions say what these do.

Four launches, pooled five; in two stages six, pooled seven. Nothing on the device is read from the host, and the grids
depend on the block table's shape and the batch alone, so that one CUDA graph serves every step of a batch size:
programs beyond a request's rows leave at once, and those that score teams walk over the tiles of all requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from latent_santa.integers import ceil_div

from .plan import RUN, Plan, Shapes, mask_words, padded_teams, power, tiles
from .support import MOST_HEADS, MOST_KEY_DIMS, unavailable, unsupported_dtype
from .workspace import Sizes, race

if TYPE_CHECKING:
    from latent_santa.paged import PagedRecords, PagedSampling

# routing and pooling programs per processor: more of them are not all resident, but even out the last round
PROGRAMS = 16


def reason_not(
    query: tuple[Tensor, Tensor],
    cache: Tensor,
    records: PagedRecords,
    block_table: Tensor,
    sampling: PagedSampling,
) -> str | None:
    """Why the kernels cannot run :func:`paged_attention`, or None when they can; depends on shapes and settings."""
    reason = _reason_not_rows(cache, records, query[0].shape[2])
    if reason is not None:
        return reason
    if any(part.dtype not in (torch.float32, cache.dtype) for part in query) or query[0].dtype != query[1].dtype:
        given = " and ".join(str(part.dtype) for part in query)
        return f"the queries are {given}: the kernels take two of float32, or two of the rows' {cache.dtype}"
    if any(part.stride(2) != 1 for part in query) or block_table.stride(1) != 1 or block_table.dtype != torch.int32:
        return "queries and block_table need a contiguous last dimension, and block_table int32"
    if sampling.first_head % 4 and sampling.noise == "independent":
        return f"first_head is {sampling.first_head}: the kernels draw noise for whole quads of heads"
    if sampling.parents_per_head is not None:
        if records.mean is None:
            return "two stages need records with the parents' means: empty_records(means_of=cache)"
        if records.representatives & (records.representatives - 1):
            return f"representatives {records.representatives} must be a power of two for two stages in the kernels"
    if sampling.heads_in_model >= MOST_HEADS:
        return f"{sampling.heads_in_model} query heads: the noise counter holds fewer than {MOST_HEADS}"
    return None


def _reason_not_rows(cache: Tensor, records: PagedRecords, rank: int) -> str | None:
    p = records.parent_size
    if cache.stride(2) != 1 or cache.stride(0) != cache.shape[1] * cache.stride(1):
        return f"the cache has strides {cache.stride()}: the kernels need whole blocks behind one another"
    for name, dims, most in zip(("rank", "rope"), (rank, cache.shape[2] - rank), MOST_KEY_DIMS, strict=True):
        if not 1 <= dims <= most:
            return f"{name} is {dims}: the kernels take 1 to {most}"
    if p & (p - 1) or cache.shape[1] & (cache.shape[1] - 1):
        return f"parent_size {p} and block_size {cache.shape[1]} must be powers of two for the kernels"
    return unavailable(cache.device) or unsupported_dtype(cache.dtype)


@dataclass
class PagedScratch:
    """Scratch memory of one device, shared by all layers, batch sizes and graphs of one stream.

    It grows to the largest step seen: run that one first, before graphs are captured. A graph keeps what it was
    captured with, so growing afterwards leaves the smaller buffers behind.

    Attributes:
        overrides: fields of :class:`.plan.Plan` to use instead of the chosen ones.
        programs: of a launch that walks over tiles, per processor.
    """

    overrides: dict[str, Any] = field(default_factory=dict)
    programs: int = PROGRAMS
    _held: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict, repr=False)
    _captured: list[Tensor] = field(default_factory=list, repr=False)

    def buffers(self, sizes: Sizes, device: torch.device) -> dict[str, Tensor]:
        """A tensor for every name, dtype and shape, its content left over from other steps."""
        found = {}
        for name, (dtype, shape) in sizes.items():
            numel = math.prod(shape)
            held = self._held.get((name, device))
            if held is None or held.numel() < numel:
                held = self._held[name, device] = torch.empty(numel, dtype=dtype, device=device)
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                if not any(held is kept for kept in self._captured):
                    self._captured.append(held)
            found[name] = held[:numel].view(shape)
        return found

    def bytes(self) -> int:
        """Memory held."""
        kept = {id(t): t for t in (*self._held.values(), *self._captured)}
        return sum(t.numel() * t.element_size() for t in kept.values())


DEFAULT = PagedScratch()


def sizes_of(s: Shapes, p: Plan, pooled: bool, parent_size: int) -> Sizes:
    """Dtype and shape of every scratch buffer of a step; ``parent_size`` is P."""
    q, h, padded, parents, places = s.batch, s.heads, *map(padded_teams, (s.teams, s.parents, s.places))
    # a share has pairs of parents in turn, or runs of rows; then runs of the rows in no team, here two at a time, so
    # that the lists' strides stay multiples of 16
    own = 2 * ceil_div(s.prompt, 2 * parent_size * p.shares)
    share = (q, ceil_div(h, p.attend_heads), p.shares)
    lists = (torch.int32, (*share, own * parent_size + 2 * RUN * ceil_div(s.suffix, 2 * RUN * p.shares)))
    scores = race(q, h, places, s.teams_per_head, p.block)
    if s.parents:
        first = race(q, h, parents, s.parents_per_head, p.parent_block)
        scores |= {f"parent_{name}": size for name, size in first.items()}
        scores |= {
            "parent_flags": (torch.int32, (q, mask_words(h), parents)),
            "parent_corrections": (torch.float32, (q, parents, h)),
            "union": (torch.int32, (q, parents // 32)),
            "places": (torch.int32, (q,)),
            "teams_scored": (torch.int32, (q, tiles(s, p))),
            "listed_teams": (torch.int32, (q, places)),
            "listed_parents": (torch.int32, (q, places)),
            "listed_log_c": (torch.float32, (q, places)),
        }
    if not pooled:
        for name in ("phi", "parent_phi"):
            scores.pop(name, None)
    return {
        **scores,
        "flags": (torch.int32, (q, mask_words(h), padded)),
        "corrections": (torch.float32, (q, padded, h)),
        **({"pooled": (torch.float32, (q, padded))} if pooled else {}),
        "list_rows": lists,
        "list_teams": lists,
        "list_parents": (torch.int32, (*share, own)),
        **({} if pooled else {"list_bits": lists}),
        "part_out": (torch.float32, (q, h, p.shares, s.values)),
        "part_max": (torch.float32, (q, h, p.shares)),
        "part_sum": (torch.float32, (q, h, p.shares)),
        "part_rows": (torch.int32, (q, p.shares)),
    }


def write_rows(cache: Tensor, records: PagedRecords, latent: Tensor, rotary: Tensor, slot_mapping: Tensor) -> None:
    """:func:`latent_santa.paged.write_rows`.

    Raises:
        RuntimeError: the kernels cannot take these inputs; the message says why.
    """
    rank, rope = latent.shape[1], rotary.shape[1]
    _refuse(_reason_not_rows(cache, records, rank))
    if latent.stride(1) != 1 or rotary.stride(1) != 1 or not slot_mapping.is_contiguous():
        _refuse("new rows need a contiguous last dimension, and slot_mapping must be contiguous")
    from .launch import current
    from .paged_write import paged_write_kernel

    p = records.parent_size
    if not slot_mapping.numel():
        return
    with current(cache.device):
        paged_write_kernel[(slot_mapping.numel(), records.block_size // p)](
            latents=cache,
            rotary=cache[..., rank:],
            new_latents=latent,
            new_rotary=rotary,
            slot_mapping=slot_mapping,
            team=records.team,
            row=records.row,
            size=records.size,
            mean=records.size if records.mean is None else records.mean,
            row_stride=cache.stride(1),
            new_latent_stride=latent.stride(0),
            new_rotary_stride=rotary.stride(0),
            D=rank,
            BD=power(rank),
            ROPE=rope,
            BROPE=power(rope),
            SIZE=records.block_size,
            P=p,
            R=records.representatives,
            MEANS=records.mean is not None,
            num_warps=4 if p * rank <= 16 * 512 else 8,
        )


def paged_attention(
    query: tuple[Tensor, Tensor],
    cache: Tensor,
    records: PagedRecords,
    block_table: Tensor,
    seq_lens: Tensor,
    sampling: PagedSampling,
    counts: Tensor,
    out: Tensor | None = None,
    scratch: PagedScratch = DEFAULT,
    dense: Tensor | None = None,
) -> Tensor:
    """:func:`latent_santa.paged.paged_attention`.

    Raises:
        RuntimeError: the kernels cannot take these inputs; the message says why.
    """
    _refuse(reason_not(query, cache, records, block_table, sampling))
    from .launch import current
    from .paged_launch import PagedLaunches

    out = torch.empty_like(query[0], memory_format=torch.contiguous_format) if out is None else out
    if not out.shape[0]:
        return out
    with current(cache.device):
        launches = PagedLaunches(query, cache, records, block_table, seq_lens, sampling, scratch, dense)
        for launch in launches.routing().values():
            launch()
        launches.attend()
        launches.combine(out, counts)
    return out


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise RuntimeError(f"the paged kernels cannot run: {reason}")
