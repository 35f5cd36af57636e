"""Routing keys in 8 or 4 bits: what scoring representatives reads, and nothing else.

Routing reads one key a team on every step, most of what a sampled step reads at long contexts. The estimator stays
unbiased under any routing scores, as long as the corrections use the same ones (Appendix A), so the routing copy may
be coarse. A key less the keys' mean becomes symmetric integer codes with one scale per group of consecutive dimensions.
A code stands for code times scale, which float32 holds exactly and no backend rounds.

The mean never comes back: it adds one number to all of a head's scores, and neither their order under noise nor their
distance from the threshold, which is all that selections and corrections depend on, knows of it. Real keys have a few
dimensions with a large common part, which would set their group's scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

BITS = {"int8": 8, "int4": 4}
GROUPS = {"int8": 64, "int4": 64}


@dataclass
class QuantisedKeys:
    """One part of the routing keys, ``(B, G, M, D)`` as codes. It stands in for a tensor in ``Teams.routing_keys``.

    Attributes:
        codes: ``(B, G, M, D)`` int8, or for 4 bits ``(B, G, M, D / 2)`` uint8: two neighbouring groups share bytes, the
            first in their low nibbles and the second in their high ones, each plus 8.
        scales: ``(B, G, M, D / group)`` float16.
        bits: 8 or 4.
        group: dimensions that share a scale.
        center: ``(B, G, 1, D)``, what was taken off every key, or None for nothing.
    """

    codes: Tensor
    scales: Tensor
    bits: int
    group: int
    center: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """``(B, G, M, D)``, the shape of what the codes stand for."""
        return torch.Size((*self.scales.shape[:-1], self.scales.shape[-1] * self.group))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def float(self) -> Tensor:
        """``(B, G, M, D)`` in float32, less the center; all that :func:`latent_santa.rows.scores` asks for."""
        codes = self.codes
        if self.bits == 4:
            pairs = codes.unflatten(-1, (-1, self.group))
            codes = torch.cat((pairs & 15, pairs >> 4), -1).flatten(-2).to(torch.int8) - 8
        values = codes.unflatten(-1, (-1, self.group)).float() * self.scales[..., None].float()
        return values.flatten(-2)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> QuantisedKeys:
        """The keys with ``change``, which touches no dimension but batch and group, applied to every tensor."""
        center = None if self.center is None else change(self.center)
        return replace(self, codes=change(self.codes), scales=change(self.scales), center=center)

    def to(self, device: torch.device | str) -> QuantisedKeys:
        """The same codes on another device."""
        return self.mapped(lambda part: part.to(device))

    def bytes(self) -> int:
        """Memory held, which is also what a routing pass reads."""
        return self.codes.numel() * self.codes.element_size() + self.scales.numel() * self.scales.element_size()

    # Teams.bytes() asks a part for these two, as it would a tensor
    def numel(self) -> int:
        return self.bytes()

    def element_size(self) -> int:
        return 1


KeyPart = Tensor | QuantisedKeys


def scale_group(dims: int, routing_dtype: str) -> int:
    """Dimensions that share a scale: the format's default, halved until it divides the dimensions (half of them for
    int4, where two groups share bytes).

    Raises:
        ValueError: ``dims`` has no group of 8 or more.
    """
    span = dims // 2 if routing_dtype == "int4" else dims
    group = GROUPS[routing_dtype]
    while span % group:
        group //= 2
    if group < 8 or (routing_dtype == "int4" and dims % 2):
        raise ValueError(
            f"routing_dtype={routing_dtype!r}: {dims} key dimensions do not divide into groups of 8 or more"
        )
    return group


def quantise(keys: Tensor, routing_dtype: str, group: int | None = None, center: Tensor | None = None) -> QuantisedKeys:
    """Symmetric codes of ``keys (B, G, M, D)``, less ``center (B, G, 1, D)`` if given.

    Args:
        routing_dtype: ``"int8"`` (codes -127..127) or ``"int4"`` (-7..7).
        group: dimensions that share a scale; None takes :func:`scale_group`.

    Raises:
        ValueError: another ``routing_dtype``, or a group that does not divide the dimensions.
    """
    if routing_dtype not in BITS:
        raise ValueError(f"routing_dtype={routing_dtype!r}: must be one of {', '.join(map(repr, BITS))}")
    bits, dims = BITS[routing_dtype], keys.shape[-1]
    group = scale_group(dims, routing_dtype) if group is None else group
    span = dims // 2 if bits == 4 else dims
    if group < 1 or span % group or (bits == 4 and dims % 2):
        raise ValueError(f"group={group}: must divide {span} ({'half of ' if bits == 4 else ''}{dims} key dimensions)")
    largest = 2 ** (bits - 1) - 1
    rest = keys.float() if center is None else keys.float() - center.float()
    grouped = rest.unflatten(-1, (-1, group))
    # the scale is rounded before it is used, so codes fit the scale that is stored
    scales = (grouped.abs().amax(-1) / largest).to(torch.float16)
    step = scales.float().clamp_min(torch.finfo(torch.float16).tiny)[..., None]
    codes = (grouped / step).round().clamp(-largest, largest).flatten(-2).to(torch.int8)
    if bits == 4:
        low, high = (codes + 8).to(torch.uint8).unflatten(-1, (-1, 2, group)).unbind(-2)
        codes = (low | (high << 4)).flatten(-2)
    return QuantisedKeys(codes.contiguous(), scales.contiguous(), bits, group, center)


def mean_key(keys: Tensor, real: Tensor | None = None) -> Tensor:
    """The mean of ``keys (B, G, M, D)`` over the ``real (B, G, M)`` teams, all of them by default: ``(B, G, 1, D)``.

    Summed in float64 and rounded to the keys' dtype, so that padding teams change nothing.
    """
    if real is None:
        return keys.mean(2, keepdim=True, dtype=torch.float64).to(keys.dtype)
    total = keys.masked_fill(~real[..., None], 0).sum(2, keepdim=True, dtype=torch.float64)
    return (total / real.sum(-1).clamp_min(1)[..., None, None]).to(keys.dtype)


def quantise_parts(
    keys: tuple[KeyPart, ...],
    routing_dtype: str,
    real: Tensor | None = None,
    earlier: tuple[KeyPart, ...] | None = None,
) -> tuple[KeyPart, ...]:
    """All parts of the routing keys; ``"model"`` keeps them as they are.

    Args:
        real: ``(B, G, M)`` bool, teams that are no padding; None for all.
        earlier: parts of an earlier turn, whose centers serve these too: a head's scores must all miss one number.
    """
    if routing_dtype == "model":
        return keys
    found: list[KeyPart] = []
    for i, part in enumerate(keys):
        if isinstance(part, Tensor):
            before = earlier[i] if earlier is not None else None
            center = before.center if isinstance(before, QuantisedKeys) else mean_key(part, real)
            part = quantise(part, routing_dtype, center=center)
        found.append(part)
    return tuple(found)
