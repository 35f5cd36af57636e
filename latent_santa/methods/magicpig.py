"""MagicPIG (Chen et al., 2025): rows sampled by locality-sensitive hashing, weighted by 1 / (probability of that).

Rule: L tables hash a key, less the prompt's mean key, to the signs of its products with K random directions. A head
reads a row when its query falls with it into one bucket of at least two tables. With the angle a between query and
centred key, one table does that with probability p = (1 - a / pi)^K, so the row is read with
u = 1 - (1 - p)^L - L p (1 - p)^(L - 1), and its score becomes s - log u. Four first and 64 last rows of each turn are
read always, like the generated ones. Over the directions both sums, U and Z, are unbiased; the attention output is
their ratio. As in the source, one set of directions serves all layers, heads and steps, so that errors of one
generation are not independent.

Not reproduced: the source keeps hash tables and keys on the CPU and looks buckets up, where every signature is compared
here, and it leaves every sixteenth layer dense.

Count: m = N' K L / (bits of a key), N' being the rows that are hashed: their signatures are scanned, like keys of K L
bits. Hash tables would read a part of them, so that the source stands between this and the access without routing.
u = the union of the heads' samples and the rows that are read always; e = the suffix. Equation 13:
(m + 2 (u + e)) / 2N; Equation 14: (m + u + e) / N, where a key is the whole row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from math import pi
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..access import Unit, partial_unit
from ..estimator import attend_teams
from ..parent_records import ParentRecords
from ..partition import Partition
from ..routing_keys import PlainKeys
from ..rows import Rows, scores
from ..sampling import Selection
from ..step import DecodeStep, Output
from ..teams import Teams
from .base import Choose, Method
from .row_records import of_rows, row_teams

if TYPE_CHECKING:
    from ..config import SantaConfig

FIRST, LAST, HITS = 4, 64, 2
MOST_BITS = 15  # a table's bits are kept in an int16
PIECE = 4096  # rows that are hashed at once


class MagicPIG(Method):
    name = "magicpig"
    about = "rows sampled by hashing (K bits, L tables), corrected by their probability"
    settings = ("hash_bits", "hash_tables", "seed", "first_token")

    def check(self, config: SantaConfig) -> None:
        if config.hash_bits > MOST_BITS:
            raise ValueError(f"hash_bits={config.hash_bits}: magicpig takes at most {MOST_BITS} bits per table")
        if config.hash_tables < HITS:
            raise ValueError(f"hash_tables={config.hash_tables}: magicpig reads rows found in {HITS} tables: give more")

    def grouped_by(self, config: SantaConfig) -> tuple[str, ...]:
        return ("hash_bits", "hash_tables", "seed")

    def build(
        self,
        points: Sequence[Tensor],
        rows: Sequence[Rows],
        member: Tensor,
        config: SantaConfig,
        bound: int | None = None,
        parents: list[Tensor] | None = None,
    ) -> Iterable[Teams | None]:
        """One record per row: its signature, and the length of its centred key. The mean key is its parent's."""
        rank, count = member.long().cumsum(-1) - 1, member.sum(-1, keepdim=True)
        hashed = member & (rank >= FIRST) & (rank < count - LAST)
        for layer in rows:
            device, groups = layer.values.device, layer.values.shape[1]
            own = hashed.to(device)[:, None].expand(-1, groups, -1)
            teams = row_teams(member.to(device), groups)
            centre = _mean_keys(layer, own, of_rows(own[:, :, None], teams)[:, :, 0])
            keys = torch.cat([(key.double() - mean.float().double()) for key, mean in _pairs(layer, centre)], -1)
            kept = (signatures(keys, config), keys.norm(dim=-1, keepdim=True).float())
            place = teams.representative.long().clamp_min(0)[..., None]
            picked = (PlainKeys(part.gather(2, place.expand(-1, -1, -1, part.shape[-1]))) for part in kept)
            yield replace(teams, routing_keys=tuple(picked), parents=centre)

    def attend(self, step: DecodeStep, config: SantaConfig, choose: Choose) -> Output:
        assert step.teams is not None, "this method hashes rows"
        return attend_teams(step, self.selected(step, config), step.teams.M)

    def selected(self, step: DecodeStep, config: SantaConfig) -> Selection:
        """The rows found in two tables by each head, with log u instead of log c, and those that are read always."""
        teams = step.teams
        assert teams is not None and teams.parents is not None, "this method hashes rows"
        hashed = teams.parents.of_team >= 0
        always = (teams.sizes > 0) & ~hashed
        query = signatures(torch.cat(step.query, -1).double(), config)
        signature, _ = (part.codes for part in teams.routing_keys)
        hits = torch.stack([(mine[:, :, None] == signature).sum(-1) for mine in query.unbind(2)], 2)
        found = (hits >= HITS) & hashed[:, :, None]
        log_u = log_sampled(self.cosines(step), config.hash_bits, config.hash_tables)
        log_c = torch.where(found, log_u, torch.where(always[:, :, None], 0.0, torch.inf)).float()
        return Selection(found.any(2) | always, log_c, hashed.sum(-1))

    def cosines(self, step: DecodeStep) -> Tensor:
        """Of the angles between queries and centred keys, ``(B, G, H, M)`` float64."""
        teams = step.teams
        assert teams is not None and teams.parents is not None
        products = of_rows(scores(step.query, (part[:, :, : teams.length] for part in step.rows.keys), 1.0), teams)
        of_means = scores(step.query, (part.float() for part in teams.parents.keys), 1.0)
        parent = teams.parents.of_team.long().clamp_min(0)[:, :, None].expand_as(products)
        lengths = torch.cat(step.query, -1).norm(dim=-1)[..., None] * teams.routing_keys[1].codes[:, :, None, :, 0]
        centred = (products - of_means.gather(-1, parent)).double()
        return (centred / lengths.double().clamp_min(1e-30)).clamp(-1.0, 1.0)

    def every_team(self, teams: Teams, config: SantaConfig) -> bool:
        return teams.M <= FIRST + LAST  # then no row is hashed

    def unit(self, rows: Rows, teams: Teams | None, config: SantaConfig) -> Unit:
        return partial_unit(rows, Fraction(config.hash_bits * config.hash_tables, 8))


