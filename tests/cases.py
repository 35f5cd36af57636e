"""Random decoding calls for the tests of the method, and the same calls put to the float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from latent_santa import naive as ref
from latent_santa import naive_noise
from latent_santa.estimator import sampled_attention
from latent_santa.methods.gumbel_rows import sampled_rows
from latent_santa.noise import noise_keys
from latent_santa.parents import contiguous_parents
from latent_santa.rows import Rows
from latent_santa.sampling import Selection, select, take_all
from latent_santa.step import DecodeStep, Draw, Output, Sampling, Suffix
from latent_santa.teams import Teams, build_teams, freeze_representatives

# (counter, key, output), the known answers published with Random123 for philox4x32, 10 rounds.
PHILOX_KNOWN_ANSWERS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((naive_noise.MASK32,) * 4, (naive_noise.MASK32,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
)  # fmt: skip


@dataclass
class Case:
    """A left-padded batch at one decoding call.

    Prompt rows come first and suffix rows last. After the teams were built the last prompt row was written anew, as a
    replay does, so frozen and current keys differ. Padding rows hold large numbers, so that a leak shows.
    """

    query: tuple[Tensor, ...]
    rows: Rows
    frozen: tuple[Tensor, ...]  # the prompt's key parts at prefill
    points: Tensor
    prompt: Tensor  # (B, N) bool, real prompt rows
    teams: Teams
    suffix: Suffix
    draw: Draw
    scale: float
    parent_size: int
    representatives: int

    def at_step(self, suffix_rows: int, layer: int = 3) -> Case:
        """The same cache when only the first suffix rows exist."""
        visible = None if self.suffix.visible is None else self.suffix.visible[:, :suffix_rows]
        suffix = Suffix(self.suffix.index[:suffix_rows], visible)
        step = self.prompt.sum(-1) + suffix.counts(self.prompt.shape[0])
        return replace(self, suffix=suffix, draw=Draw(self.draw.key, step, layer))

    def run(self, k: int, estimator: str = "per_head", noise: str = "independent", method: str = "santa++") -> Output:
        attend = sampled_rows if method == "gumbel_rows" else sampled_attention
        return attend(self.step, Sampling(k, estimator, noise))

    @property
    def step(self) -> DecodeStep:
        """The case as the method's one argument."""
        suffix = self.rows.length - self.prompt.shape[1]
        visible = torch.nn.functional.pad(self.prompt, (0, suffix), value=False)
        visible[:, self.suffix.index] = True if self.suffix.visible is None else self.suffix.visible
        return DecodeStep(self.query, self.rows, self.teams, self.suffix, self.draw, self.scale, visible)

    def reference(
        self, b: int, g: int, k: int, estimator: str = "per_head", noise: str = "independent", method: str = "santa++"
    ) -> ref.GroupOutput:
        """One sequence and group by the reference, which sees the real rows alone."""
        inputs = self.reference_inputs(b, g, k, estimator, noise, method)
        return (ref.gumbel_rows if method == "gumbel_rows" else ref.attention_group)(**inputs)

    def reference_inputs(
        self, b: int, g: int, k: int, estimator: str = "per_head", noise: str = "independent", method: str = "santa++"
    ) -> dict[str, Any]:
        """Arguments of the reference's `attention_group` or `gumbel_rows`."""
        real = self.prompt[b].nonzero()[:, 0].tolist()
        place = range(self.suffix.index.numel())
        seen = [e for e in place if self.suffix.visible is None or bool(self.suffix.visible[b, e])]
        order = real + [int(self.suffix.index[e]) for e in seen]
        suffix = range(len(real), len(order))
        queries = _joined(self.query, b, g)
        keys, values = _joined(self.rows.keys, b, g)[order], _array(self.rows.values[b, g])[order]
        parents = ref.contiguous_parents(len(real), self.parent_size)
        teams = ref.build_teams(_array(self.points[b, g])[real], parents, self.representatives)
        shared = noise == "shared"
        number = len(real) if method == "gumbel_rows" else len(teams)
        inputs = {
            "queries": queries, "keys": keys, "values": values, "suffix": suffix, "scale": self.scale,
            "noise": reference_noise(self.draw, b, g, len(queries), number, shared),
            "estimator": estimator, "shared": shared,
        }  # fmt: skip
        if method == "gumbel_rows":
            return {**inputs, "prompt": range(len(real)), "budget": k}
        frozen = _joined(self.frozen, b, g)[real]
        return {**inputs, "teams": teams, "routing_keys": [frozen[team.representative] for team in teams], "k": k}


def _array(part: Tensor) -> ref.Array:
    return part.double().numpy()


def _joined(parts: tuple[Tensor, ...], b: int, g: int) -> ref.Array:
    return np.concatenate([_array(part[b, g]) for part in parts], axis=-1)


def reference_noise(draw: Draw, b: int, g: int, heads: int, teams: int, shared: bool) -> list[list[float]]:
    key, step = draw.key[b].tolist(), int(draw.step[b])
    return [[naive_noise.gumbel(key, step, draw.layer, g, h, t, shared) for t in range(teams)] for h in range(heads)]


