"""Figures 2 and 3 on real rows: by how much one key's logit misses a group's attention mass.

A group's exact mass is sum e^s over its n rows, the surrogate n e^t with t the logit of its routing key. With the mean
key t is the mean logit, and the surrogate is never above the mass (Equation 2). A representative's logit can be off
either way; its factor is then the larger of the ratio and its inverse.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from latent_santa.config import SantaConfig
from latent_santa.rows import scores
from latent_santa.teams import Teams

from .intervals import over_prompts, shown
from .jensen_examples import SHAPES, examples, ratio
from .pictures import new_figure, png

if TYPE_CHECKING:
    from latent_santa.patches import SantaHandle
    from latent_santa.patches.recorded import Recorded

    from .work import Results, Table

MEAN_KEY, REPRESENTATIVE = "mean key", "representative"
# the histogram of log10 of the factor; its last bin also holds what is above
BINS, STEP = 400, 0.02
SHARES = (0.5, 0.9, 0.99)
HEADER = ("Groups", "routing key", "median", "90 %", "99 %", "by mass: median", "mass off by > 10 (%)")
NOTES = (
    "Factor between a group's exact attention mass and n e^t, t being its routing key's logit: 1 is exact; for mean "
    "keys it is the ratio of Figures 2 and 3. Groups of one row are left out. Every call, layer and head counts.",
    "By mass: groups are weighted by their exact share of attention over the prompt, so that those that matter count. "
    "The last column is the mass in groups that are off by a factor of more than 10.",
    "Medians and shares are means over prompts of each prompt's; brackets: 95 % interval over prompts.",
)


def partitions(base: SantaConfig) -> dict[str, SantaConfig]:
    """The groups that are looked at, by the settings that make them."""
    found = {}
    for parents, name in (("kmeans", "k-means"), ("contiguous", "contiguous")):
        found[f"16 rows, {name}"] = base.for_method("centroid", parents=parents, parent_size=16)
        found[f"teams {name} 16/4"] = base.for_method("santa++", parents=parents, parent_size=16, representatives=4)
    return found


def group_sums(s: Tensor, teams: Teams) -> tuple[Tensor, Tensor]:
    """Log of each group's exact mass, and its mean logit, both ``(B, G, H, M)``; padding groups hold no number of use.

    Args:
        s: ``(B, G, H, N)``, scores of the prompt's rows.
    """
    team = teams.team_of_row[:, :, None].long().expand(-1, -1, s.shape[2], -1)
    most = s.new_full((*s.shape[:3], teams.M), -torch.inf).scatter_reduce_(3, team, s, "amax")
    mass = torch.zeros_like(most).scatter_add_(3, team, (s - most.gather(3, team)).exp())
    mean = torch.zeros_like(most).scatter_add_(3, team, s) / teams.sizes[:, :, None].clamp_min(1)
    return most + mass.log(), mean


def histogram(factor: Tensor, weight: Tensor) -> Tensor:
    """Weights by log10 of the factor, ``(BINS,)`` float64, for factors given as natural logarithms."""
    place = (factor.abs() / torch.log(torch.tensor(10.0)).item() / STEP).long().clamp_max(BINS - 1)
    counts = torch.zeros(BINS, dtype=torch.float64, device=factor.device)
    return counts.scatter_add_(0, place.flatten(), weight.flatten().double())


def quantile(counts: list[float], share: float) -> float:
    """The factor that so large a share of the histogram is not above, to a bin's width (5 %)."""
    reached, total = 0.0, sum(counts)
    for place, count in enumerate(counts):
        reached += count
        if reached >= share * total:
            return 10 ** (STEP * (place + 0.5)) if place else 1.0
    return 10 ** (STEP * BINS)


