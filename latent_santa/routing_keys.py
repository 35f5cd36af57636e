"""Routing keys, which Algorithm 1 scores on line 7: in the cache's dtype, or in codes of 8 or 4 bits.

Routing reads one key per team on every step, most of what a sampled step reads at long contexts. The estimator stays
unbiased under any routing scores, as long as the corrections use the same ones (Appendix A), so the routing copy may
be coarse. Codes are symmetric integers of a key less the keys' mean, with one scale per key part in 8 bits and per
group of consecutive dimensions in 4. A code stands for code times scale, which float32 holds exactly and no backend
rounds. A query is coded for them as well, so that their products are products of integers (:func:`coded_query`).

The mean never comes back: it adds one number to all scores of a head. Selections and corrections depend only on the
scores' order under noise and on their distances from the threshold, which that number leaves as they are. Real keys
have a few dimensions with a large common part, which would otherwise set their group's scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .rows import scores

BITS = {"int8": 8, "int4": 4}
GROUP = 64  # dimensions that share a 4-bit scale, where they divide
SCALES = {8: torch.float32, 4: torch.float16}  # all hold numbers of float16


@dataclass(frozen=True)
class PlainKeys:
    """One part of the routing keys in the cache's dtype.

    Attributes:
        codes: ``(B, G, M, D)``, the keys themselves.
        scales, center: None; :class:`CodedKeys` has them.
        group: 1.
    """

    codes: Tensor
    scales: ClassVar[None] = None
    center: ClassVar[None] = None
    group: ClassVar[int] = 1

    @property
    def bits(self) -> int:
        """Bits per number."""
        return 8 * self.codes.element_size()

    @property
    def shape(self) -> torch.Size:
        """``(B, G, M, D)``."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def float(self) -> Tensor:
        """``(B, G, M, D)`` in float32, or in float64 where the cache is."""
        return self.codes if self.codes.dtype == torch.float64 else self.codes.float()

    def take(self, index: Tensor) -> PlainKeys:
        """The keys of the teams ``index (B, G, T)`` int64."""
        return PlainKeys(_picked(self.codes, index))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> PlainKeys:
        """The keys after ``change``, which may touch batch and group alone."""
        return PlainKeys(change(self.codes))

    def merged(self, later: RoutingKeys, merge: Callable[[Tensor, Tensor], Tensor]) -> PlainKeys:
        """Both keys as one; ``merge`` joins two tensors along M."""
        assert later.scales is None, "teams of one cache have one routing dtype"
        return PlainKeys(merge(self.codes, later.codes))

    def resized(self, change: Callable[[Tensor], Tensor]) -> PlainKeys:
        """The keys after ``change``, which may touch M alone."""
        return PlainKeys(change(self.codes))

    def write_(self, later: RoutingKeys, write: Callable[[Tensor, Tensor], None]) -> None:
        """Write later keys into these ones; ``write`` puts a tensor's teams into another's in place."""
        write(self.codes, later.codes)

    def bytes(self) -> int:
        """Memory held, which is also what a routing pass reads."""
        return self.codes.numel() * self.codes.element_size()