def make_case(
    layout: str = "gqa",
    heads: int = 2,
    groups: int = 1,
    lengths: Sequence[int] = (21,),
    suffix: int = 0,
    hidden: Sequence[tuple[int, int]] = (),
    parent_size: int = 4,
    representatives: int = 2,
    seed: int = 0,
    scale: float = 0.6,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Draw a case: ``lengths`` real prompt rows per sequence, ``hidden`` (sequence, suffix place) pairs are padding.

    ``"mla"`` rows are a content latent, which is the value too, and a rotary key; ``"gqa"`` rows a key and a value.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    batch, length = len(lengths), max(lengths)
    prompt = torch.arange(length) >= length - torch.tensor(lengths)[:, None]
    dims = (5, 3) if layout == "mla" else (6,)
    parts = [normal(batch, groups, length + suffix, d) for d in dims]
    values = parts[0] if layout == "mla" else normal(batch, groups, length + suffix, 4)
    for part in (*parts, values):
        part[:, :, :length].masked_fill_(~prompt[:, None, :, None], 40.0)
    keys = tuple(part.to(dtype) for part in parts)
    rows = Rows(keys, keys[0] if layout == "mla" else values.to(dtype))
    before = Rows(tuple(part[:, :, :length] for part in keys), rows.values[:, :, :length])
    points = before.keys[0].clone()
    parents = contiguous_parents(prompt, parent_size).expand(-1, groups, -1)
    teams = frozen_teams(before, points, parents, representatives)
    frozen = tuple(part.clone() for part in before.keys)
    for part in rows.keys:
        part[:, :, length - 1] += normal(batch, groups, part.shape[-1]).to(dtype)
    visible = None
    if hidden:
        visible = torch.ones(batch, suffix, dtype=torch.bool)
        for b, e in hidden:
            visible[b, e] = False
            for part in rows.keys:
                part[b, :, length + e] = 40.0
    exact = Suffix(torch.arange(length, length + suffix), visible)
    key = noise_keys(seed + 17, [5 * b + 2 for b in range(batch)], "cpu")
    draw = Draw(key, prompt.sum(-1) + exact.counts(batch), 3)
    query = tuple(normal(batch, groups, heads, d) for d in dims)
    return Case(query, rows, frozen, points, prompt, teams, exact, draw, scale, parent_size, representatives)


def frozen_teams(rows: Rows, points: Tensor, parents: Tensor, representatives: int) -> Teams:
    """Algorithm 2 with the representatives' keys copied from ``rows``."""
    return freeze_representatives(build_teams(points, parents, representatives), rows)


def own_teams(phi: Tensor, gumbels: Tensor, k: int) -> Tensor:
    """``(B, G, H, M)`` bool, the set S of each head, K of them or every real team."""
    return pick(phi, gumbels, k, "per_head", False).log_correction.expand_as(phi) < torch.inf


def pick(phi: Tensor, gumbels: Tensor, k: int, estimator: str, shared: bool) -> Selection:
    """Algorithm 1, lines 4-11, as the operators do them."""
    if phi.shape[-1] <= k:
        return take_all(phi[:, :, 0] > -torch.inf)
    return select(phi, gumbels, k, estimator, shared)


def team_lists(teams: Teams, b: int, g: int) -> list[tuple[list[int], int]]:
    """One sequence and group's teams as (members, representative), read from the records."""
    owners = teams.representative[b, g].tolist()
    members = [(teams.team_of_row[b, g] == t).nonzero()[:, 0].tolist() for t in range(int(teams.count[b, g]))]
    return list(zip(members, owners, strict=False))


def check_records(teams: Teams, member: Tensor) -> None:
    """What must hold of any team records whose real rows are ``member (B, N)``."""
    batch, groups, length = teams.team_of_row.shape
    assert teams.length == length
    assert teams.sizes.shape == teams.representative.shape == (batch, groups, teams.M)
    for part in teams.routing_keys:
        assert part.shape[:3] == (batch, groups, teams.M)
    for name in ("sizes", "count", "team_of_row", "representative"):
        assert getattr(teams, name).dtype == torch.int32, name
    assert teams.M == max(1, int(teams.count.max()))
    for b in range(batch):
        real = member[b].nonzero()[:, 0].tolist()
        for g in range(groups):
            count, lists = int(teams.count[b, g]), team_lists(teams, b, g)
            flat = [row for rows, _ in lists for row in rows]
            assert sorted(flat) == real
            assert all(rows for rows, _ in lists)
            assert teams.sizes[b, g, :count].tolist() == [len(rows) for rows, _ in lists]
            assert teams.sizes[b, g, count:].tolist() == [0] * (teams.M - count)
            assert teams.representative[b, g, count:].tolist() == [-1] * (teams.M - count)
            owner = {row: t for t, (rows, _) in enumerate(lists) for row in rows}
            assert teams.team_of_row[b, g].tolist() == [owner.get(row, -1) for row in range(length)]
            sizes = sorted((len(rows) for rows, _ in lists), reverse=True)
            for n in range(teams.M + 2):
                assert sum(sizes[:n]) <= teams.most_rows(n) <= length
