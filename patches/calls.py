"""What a call of the base model is, told from numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from latent_santa.ahead import Ahead
from latent_santa.step import Suffix

if TYPE_CHECKING:
    from latent_santa.access import AccessLedger

    from .cache_layer import TeamLayer
    from .spread_counts import SpreadCounts


class Kind(str, Enum):
    """Kinds of calls.

    PREFILL is dense, and its rows get grouped. VERIFY is several tokens whose rows join the suffix: drafts to verify,
    or a turn too short to group; dense. DECODE is one token, sampled; REPLAY is the prompt's last token, sampled again
    (Appendix F). DENSE is one token under a method that samples nothing. UNCACHED has no rows to group.
    """

    PREFILL = "prefill"
    VERIFY = "verify"
    DECODE = "decode"
    REPLAY = "replay"
    DENSE = "dense"
    UNCACHED = "uncached"

    @property
    def sampled(self) -> bool:
        """Whether attention is estimated in it."""
        return self in (Kind.DECODE, Kind.REPLAY)

    @property
    def one_token(self) -> bool:
        """Whether it is a decoding step: one new token per sequence."""
        return self in (Kind.DECODE, Kind.DENSE)

    @property
    def counted(self) -> bool:
        """Whether the ledger counts it: prefill is outside the counter (Appendix C.1)."""
        return self in (Kind.DECODE, Kind.REPLAY, Kind.DENSE, Kind.VERIFY)


def classify(
    held: int,
    new: int,
    *,
    turn: int,
    sampled: bool,
    chunked: bool = False,
    prompt: int | None = None,
) -> tuple[Kind, int]:
    """Name a call on a cache, and say how many of its first tokens are prompt tokens to be grouped.

    Args:
        held: rows that the cache holds already.
        new: the call's tokens.
        turn: fewest tokens of a further turn that are grouped; a shorter one joins the suffix.
        sampled: whether the method samples.
        chunked: whether the call is a piece of a prompt that is given in chunks.
        prompt: in a generation with drafts the prompt's length: what follows it in a call are drafts.
    """
    if held and new == 1 and not chunked:
        return (Kind.DECODE if sampled else Kind.DENSE), 0
    ours = new if prompt is None else min(max(prompt - held, 0), new)
    if ours < new:
        return Kind.VERIFY, ours if ours and (not held or ours >= turn) else 0
    if not held or chunked or new >= turn:
        return Kind.PREFILL, new
    return Kind.VERIFY, 0


@dataclass
class ModelCall:
    """One forward call of the base model.

    Attributes:
        kind: what it is.
        layers: the cache's layers.
        visible: ``(B, L)`` bool over all rows including this call's, or None when all are real.
        size: B, and rows including this call's.
        step: ``(B,)`` int64, rows that each sequence sees at its last token; None until somebody asks (:meth:`on`).
        ledger: where its reads are recorded.
        full: whether K covered every team, which makes it dense attention; known once its first layer has run.
        as_captured: whether rows and teams are known to stand as the captured step on them left them.
    """

    kind: Kind
    layers: Sequence[TeamLayer] = ()
    visible: Tensor | None = None
    size: tuple[int, int] = (0, 0)
    step: Tensor | None = None
    ledger: AccessLedger | SpreadCounts | None = None
    full: bool = False
    as_captured: bool = False
    _moved: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict)
    _ahead: Ahead | None = None

    def on(self, name: str, device: torch.device) -> Tensor | None:
        """``visible`` or ``step`` on a layer's device, moved once per call."""
        if name == "step" and self.step is None:  # a replayed graph counts by itself
            batch, rows = self.size
            full = torch.full((batch,), rows, dtype=torch.int64, device=device)
            self.step = full if self.visible is None else self.visible.sum(-1)
        value: Tensor | None = getattr(self, name)
        if value is None or value.device == device:
            return value
        key = (name, device)
        if key not in self._moved:
            self._moved[key] = value.to(device)
        return self._moved[key]

    def noise_key(self, layer: int, device: torch.device) -> Tensor:
        """``(B, 2)`` int64 noise keys of the call's sequences."""
        key = self.layers[layer].noise_key
        assert key is not None
        return key.to(device)

    def suffix(self, layer: int, device: torch.device) -> Suffix:
        """Rows in no team, which the layer's query attends exactly."""
        return self.layers[layer].suffix(self.on("visible", device))

    def dense_mask(self, mask: Tensor | None, implementation: str) -> Tensor | None:
        """The mask that the model's own attention takes."""
        return mask

    @property
    def ahead(self) -> Ahead:
        """The noise of the call's layers, made ahead by whoever draws in PyTorch."""
        if self._ahead is None:
            self._ahead = Ahead([layer.need for layer in self.layers])
        return self._ahead