@dataclass(frozen=True)
class CodedKeys:
    """One part of the routing keys, ``(B, G, M, D)``, as integer codes; the interface is that of :class:`PlainKeys`.

    Attributes:
        codes: ``(B, G, M, D)`` int8, or for 4 bits ``(B, G, M, D / 2)`` uint8: two neighbouring groups share bytes, the
            first in their low nibbles and the second in their high ones, each plus 8.
        scales: ``(B, G, M, D / group)``, in the dtype that :data:`SCALES` says, each a number of float16.
        bits: 8 or 4.
        group: dimensions that share a scale.
        center: ``(B, G, 1, D)``, what was subtracted from every key, or None for nothing.
    """

    codes: Tensor
    scales: Tensor
    bits: int
    group: int
    center: Tensor | None = None

    @classmethod
    def of(cls, keys: Tensor, bits: int, group: int, center: Tensor | None = None) -> CodedKeys:
        """The nearest codes of ``keys (B, G, M, D)`` less ``center``, from -127 to 127 or from -7 to 7.

        Raises:
            ValueError: ``group`` does not divide the dimensions (half of them for 4 bits).
        """
        dims = keys.shape[-1]
        span = dims // 2 if bits == 4 else dims
        if group < 1 or span % group or (bits == 4 and dims % 2):
            half = "half of " if bits == 4 else ""
            raise ValueError(f"group={group}: must divide {span} ({half}{dims} key dimensions)")
        largest = 2 ** (bits - 1) - 1
        rest = keys.float() if center is None else keys.float() - center.float()
        grouped = rest.unflatten(-1, (-1, group))
        # the scale is rounded before it is used, so codes fit the scale that is stored
        scales = (grouped.abs().amax(-1) / largest).to(torch.float16).to(SCALES[bits])
        step = scales.float().clamp_min(torch.finfo(torch.float16).tiny)[..., None]
        codes = (grouped / step).round().clamp(-largest, largest).flatten(-2).to(torch.int8)
        if bits == 4:
            low, high = (codes + 8).to(torch.uint8).unflatten(-1, (-1, 2, group)).unbind(-2)
            codes = (low | (high << 4)).flatten(-2)
        return cls(codes.contiguous(), scales.contiguous(), bits, group, center)

    @property
    def shape(self) -> torch.Size:
        """``(B, G, M, D)``, the shape of what the codes stand for."""
        return torch.Size((*self.scales.shape[:-1], self.scales.shape[-1] * self.group))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def float(self) -> Tensor:
        """What the codes stand for, ``(B, G, M, D)`` float32, less the center."""
        codes = self.codes
        if self.bits == 4:
            pairs = codes.unflatten(-1, (-1, self.group))
            codes = torch.cat((pairs & 15, pairs >> 4), -1).flatten(-2).to(torch.int8) - 8
        values = codes.unflatten(-1, (-1, self.group)).float() * self.scales[..., None].float()
        return values.flatten(-2)

    def take(self, index: Tensor) -> CodedKeys:
        """The keys of the teams ``index (B, G, T)`` int64."""
        return replace(self, codes=_picked(self.codes, index), scales=_picked(self.scales, index))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> CodedKeys:
        """The keys after ``change``, which may touch batch and group alone."""
        center = None if self.center is None else change(self.center)
        return replace(self, codes=change(self.codes), scales=change(self.scales), center=center)

    def merged(self, later: RoutingKeys, merge: Callable[[Tensor, Tensor], Tensor]) -> CodedKeys:
        """Both keys as one; ``merge`` joins two tensors along M."""
        assert later.scales is not None and later.bits == self.bits, "teams of one cache have one routing dtype"
        # the kernels read scales as one block, and a merged tensor is a view
        scales = merge(self.scales, later.scales).contiguous()
        return replace(self, codes=merge(self.codes, later.codes), scales=scales)

    def resized(self, change: Callable[[Tensor], Tensor]) -> CodedKeys:
        """The keys after ``change``, which may touch M alone."""
        return replace(self, codes=change(self.codes), scales=change(self.scales))

    def write_(self, later: RoutingKeys, write: Callable[[Tensor, Tensor], None]) -> None:
        """Write later keys into these ones; ``write`` puts a tensor's teams into another's in place."""
        assert later.scales is not None and later.bits == self.bits, "teams of one cache have one routing dtype"
        write(self.codes, later.codes)
        write(self.scales, later.scales)

    def bytes(self) -> int:
        """Memory held, which is also what a routing pass reads."""
        return self.codes.numel() * self.codes.element_size() + self.scales.numel() * self.scales.element_size()


RoutingKeys = PlainKeys | CodedKeys


def _picked(part: Tensor, index: Tensor) -> Tensor:
    return part.gather(2, index[..., None].expand(-1, -1, -1, part.shape[-1]))