class Jensen:
    """The diagnostic: one key per partition."""

    name = "jensen"
    title = "What one key misses of a group's attention mass"
    notes = NOTES
    least_rows = 32

    def __init__(self, base: SantaConfig) -> None:
        self._partitions = partitions(base)
        self.keys = list(self._partitions)

    def measure(self, santa: SantaHandle, recorded: Recorded, key: str) -> dict[str, Any]:
        """For each routing key two histograms over all layers, calls and heads: of groups, and of attention mass."""
        santa.configure(self._partitions[key])
        found: dict[str, list[Tensor]] = {}
        for layer, teams in enumerate(recorded.teams()):
            assert teams is not None
            prompt = recorded.prompt_rows(layer)
            several = (teams.sizes > 1)[:, :, None]
            for call in range(recorded.calls):
                query, scale = recorded.query(layer, call)
                s = scores(query, prompt.keys, scale)
                log_mass, mean = group_sums(s, teams)
                logits = {MEAN_KEY: mean}
                if teams.representative.max() >= 0:
                    logits[REPRESENTATIVE] = scores(query, (part.float() for part in teams.routing_keys), scale)
                share = (log_mass - s.logsumexp(-1, keepdim=True)).exp()
                for name, t in logits.items():
                    factor = log_mass - teams.sizes[:, :, None].log() - t
                    factor = torch.where(several, factor, 0.0)
                    pair = [histogram(factor, weight * several) for weight in (torch.ones_like(share), share)]
                    old = found.get(name)
                    found[name] = pair if old is None else [a.to(b.device) + b for a, b in zip(old, pair, strict=True)]
        return {"histograms": {name: [counts.tolist() for counts in pair] for name, pair in found.items()}}

    def summary(self, results: Results, settings: dict[str, Any]) -> dict[str, Any]:
        """Quantiles per partition and routing key, the histograms over prompts, and the constructed examples."""
        lines = []
        for partition, tasks in results.items():
            for key in (MEAN_KEY, REPRESENTATIVE):
                own = {
                    task: [p["histograms"][key] for p in prompts if key in p["histograms"]]
                    for task, prompts in tasks.items()
                }
                if not all(own.values()):
                    continue

                def interval(of: Any, own: Any = own) -> dict[str, float | None]:
                    return over_prompts({task: list(map(of, pairs)) for task, pairs in own.items()}, settings["seed"])

                lines.append(
                    {
                        "groups": partition,
                        "key": key,
                        "quantiles": [interval(lambda pair, share=share: quantile(pair[0], share)) for share in SHARES],
                        "by_mass": interval(lambda pair: quantile(pair[1], 0.5)),
                        "mass_above_10": interval(lambda pair: sum(pair[1][round(1 / STEP) :]) / sum(pair[1])),
                        "curves": [
                            [
                                fmean(values)
                                for values in zip(
                                    *(_shares(pair[n]) for pairs in own.values() for pair in pairs), strict=True
                                )
                            ]
                            for n in (0, 1)
                        ],
                    }
                )
        return {"lines": lines, "examples": examples()}

    def tables(self, summary: dict[str, Any]) -> dict[str, Table]:
        """Real groups, and the constructed ones."""
        real = [
            [
                line["groups"],
                line["key"],
                *(shown(interval, 2) for interval in (*line["quantiles"], line["by_mass"])),
                shown(line["mass_above_10"], 1, 100),
            ]
            for line in summary["lines"]
        ]
        made = [
            [name, f"{SHAPES[name][1]:g}", f"{ratio(logits):.4g}", " ".join(f"{s:.2f}" for s in logits)]
            for name, logits in summary["examples"].items()
        ]
        constructed = "Constructed logits (Figures 2 and 3; the paper prints the ratios alone)"
        return {"": (HEADER, real), constructed: (("Shape", "paper's ratio", "ratio", "logits"), made)}

    def pictures(self, summary: dict[str, Any]) -> dict[str, bytes]:
        """The constructed logits above, as in Figure 3, and below how many real groups are off by how much."""
        figure = new_figure(11, 7)
        grid = figure.add_gridspec(2, len(SHAPES), height_ratios=(1, 2))
        for place, (name, logits) in enumerate(summary["examples"].items()):
            axes = figure.add_subplot(grid[0, place], title=f"{name}: {ratio(logits):.3g}")
            axes.bar(range(len(logits)), logits, color=f"C{place}")
            axes.set_xticks([])
            axes.title.set_fontsize(8)
        half = len(SHAPES) // 2
        for n, what in enumerate(("share of groups", "share of attention mass")):
            axes = figure.add_subplot(
                grid[1, n * half : (n + 1) * half], xscale="log", xlabel="off by at least this factor", ylabel=what
            )
            for number, line in enumerate(summary["lines"]):
                style = "-" if line["key"] == MEAN_KEY else "--"
                label = f"{line['groups']}, {line['key']}"
                axes.plot(
                    [10 ** (STEP * b) for b in range(BINS)], line["curves"][n], style, color=f"C{number}", label=label
                )
            for _, wanted in SHAPES.values():
                axes.axvline(wanted, color="black", linewidth=0.6, linestyle=":")
            axes.set_yscale("log")
            axes.set_ylim(1e-4, 1.2)
            axes.grid(alpha=0.3)
        figure.axes[-1].legend(fontsize=7)
        figure.suptitle(f"{summary['settings']['model']}; dotted: the ratios of Figure 3", fontsize=9)
        return {".png": png(figure)}


def _shares(counts: list[float]) -> list[float]:
    """Share of a histogram at or above the beginning of each bin."""
    total, left, found = sum(counts), sum(counts), []
    for count in counts:
        found.append(left / total)
        left -= count
    return found