def log_sampled(cosine: Tensor, bits: int, tables: int) -> Tensor:
    """log u, the chance that a row falls into its query's bucket in two tables or more; float64."""
    p = (1 - cosine.arccos() / pi) ** bits
    u = 1 - (1 - p) ** tables - tables * p * (1 - p) ** (tables - 1)
    return u.clamp_min(torch.finfo(u.dtype).tiny).log()


def signatures(vectors: Tensor, config: SantaConfig) -> Tensor:
    """K bits in each of L tables of ``vectors (B, G, N, D)`` float64, as ``(B, G, N, L)`` int16.

    Signs of products in float64: they must be the same in any batch.
    """
    towards = directions(vectors.shape[-1], config.hash_bits, config.hash_tables, config.seed, vectors.device)
    weight = 2 ** torch.arange(config.hash_bits, device=vectors.device)
    found = [
        (((piece @ towards) > 0).unflatten(-1, (config.hash_tables, config.hash_bits)) * weight).sum(-1).short()
        for piece in vectors.split(PIECE, 2)
    ]
    return torch.cat(found, 2)


@lru_cache(maxsize=4)
def directions(dims: int, bits: int, tables: int, seed: int, device: torch.device) -> Tensor:
    """Standard normal directions ``(D, L * K)`` float64, drawn on the CPU so that every device has the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dims, tables * bits, generator=generator, dtype=torch.float64).to(device)


def _pairs(rows: Rows, centre: ParentRecords) -> Iterable[tuple[Tensor, Tensor]]:
    return zip(rows.keys, (part.codes for part in centre.keys), strict=True)


def _mean_keys(rows: Rows, hashed: Tensor, of_team: Tensor) -> ParentRecords:
    """The mean key of the hashed rows, as the one parent of their teams; zero where there are none.

    Args:
        hashed: ``(B, G, N)`` bool.
        of_team: ``(B, G, M)`` bool, teams of such rows.
    """
    batch, groups, _ = hashed.shape
    count = hashed.sum(-1)
    part = Partition(torch.where(hashed, 0, -1).flatten(0, 1))
    means = []
    for key in rows.keys:
        mean = key.new_zeros(batch, groups, 1, key.shape[-1])
        if part.slots:
            found = part.mean(key.flatten(0, 1))[: part.slots]
            mean = found.nan_to_num().view_as(mean).to(key.dtype)
        means.append(PlainKeys(mean))
    most = max(int(count.max()), 1)
    owner = torch.where(of_team, 0, -1).int()
    return ParentRecords("mean", count[..., None].int(), (count > 0).int(), owner, most, tuple(means))
