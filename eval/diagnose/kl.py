"""Table 1: how far the routing distribution is from dense attention over the prompt, before anything is sampled.

Equation 11: a group's routing probability P(g) is a softmax over log n_g plus the scaled score of its routing key, q
spreads it equally over the group's members, and KL(p || q) is in nats, p being dense attention over the prompt's rows.
The paper compares groupings that differ in both partition and key. Here each partition is routed by every key it has:
actual representatives, mean keys, and the groups' exact masses, which no key can beat on that partition.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from latent_santa.config import SantaConfig
from latent_santa.eval.errors import EvalError
from latent_santa.rows import scores
from latent_santa.teams import Teams, build_centroids

from .intervals import over_prompts, shown
from .paper import paper_value
from .pictures import bars

if TYPE_CHECKING:
    from latent_santa.patches import SantaHandle
    from latent_santa.patches.recorded import Recorded

    from .work import Results, Table

REPRESENTATIVE, MEAN_KEY, EXACT = "representative", "mean key", "exact mass"
# what the paper's Table 1 calls a partition with a routing key
IN_TABLE = {
    ("teams k-means 16/4", REPRESENTATIVE): "teams",
    ("clusters k-means B=4", MEAN_KEY): "centroid4",
    ("clusters k-means B=16", MEAN_KEY): "centroid16",
}
NOTES = (
    "KL(p || q) in nats (Equation 11), p being dense attention over the prompt's rows: mean over decoding calls, "
    "layers and heads within a prompt, then over prompts; brackets: 95 % interval over prompts.",
    "The first call is left out: its query is the prompt's last token's, which dense decoding attends in its prefill.",
    "Exact mass: each group gets its exact attention mass, so that only the spreading within groups is left.",
    "No sampling is involved, so there is no budget.",
)


def partitions(base: SantaConfig) -> dict[str, SantaConfig]:
    """The compared partitions, each by the settings that make it."""

    def teams(parents: str) -> SantaConfig:
        return base.for_method("santa++", parents=parents, parent_size=16, representatives=4)

    def clusters(size: int) -> SantaConfig:
        return base.for_method("centroid", parents="kmeans", parent_size=size)

    return {
        "teams k-means 16/4": teams("kmeans"),
        "teams contiguous 16/4": teams("contiguous"),
        "clusters k-means B=4": clusters(4),
        "clusters k-means B=16": clusters(16),
    }


def divergence(s: Tensor, teams: Teams, phi: Tensor) -> Tensor:
    """KL(p || q) per head, ``(B, G, H)``.

    Args:
        s: ``(B, G, H, N)``, scores of the prompt's rows; p is their softmax.
        teams: the partition.
        phi: ``(B, G, H, M)``, unnormalised log P(g).
    """
    sizes = teams.sizes[:, :, None]
    log_share = phi.masked_fill(sizes == 0, -torch.inf).log_softmax(-1) - sizes.clamp_min(1).log()
    team = teams.team_of_row[:, :, None].long().expand(-1, -1, s.shape[2], -1)
    log_p = s.log_softmax(-1)
    return (log_p.exp() * (log_p - log_share.gather(3, team))).sum(-1)


def log_masses(s: Tensor, teams: Teams) -> Tensor:
    """Each group's share of dense attention, as a logarithm: ``(B, G, H, M)``."""
    team = teams.team_of_row[:, :, None].long().expand(-1, -1, s.shape[2], -1)
    mass = s.new_zeros(*s.shape[:3], teams.M).scatter_add_(3, team, s.softmax(-1))
    return mass.clamp_min(torch.finfo(mass.dtype).tiny).log()


def routed(query: tuple[Tensor, ...], teams: Teams, scale: float) -> Tensor:
    """Log P(g) before normalisation: log n_g plus the scaled score of the routing key, ``(B, G, H, M)``."""
    return scores(query, (part.float() for part in teams.routing_keys), scale) + teams.sizes[:, :, None].log()


