"""Attention error against rows read, for any settings, on the same dense queries and rows.

The error of a call in one layer is ||estimate - dense|| / ||dense|| of the attention output per head, averaged over
heads. A prompt's error is its mean over calls and layers. Rows are Equation 13 or 14, pooled over prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean as mean
from typing import TYPE_CHECKING, Any

from latent_santa.config import SantaConfig
from latent_santa.eval.run.conditions import label, name, running_order, swept

from .frontier_pictures import error_against_rows
from .intervals import over_prompts, shown

if TYPE_CHECKING:
    from latent_santa.patches import SantaHandle
    from latent_santa.patches.recorded import Recorded

    from .work import Results, Table

COUNTS = ("routing_read", "row_read", "numerator", "denominator", "bound")
NOTES = (
    "Error: ||estimate - dense|| / ||dense|| of the attention output per head, on dense decoding's own queries and "
    "rows, averaged over heads, calls, layers and prompts; brackets: 95 % interval over prompts.",
    "KV: rows read of the rows that dense decoding reads, Equation 13 (GQA) or 14 (MLA), routing included, pooled over "
    "prompts, layers and calls; logical access, not time. Routing: the part of it that only chooses.",
    "Bound, of methods that scan every key: the rows that were attended, of dense's, as if no scan had been needed "
    "(hollow in the picture).",
    "*: no other measured setting beats it in both. full: it selects everything there is, which is dense attention. "
    "A picture of more than 20 lines shows those without a star in grey.",
    "An attention error is no task score: it says where to look before scores are paid for.",
)


class Frontier:
    """The diagnostic: one key per setting."""

    name = "frontier"
    title = "Attention error against rows read"
    notes = NOTES
    least_rows = 1

    def __init__(self, conditions: Sequence[SantaConfig]) -> None:
        self._conditions = {label(condition): condition for condition in running_order(conditions)}
        assert len(self._conditions) == len(conditions), "two settings have one label"
        self.keys = list(self._conditions)

    def measure(self, santa: SantaHandle, recorded: Recorded, key: str) -> dict[str, Any]:
        """Errors by layer and by call, and each layer's counts."""
        santa.configure(self._conditions[key])
        santa.reset()
        santa.shadow = True
        try:
            recorded.attend()
        finally:
            santa.shadow = False
        errors = santa.shadow_errors()[..., 0].double()
        return {
            "error_of_layer": errors.mean(1).tolist(),
            "error_of_call": errors.mean(0).tolist(),
            "counts": [[layer[name] for name in COUNTS] for layer in santa.access.per_layer()],
            "full": santa.full_calls == recorded.calls,
        }

    def summary(self, results: Results, settings: dict[str, Any]) -> dict[str, Any]:
        """Every setting in total and by layer, fewest rows first."""
        seed = settings["seed"]
        lines = [self._line(self._conditions[key], tasks, seed) for key, tasks in results.items()]
        lines.sort(key=lambda line: line["kv"])
        for line in lines:
            line["best"] = not line["full"] and not any(_beats(other, line) for other in lines)
        calls = sum(len(prompt["tokens"]) for prompts in next(iter(results.values())).values() for prompt in prompts)
        return {"calls": calls, "lines": lines}

    def _line(self, config: SantaConfig, tasks: dict[str, list[dict[str, Any]]], seed: int) -> dict[str, Any]:
        prompts = [prompt for own in tasks.values() for prompt in own]
        layers = range(len(prompts[0]["counts"]))
        counts = [_summed([prompt["counts"][layer] for prompt in prompts]) for layer in layers]
        total = _summed(counts)
        errors = {task: [mean(prompt["error_of_layer"]) for prompt in own] for task, own in tasks.items()}
        return {
            "name": name(config),
            "S": swept(config)["budget"],
            "config": config.used(),
            "kv": _percent(total, 2),
            "routing": _percent(total, 0),
            "bound": _percent(total, 4) if len(total) > 4 and total[4] != total[1] else None,
            "error": over_prompts(errors, seed),
            "error_of_prompt": errors,
            "full": all(prompt["full"] for prompt in prompts),
            "by_layer": [
                {
                    "kv": _percent(counts[n], 2),
                    "error": mean(mean(prompt["error_of_layer"][n] for prompt in own) for own in tasks.values()),
                }
                for n in layers
            ],
        }

    def tables(self, summary: dict[str, Any]) -> dict[str, Table]:
        """The total, then each setting's range over layers."""
        lines = summary["lines"]
        by_layer = ("Setting", "S", "least", "median", "greatest")
        heading = "By layer: where the error is least, median and greatest (all layers: frontier.json)"
        bounds = any(line["bound"] is not None for line in lines)
        header = (*HEADER[:4], "bound (%)", *HEADER[4:]) if bounds else HEADER
        return {"": (header, [cells(line, bounds) for line in lines]), heading: (by_layer, list(map(_layers, lines)))}

    def pictures(self, summary: dict[str, Any]) -> dict[str, bytes]:
        """The total, and a panel per layer."""
        prompts = sum(summary["prompts_per_task"].values())
        title = f"{summary['settings']['model']}, {summary['calls']} dense calls of {prompts} prompts"
        return error_against_rows(summary["lines"], title)


HEADER = ("Setting", "S", "KV (%)", "routing (%)", "error", "")


def cells(line: dict[str, Any], bounds: bool = False) -> list[str]:
    """A setting's texts under `HEADER`, with its bound where the table has one."""
    numbers = [f"{line['kv']:.1f}", f"{line['routing']:.1f}"]
    if bounds:
        numbers.append("-" if line["bound"] is None else f"{line['bound']:.1f}")
    mark = "full" if line["full"] else "*" if line["best"] else ""
    return [line["name"], str(line["S"] or "-"), *numbers, shown(line["error"], 4), mark]


def _layers(line: dict[str, Any]) -> list[str]:
    ordered = sorted((layer["error"], number) for number, layer in enumerate(line["by_layer"]))
    picked = (ordered[0], ordered[len(ordered) // 2], ordered[-1])
    return [line["name"], str(line["S"] or "-"), *(f"{error:.4f} (layer {number})" for error, number in picked)]


def _summed(counts: Sequence[Sequence[int]]) -> list[int]:
    # results from before the bound was counted end without it
    return [sum(column) for column in zip(*counts, strict=False)]


def _percent(counts: Sequence[int], place: int) -> float:
    return 100 * counts[place] / counts[COUNTS.index("denominator")]


def _beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a setting is no worse in rows and error, and better in one."""
    a, b = ((line["kv"], line["error"]["mean"]) for line in (one, other))
    return a[0] <= b[0] and a[1] <= b[1] and a != b
