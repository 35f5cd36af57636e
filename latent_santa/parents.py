"""Parent groups of the prompt's rows: Algorithm 3 (k-means) and Algorithm 4 (contiguous spans).

A parent partition is an int64 tensor ``(B, G, N)`` that holds each row's parent, -1 for rows that take no part. In
loops these are :func:`latent_santa.naive.kmeans_parents` and :func:`latent_santa.naive.contiguous_parents`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .in_parts import Work, result_of, share_of
from .kmeans import clustering, kmeans_in_parts
from .rows import Rows

if TYPE_CHECKING:
    from .config import SantaConfig


def contiguous_parents(member: Tensor, parent_size: int) -> Tensor:
    """Consecutive spans of P rows (Algorithm 4).

    Spans are counted over rows that take part, so a left-padded sequence gets the spans it would get alone.

    Args:
        member: ``(B, N)`` bool, rows to group.
        parent_size: P.

    Returns:
        ``(B, 1, N)`` int64.
    """
    rank = member.long().cumsum(-1) - 1
    return torch.where(member, rank // parent_size, -1)[:, None]


def requested_parents(rows: int, parent_size: int) -> int:
    """M_parent, the k-means centers asked for (Algorithm 3, line 3): min(N, max(2, floor(N / P)))."""
    return min(rows, max(2, rows // parent_size))


def kmeans_parents(points: list[Tensor], member: Tensor, parent_size: int, seed: int, engine: str) -> list[Tensor]:
    """Minibatch k-means partitions of several layers at once (Algorithm 3, lines 3-5).

    Line 6 omits empty parents; here they keep their numbers, and no row has them.

    Args:
        points: for each layer ``(B, G, N, D)``: content latents in MLA, rotated keys in GQA, as cached. Layers of one
            call share B, N and the device; G and D may differ.
        member: ``(B, N)`` bool, rows to group.
        parent_size: P.
        seed: k-means seed, the same for every layer, group and sequence.
        engine: ``"auto"``, ``"sklearn"`` or ``"torch"``.

    Returns:
        For each layer ``(B, G, N)`` int64.
    """
    with clustering(member.device):
        return result_of(kmeans_parents_in_parts(points, member, parent_size, seed, engine))


def kmeans_parents_in_parts(
    points: list[Tensor], member: Tensor, parent_size: int, seed: int, engine: str
) -> Work[list[Tensor]]:
    """:func:`kmeans_parents` in parts, each of which is to run inside of :func:`~latent_santa.kmeans.clustering`."""
    lengths = member.sum(-1).tolist()
    longest = max(*lengths, 1)
    whole = min(lengths) == member.shape[1]
    # real rows first, so that a padded sequence is the same clustering problem as alone
    order = torch.argsort((~member).to(torch.int8), dim=-1, stable=True)[:, :longest]
    labels: list[Tensor] = [torch.empty(0)] * len(points)
    kinds = _alike(points)
    for number, layers in enumerate(kinds):
        problems = []
        for layer in layers:
            part = points[layer]
            if not whole:
                part = part.gather(2, order[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[-1]))
            problems.append(part.flatten(0, 1))
        groups = points[layers[0]].shape[1]
        # a sequence may have no real row here (a chunk of padding alone): one padding row stands in, without a parent
        rows = [max(length, 1) for length in lengths for _ in range(groups)] * len(layers)
        clusters = [requested_parents(n, parent_size) for n in rows]
        work = kmeans_in_parts(torch.cat(problems), rows, clusters, seed, engine)
        found = yield from share_of(work, number / len(kinds), (number + 1) / len(kinds))
        found = found.view(len(layers), -1, groups, longest)
        if not whole:
            full = torch.full((*found.shape[:3], member.shape[-1]), -1, dtype=torch.int64, device=found.device)
            found = full.scatter_(3, order[:, None].expand_as(found), found).masked_fill_(~member[:, None], -1)
        for layer, part in zip(layers, found.unbind(), strict=True):
            labels[layer] = part
    return labels


def _alike(points: list[Tensor]) -> list[list[int]]:
    """Layer numbers gathered by groups and width, so that alike layers are clustered in one batch."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for layer, part in enumerate(points):
        kinds.setdefault((part.shape[1], part.shape[-1]), []).append(layer)
    return list(kinds.values())


def form_parents(points: list[Tensor], rows: Sequence[Rows], member: Tensor, config: SantaConfig) -> list[Tensor]:
    """Parent partitions of several layers by the configured method; see the two functions above for shapes.

    Args:
        rows: of each layer; with ``parents="probes"`` their fingerprints are clustered instead of the points.
    """
    if config.parents == "contiguous":
        spans = contiguous_parents(member, config.parent_size)
        return [spans.to(part.device).expand(-1, part.shape[1], -1) for part in points]
    if config.parents == "probes":
        points = [part.fingerprints for part in rows if part.fingerprints is not None]
        assert len(points) == len(rows), "the caller makes the fingerprints"
    return kmeans_parents(points, member, config.parent_size, config.kmeans_seed, config.kmeans_engine)