class Divergence:
    """The diagnostic: one key per partition."""

    name = "kl"
    title = "KL of routing from dense attention"
    notes = NOTES
    least_rows = 16

    def __init__(self, base: SantaConfig) -> None:
        self._partitions = partitions(base)
        self.keys = list(self._partitions)

    def measure(self, santa: SantaHandle, recorded: Recorded, key: str) -> dict[str, Any]:
        """Each routing key's mean divergence in every layer, over decoding calls and heads."""
        if recorded.calls < 2:
            return {"layers": {}}  # the answer ended at once: no decoding call
        santa.configure(self._partitions[key])
        found: dict[str, list[float]] = {}
        for layer, teams in enumerate(recorded.teams()):
            assert teams is not None
            prompt = recorded.prompt_rows(layer)
            keys = {MEAN_KEY: build_centroids(prompt, teams.team_of_row.long())}
            if self._partitions[key].method == "santa++":
                keys[REPRESENTATIVE] = teams
            sums: dict[str, Tensor] = {}
            for call in range(1, recorded.calls):
                query, scale = recorded.query(layer, call)
                s = scores(query, prompt.keys, scale)
                routes = {name: (own, routed(query, own, scale)) for name, own in keys.items()}
                for name, (own, phi) in {**routes, EXACT: (teams, log_masses(s, teams))}.items():
                    sums[name] = sums.get(name, torch.zeros((), device=s.device)) + divergence(s, own, phi).mean()
            for name, total in sums.items():
                found.setdefault(name, []).append(total.item() / (recorded.calls - 1))
        return {"layers": found}

    def summary(self, results: Results, settings: dict[str, Any]) -> dict[str, Any]:
        """One line per partition and routing key: each task's mean, its interval, its layers, and the paper's value."""
        lines = []
        for partition, tasks in results.items():
            for key in (REPRESENTATIVE, MEAN_KEY, EXACT):
                cells = {}
                for task, prompts in tasks.items():
                    known = [prompt["layers"][key] for prompt in prompts if key in prompt["layers"]]
                    if known:
                        interval = over_prompts({task: [fmean(layers) for layers in known]}, settings["seed"])
                        by_layer = [fmean(layer) for layer in zip(*known, strict=True)]
                        what = IN_TABLE.get((partition, key), "")
                        cells[task] = {
                            "kl": interval,
                            "by_layer": by_layer,
                            "paper": paper_value("1", settings, task, what),
                        }
                if cells:
                    lines.append({"partition": partition, "key": key, "tasks": cells})
        if not lines:
            raise EvalError("every answer ended with its first token, so there is no decoding call to look at")
        first = next(iter(results.values()))
        calls = {task: fmean(len(prompt["tokens"]) - 1 for prompt in prompts) for task, prompts in first.items()}
        return {"calls_per_prompt": calls, "lines": lines}

    def tables(self, summary: dict[str, Any]) -> dict[str, Table]:
        """A column per task, and the paper's beside it where it has one."""
        tasks, cells = list(summary["calls_per_prompt"]), [line["tasks"] for line in summary["lines"]]
        with_paper = [task for task in tasks if any(task in own and own[task]["paper"] for own in cells)]
        header = ["Partition", "routed by"]
        for task in tasks:
            header += [task, *(["paper"] if task in with_paper else [])]
        body = []
        for line in summary["lines"]:
            texts = [line["partition"], line["key"]]
            for task in tasks:
                cell = line["tasks"].get(task)
                texts.append(shown(cell["kl"]) if cell else "-")
                if task in with_paper:
                    texts.append((cell and cell["paper"]) or "-")
            body.append(texts)
        calls = [[task, f"{number:.2f}"] for task, number in summary["calls_per_prompt"].items()]
        return {"": (header, body), "Decoding calls per prompt": (["Task", "calls"], calls)}

    def pictures(self, summary: dict[str, Any]) -> dict[str, bytes]:
        """Bars per task."""
        heights = {
            f"{line['partition']}, {line['key']}": {task: cell["kl"] for task, cell in line["tasks"].items()}
            for line in summary["lines"]
        }
        return {".png": bars(heights, "KL(p || q) in nats", f"{summary['settings']['model']}: routing against dense")}
