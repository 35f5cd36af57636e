"""Figure 5: accuracy per task of parents from keys and from probe fingerprints, out of a run's summary."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from latent_santa.config import SantaConfig
from latent_santa.eval.report.plots import NoPicture
from latent_santa.eval.report.statistics import mean_interval
from latent_santa.eval.report.tables import markdown_table
from latent_santa.eval.run.conditions import from_manifest, slug
from latent_santa.eval.run.store import Store, write_atomic

from .pictures import bars

HEADER = ("Setting", "S", "KV (%)", "accuracy (%)", "probes minus keys")
NOTES = (
    "Accuracy in percent; brackets: 95 % interval, prompts resampled. KV: rows read, Equation 13 (GQA) or 14 (MLA), "
    "pooled over the task's prompts.",
    "k-means: on keys (content latents in MLA). probes: k-means on standardised products with the prompt's last 64 "
    "queries (Appendix B.5). Probes minus keys: paired on the same prompts.",
)


def figure(store: Store) -> dict[str, Any]:
    """Each task's lines: a setting's accuracy and rows, and probes' paired difference from keys at each budget."""
    summary = json.loads((store.directory / "summary.json").read_text(encoding="utf-8"))
    conditions = from_manifest(store.manifest(), store.manifest_path)
    tasks: dict[str, list[dict[str, Any]]] = {}
    for task in summary["tasks"]:
        for entry, condition in zip(summary["conditions"], conditions, strict=True):
            cell = entry["cells"][task]
            if cell["score"] is None:
                continue  # some prompts have no result yet
            line = {"name": entry["name"], "S": entry["S"], "score": cell["score"], "kv": cell["access"]}
            keys = replace(condition, parents="kmeans")
            if condition.parents == "probes" and keys in conditions:
                line["difference"] = _difference(store, task, condition, keys)
            tasks.setdefault(task, []).append(line)
    return {**{name: summary[name] for name in ("model", "length", "n", "data")}, "tasks": tasks}


def _difference(store: Store, task: str, probes: SantaConfig, keys: SantaConfig) -> dict[str, float] | None:
    """Points of accuracy that probes have over keys on the same prompts; None while a result is missing."""
    scores = [
        {name: r["score"] for name, r in store.results(slug(own)).items() if "error" not in r} for own in (probes, keys)
    ]
    wanted = [prompt.sample.id for prompt in store.prompts() if prompt.sample.task == task]
    if not all(name in own for own in scores for name in wanted):
        return None
    paired = np.array([scores[0][name] - scores[1][name] for name in wanted])
    found = mean_interval({task: paired}, store.manifest()["settings"]["data_seed"])
    return {"value": found.value, "low": found.low, "high": found.high}


def markdown(found: dict[str, Any]) -> str:
    """A table per task."""
    prompts = f"{found['n']} prompts per task at {found['length']} tokens; {found['data']}"
    parts = [f"# Parents from keys and from probes: {found['model']}\n\n{prompts}.\n"]
    for task, lines in found["tasks"].items():
        body = [
            [
                line["name"],
                str(line["S"] or "-"),
                "-" if line["kv"] is None else f"{line['kv']:.1f}",
                _interval(line["score"], ".2f"),
                _interval(line["difference"], "+.2f") if line.get("difference") else "",
            ]
            for line in lines
        ]
        parts.append(f"\n## {task}\n\n{markdown_table(HEADER, body)}")
    return "".join([*parts, "\n## Notes\n\n", *(f"- {note}\n" for note in NOTES)])


def write_figure(directory: Path, plot: bool) -> None:
    """Write probes.json, probes.md and probes.png beside a run's tables."""
    found = figure(Store(directory))
    write_atomic(directory / "probes.json", json.dumps(found, indent=1) + "\n")
    write_atomic(directory / "probes.md", markdown(found))
    if not plot or not found["tasks"]:
        return
    heights: dict[str, dict[str, dict[str, Any]]] = {}
    for task, lines in found["tasks"].items():
        for line in lines:
            score = line["score"]
            interval = {"mean": score["value"], "low": score["low"], "high": score["high"]}
            heights.setdefault(line["name"] + (f" S={line['S']}" if line["S"] else ""), {})[task] = interval
    try:
        picture = bars(heights, "accuracy (%)", f"{found['model']}, {found['length']} tokens (Figure 5)")
        write_atomic(directory / "probes.png", picture)
    except NoPicture as reason:
        print(f"note: no picture: {reason}")


def _interval(found: dict[str, float], form: str) -> str:
    return f"{found['value']:{form}} [{found['low']:{form}}, {found['high']:{form}}]"
