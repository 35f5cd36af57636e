"""Figure 4: how compact groups are, as the mean Euclidean distance of a row from its group's mean.

Rows are what groups are formed on: keys after rotary encoding in GQA, content latents in MLA. Compared are k-means
clusters, contiguous chunks of 16 rows, and the same chunks after one fixed shuffle of the positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from latent_santa.config import SantaConfig
from latent_santa.parents import contiguous_parents, kmeans_parents
from latent_santa.partition import Partition, wide

from .intervals import over_prompts, shown
from .pictures import bars, new_figure, png

if TYPE_CHECKING:
    from latent_santa.patches import SantaHandle
    from latent_santa.patches.recorded import Recorded

    from .work import Results, Table

SIZE = 16
KMEANS, CONTIGUOUS, RANDOM = "k-means clusters", "contiguous chunks", "random chunks"
HEADER = ["Task", "k-means clusters", "contiguous chunks", "random chunks", "k-means / random", "contiguous / random"]
NOTES = (
    "Mean Euclidean distance (not squared) of every prompt row from its group's mean: over rows, KV heads and layers, "
    "then over prompts; brackets: 95 % interval over prompts.",
    "Rows: keys after rotary encoding in GQA, content latents in MLA, unnormalised.",
    "Random chunks: one fixed shuffle of the positions, cut as contiguous chunks are.",
)


def mean_distance(points: Tensor, groups: Tensor) -> float:
    """Mean distance of the points ``(B, G, N, D)`` from the means of their groups ``(B, G, N)`` int64."""
    partition, rows = Partition(groups.flatten(0, 1)), points.flatten(0, 1)
    return (wide(rows) - partition.mean(rows)[partition.slot]).norm(dim=-1).mean().item()


def shuffled_chunks(length: int, size: int, seed: int) -> Tensor:
    """The chunk of each of ``length`` rows after a shuffle, ``(length,)`` int64."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed)) // size


class Distances:
    """The diagnostic: one result per prompt and grouping."""

    name = "distances"
    title = "Distance of rows from their group's mean"
    notes = NOTES
    keys: Sequence[str] = (CONTIGUOUS, RANDOM, KMEANS)
    least_rows = 1

    def __init__(self, base: SantaConfig) -> None:
        self._base = base

    def measure(self, santa: SantaHandle, recorded: Recorded, key: str) -> dict[str, Any]:
        """The mean distance in every layer."""
        points = [recorded.points(layer) for layer in range(recorded.layers)]
        return {"distance": [mean_distance(p, own) for p, own in zip(points, self._groups(points, key), strict=True)]}

    def _groups(self, points: list[Tensor], key: str) -> list[Tensor]:
        length = points[0].shape[2]
        member = torch.ones(1, length, dtype=torch.bool, device=points[0].device)
        if key == KMEANS:
            return kmeans_parents(points, member, SIZE, self._base.kmeans_seed, self._base.kmeans_engine)
        chunks = contiguous_parents(member, SIZE)
        if key == RANDOM:
            chunks = shuffled_chunks(length, SIZE, 0).to(chunks)[None, None]
        return [chunks.to(part.device).expand(-1, part.shape[1], -1) for part in points]

    def summary(self, results: Results, settings: dict[str, Any]) -> dict[str, Any]:
        """Per task every grouping's distance and layers."""
        tasks: dict[str, Any] = {}
        for key, own in results.items():
            for task, prompts in own.items():
                layers = [prompt["distance"] for prompt in prompts]
                tasks.setdefault(task, {})[key] = {
                    **over_prompts({task: list(map(fmean, layers))}, settings["seed"]),
                    "by_layer": list(map(fmean, zip(*layers, strict=True))),
                }
        return {"tasks": tasks}

    def tables(self, summary: dict[str, Any]) -> dict[str, Table]:
        """A line per task, and the distances as shares of random chunks'."""
        lines = []
        for task, own in summary["tasks"].items():
            ratios = [f"{own[key]['mean'] / own[RANDOM]['mean']:.3f}" for key in (KMEANS, CONTIGUOUS)]
            lines.append([task, *(shown(own[key]) for key in (KMEANS, CONTIGUOUS, RANDOM)), *ratios])
        return {"": (HEADER, lines)}

    def pictures(self, summary: dict[str, Any]) -> dict[str, bytes]:
        """Bars per task as in Figure 4, and each layer's distance as a share of random chunks'."""
        name, tasks = summary["settings"]["model"], summary["tasks"]
        heights = {key: {task: own[key] for task, own in tasks.items()} for key in (KMEANS, CONTIGUOUS, RANDOM)}
        figure = new_figure(7.5, 4)
        axes = figure.add_subplot(xlabel="layer", ylabel="distance / that of random chunks", title=name)
        for key in (KMEANS, CONTIGUOUS):
            of_tasks = [
                [a / b for a, b in zip(own[key]["by_layer"], own[RANDOM]["by_layer"], strict=True)]
                for own in tasks.values()
            ]
            axes.plot(list(map(fmean, zip(*of_tasks, strict=True))), marker="o", markersize=3, label=key)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        return {".png": bars(heights, "mean distance from the group's mean", name), "_layers.png": png(figure)}
