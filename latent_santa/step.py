"""The one argument and the one result of the method: a decoding step of one layer, how it samples, what it gives."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .ahead import PARENTS, TEAMS, Ahead
from .noise import gumbel_noise
from .peers import Peers
from .rows import Rows
from .teams import Teams

# one layer's draws from here on take longer to compute than to launch
MANY_DRAWS = 1 << 18


@dataclass(frozen=True)
class Draw:
    """What the noise of a step is keyed by (see :mod:`latent_santa.noise`).

    Attributes:
        key: ``(B, 2)`` int64 Philox keys.
        step: ``(B,)`` int64, rows that each sequence sees at this step.
        layer: layer index.
        ahead: makes the draws of several layers at once, where the caller can tell what they need.
        first: numbers in the whole model of the first group and of the first head of a group that this process has.
    """

    key: Tensor
    step: Tensor
    layer: int
    ahead: Ahead | None = None
    first: tuple[int, int] = (0, 0)

    def gumbels(self, groups: int, heads: int, teams: int, shared: bool) -> Tensor:
        """The step's Gumbel noise, ``(B, G, H, M)`` float32."""
        return self._drawn(TEAMS, groups, heads, teams, shared)

    def listed_gumbels(self, index: Tensor, heads: int, teams: int, shared: bool) -> Tensor:
        """The noise of the teams ``index (B, G, T)``, places of -1 aside: ``(B, G, H, T)`` float32.

        It is taken out of all M teams' noise where other layers' comes with that, and drawn alone where that is less.
        """
        batch, groups, listed = index.shape
        place = index.clamp_min(0)
        if 2 * listed < teams and batch * groups * (1 if shared else heads) * teams > MANY_DRAWS:
            return gumbel_noise(self.key, self.step, self.layer, groups, heads, place, shared, self.first)
        drawn = self.gumbels(groups, heads, teams, shared)
        return drawn.gather(3, place[:, :, None].expand(-1, -1, heads, -1))

    def parent_gumbels(self, groups: int, heads: int, parents: int, shared: bool) -> Tensor:
        """Gumbel noise of a first stage over parents, ``(B, G, H, C)`` float32, independent of the teams' noise."""
        return self._drawn(PARENTS, groups, heads, parents, shared)

    def _drawn(self, of: int, groups: int, heads: int, count: int, shared: bool) -> Tensor:
        if self.ahead is not None and self.ahead.serves(of, self.layer, count):
            keyed = (self.key, self.step, self.layer)
            return self.ahead.gumbels(of, *keyed, groups, heads, shared, self.first)[..., :count]
        return gumbel_noise(self.key, self.step, self.layer + of, groups, heads, count, shared, self.first)


@dataclass(frozen=True)
class Suffix:
    """Rows attended exactly: those generated since the prompt was grouped.

    Attributes:
        index: ``(E,)`` int64 cache rows, the same for every sequence; E may be 0.
        visible: ``(B, E)`` bool, False for padding and for places that no row fills yet, or None when all are real.
        room: rows that the suffix may come to hold before the cache moves, or 0 when nobody can tell. Kernels split
            their work by it, so that a step has the same bits whether or not free places are listed.
    """

    index: Tensor
    visible: Tensor | None = None
    room: int = 0

    def counts(self, batch: int) -> Tensor:
        """Real suffix rows of each sequence, ``(B,)`` int64."""
        if self.visible is None:
            return torch.full((batch,), self.index.numel(), dtype=torch.int64, device=self.index.device)
        return self.visible.sum(-1)


@dataclass(frozen=True)
class DecodeStep:
    """One layer's attention for one new token of every sequence.

    Attributes:
        query: parts ``(B, G, H, D_i)``, one per key part of the rows.
        rows: the current cache, N rows.
        teams: the prompt's frozen team records, or None for a method that has none.
        suffix: rows attended exactly.
        draw: what the noise is keyed by.
        scale: the attention module's own scaling.
        visible: ``(B, N)`` bool, False for padding rows, or None when all are real.
        peers: the processes that have the other heads of the same sharing groups, or None where all are here. Rows and
            teams are the same in each.
    """

    query: tuple[Tensor, ...]
    rows: Rows
    teams: Teams | None
    suffix: Suffix
    draw: Draw
    scale: float
    visible: Tensor | None = None
    peers: Peers | None = None

    @property
    def batch(self) -> int:
        """B, sequences."""
        return self.query[0].shape[0]

    @property
    def groups(self) -> int:
        """G, sharing groups: 1 in MLA, the KV heads in GQA."""
        return self.query[0].shape[1]

    @property
    def heads(self) -> int:
        """H, query heads per sharing group, those of this process."""
        return self.query[0].shape[2]

    @property
    def all_heads(self) -> int:
        """Query heads per sharing group, those of all processes."""
        return self.heads * (1 if self.peers is None else self.peers.world)

    def together(self) -> DecodeStep:
        """The step with the heads of all processes; an exchange of queries."""
        assert self.peers is not None
        query = tuple(self.peers.joined(part, 2) for part in self.query)
        return replace(self, query=query, draw=replace(self.draw, first=(self.draw.first[0], 0)), peers=None)


@dataclass(frozen=True)
class Sampling:
    """How a step samples teams.

    Attributes:
        k: K teams per head, before the cap by the number of teams (Equation 5).
        estimator: ``"per_head"`` or ``"pooled"``.
        noise: ``"independent"`` or ``"shared"``.
        parents: K1 parents per head that a first stage samples, or None for routing in one stage.
    """

    k: int
    estimator: str = "per_head"
    noise: str = "independent"
    parents: int | None = None

    @property
    def pooled(self) -> bool:
        """Whether every head of a sharing group uses every team of the union."""
        return self.estimator == "pooled"

    @property
    def shared(self) -> bool:
        """Whether the heads of a sharing group take one draw per team."""
        return self.noise == "shared"


@dataclass(frozen=True)
class Output:
    """Result of one decoding step of one layer.

    Attributes:
        out: ``(B, G, H, V)`` float32, the normalised estimate; in latent space for MLA.
        lse: ``(B, G, H)`` float32, log of the unnormalised mass Z-hat, so that ``out * exp(lse)`` is U-hat.
        routing, union, suffix: ``(B, G)`` int64 row counts of the access ledger.
    """

    out: Tensor
    lse: Tensor
    routing: Tensor
    union: Tensor
    suffix: Tensor
