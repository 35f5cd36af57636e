"""Table 7: how much attention mass a few contiguous windows can hold, beside as many rows chosen one by one.

Equation 12: of a head's dense weights over the prompt, at the prompt's last token, the mass of the K_w heaviest windows
of w rows over the mass of the w K_w heaviest rows. Windows are disjoint; the last one may be short.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from latent_santa.rows import scores

from .intervals import over_prompts, shown
from .paper import paper_value
from .pictures import new_figure, png

if TYPE_CHECKING:
    from latent_santa.patches import SantaHandle
    from latent_santa.patches.recorded import Recorded

    from .work import Results, Table

WIDTH, WINDOWS = 16, 32
THRESHOLDS = (0.5, 0.75, 0.9)
HEADER = ["Task", "WER", "heads (%)"]
NOTES = (
    f"WER: mass of the {WINDOWS} heaviest windows of {WIDTH} rows over that of the {WIDTH * WINDOWS} heaviest rows "
    "(Equation 12), of dense attention at the prompt's last token.",
    "Heads of all layers; brackets: 95 % interval over prompts.",
)


def effectiveness(weights: Tensor, width: int = WIDTH, windows: int = WINDOWS) -> Tensor:
    """WER of attention weights ``(..., N)``, N larger than the chosen rows: ``(...)`` in [0, 1]."""
    short = -weights.shape[-1] % width
    sums = torch.nn.functional.pad(weights, (0, short)).unflatten(-1, (-1, width)).sum(-1)
    chosen = sums.topk(windows, -1).values.sum(-1)
    return chosen / weights.topk(width * windows, -1).values.sum(-1)


class Windows:
    """The diagnostic: one result per prompt."""

    name = "windows"
    title = "Attention mass of contiguous windows"
    notes = NOTES
    keys: Sequence[str] = ("windows",)
    least_rows = WIDTH * WINDOWS + 1

    def measure(self, santa: SantaHandle, recorded: Recorded, key: str) -> dict[str, Any]:
        """WER of every head, layer by layer."""
        found = []
        for layer in range(recorded.layers):
            query, scale = recorded.query(layer, 0)
            s = scores(query, recorded.prompt_rows(layer).keys, scale)
            found.append(effectiveness(s.softmax(-1)).flatten().tolist())
        return {"wer": found}

    def summary(self, results: Results, settings: dict[str, Any]) -> dict[str, Any]:
        """Per task and threshold the share of heads, with the paper's; per layer the mean."""
        tasks = {}
        for task, prompts in results[self.keys[0]].items():
            heads = [[wer for layer in prompt["wer"] for wer in layer] for prompt in prompts]
            tasks[task] = {
                "heads": {
                    str(threshold): {
                        **over_prompts(
                            {task: [fmean(wer >= threshold for wer in own) for own in heads]}, settings["seed"]
                        ),
                        "paper": paper_value("7", settings, task, str(threshold)),
                    }
                    for threshold in THRESHOLDS
                },
                "curve": [fmean(wer >= x / 100 for own in heads for wer in own) for x in range(101)],
                "by_layer": [fmean(map(fmean, layer)) for layer in zip(*(p["wer"] for p in prompts), strict=True)],
            }
        return {"tasks": tasks}

    def tables(self, summary: dict[str, Any]) -> dict[str, Table]:
        """A line per task and threshold, with the paper's value where it has one."""
        paper = any(cell["paper"] for own in summary["tasks"].values() for cell in own["heads"].values())
        lines = [
            [task, f"≥ {threshold}", shown(cell, 1, 100), *([cell["paper"] or "-"] if paper else [])]
            for task, own in summary["tasks"].items()
            for threshold, cell in own["heads"].items()
        ]
        return {"": ([*HEADER, *(["paper"] if paper else [])], lines)}

    def pictures(self, summary: dict[str, Any]) -> dict[str, bytes]:
        """The share of heads above each WER, and the mean WER of each layer."""
        figure = new_figure(10, 4)
        above, layers = figure.subplots(1, 2)
        for task, own in summary["tasks"].items():
            above.plot([x / 100 for x in range(101)], [100 * share for share in own["curve"]], label=task)
            layers.plot(own["by_layer"], marker="o", markersize=3, label=task)
        for threshold in THRESHOLDS:
            above.axvline(threshold, color="black", linewidth=0.7, linestyle=":")
        above.set(xlabel="WER", ylabel="heads with at least that WER (%)")
        layers.set(xlabel="layer", ylabel="mean WER over heads", ylim=(0, 1))
        for axes in (above, layers):
            axes.grid(alpha=0.3)
        above.legend(fontsize=8)
        figure.suptitle(f"{summary['settings']['model']}: {WINDOWS} windows of {WIDTH} rows (Equation 12)", fontsize=9)
        return {".png": png(figure)}