def scale_group(dims: int, routing_dtype: str) -> int:
    """Dimensions that share a scale: all in 8 bits; in 4 bits 64, halved until it divides half of the dimensions, since
    two groups share bytes.

    Raises:
        ValueError: ``dims`` does not divide so into groups of 8 or more.
    """
    group = GROUP
    while (dims // 2 if routing_dtype == "int4" else dims) % group:
        group //= 2
    if group < 8 or (routing_dtype == "int4" and dims % 2):
        even = "an even number of " if routing_dtype == "int4" else ""
        other = '"model"' if dims % 8 else '"int8" or "model"'
        raise ValueError(
            f"routing_dtype={routing_dtype!r}: {dims} key dimensions do not divide into {even}groups of 8 or more; "
            f"use {other}"
        )
    return group if routing_dtype == "int4" else dims


def coded_query(query: Tensor) -> Tensor:
    """``query (..., D)`` as keys in codes are scored with it: integers times a power of two, the largest between 2^13
    and 2^14. float32, or float64 where the query is.

    The power makes the product that is rounded exact, so that every backend rounds to the same integers.
    """
    x = query.float()
    # float32's exponent of the largest; below 14 one of the two powers would be no float32
    exponent = (x.abs().amax(-1, keepdim=True).view(torch.int32) >> 23).clamp_min(14)
    power, unit = (((267 - exponent) << 23).view(torch.float32), ((exponent - 13) << 23).view(torch.float32))
    coded = (x * power).round() * unit
    return coded.double() if query.dtype == torch.float64 else coded


def key_scores(query: tuple[Tensor, ...], keys: tuple[RoutingKeys, ...], scale: float) -> Tensor:
    """Scaled scores ``(B, G, H, M)`` of routing keys, like :func:`latent_santa.rows.scores`; keys in codes take a
    :func:`coded_query`."""
    wanted = tuple(q if part.scales is None else coded_query(q) for q, part in zip(query, keys, strict=True))
    return scores(wanted, (part.float() for part in keys), scale)


def quantise(keys: Tensor, routing_dtype: str, center: Tensor | None = None) -> CodedKeys:
    """``keys (B, G, M, D)`` less ``center (B, G, 1, D)`` as ``"int8"`` or ``"int4"`` codes.

    Raises:
        ValueError: another ``routing_dtype``, or dimensions that :func:`scale_group` cannot divide.
    """
    if routing_dtype not in BITS:
        raise ValueError(f"routing_dtype={routing_dtype!r}: must be one of {', '.join(map(repr, BITS))}")
    return CodedKeys.of(keys, BITS[routing_dtype], scale_group(keys.shape[-1], routing_dtype), center)


def mean_key(keys: Tensor, real: Tensor) -> Tensor:
    """The mean of ``keys (B, G, M, D)`` over the ``real (B, G, M)`` teams, ``(B, G, 1, D)``.

    Summed in float64 and rounded to the keys' dtype, so that padding teams change nothing.
    """
    total = keys.masked_fill(~real[..., None], 0).sum(2, keepdim=True, dtype=torch.float64)
    return (total / real.sum(-1).clamp_min(1)[..., None, None]).to(keys.dtype)


def quantise_parts(
    keys: tuple[RoutingKeys, ...],
    routing_dtype: str,
    real: Tensor,
    earlier: tuple[RoutingKeys, ...] | None = None,
) -> tuple[RoutingKeys, ...]:
    """All parts of plain routing keys in codes; ``"model"`` keeps them as they are.

    Args:
        real: ``(B, G, M)`` bool, False for padding teams.
        earlier: parts of an earlier turn, whose centers serve these too: a head's scores must all miss one number.
    """
    if routing_dtype == "model":
        return keys
    assert all(part.scales is None for part in keys), "these routing keys are codes already"
    centers = [mean_key(part.codes, real) for part in keys] if earlier is None else [part.center for part in earlier]
    return tuple(quantise(part.codes, routing_dtype, center) for part, center in zip(keys, centers, strict=True))
