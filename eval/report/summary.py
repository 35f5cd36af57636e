"""From a run's files to its summary: scores with intervals, retained scores, access, paired differences, warnings."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from latent_santa.config import SantaConfig
from latent_santa.eval.report import paper_tables, statistics
from latent_santa.eval.report.paper_tables import MEAN
from latent_santa.eval.report.statistics import Interval
from latent_santa.eval.run.conditions import from_manifest, label, name, old_santa, slug, swept
from latent_santa.eval.run.store import Prompt, Store, write_atomic
from latent_santa.eval.sources.tasks import RAG, mean_label

INVALID = "INVALID"

Results = dict[str, dict[str, Any]]


def pooled_access(results: Sequence[dict[str, Any]], dense: bool, part: str = "numerator") -> float | None:
    """Equation 13 or 14 in percent: summed numerators over summed denominators.

    part  what is summed instead of numerators: "row_read", which leaves routing out, or "bound", the attended rows
          whatever it took to choose them. None if the results are from before it was counted.

    Every prompt counts with its own trajectory's denominator. Dense attention reads everything by definition, also
    where an answer of one token has no decoding call to count; other methods without a call have no access (None).
    """
    if dense:
        return 100.0
    denominator = sum(r["access"].get("denominator", 0) for r in results)
    counted = [r["access"] for r in results if r["access"].get("denominator")]
    if not denominator or any(part not in access for access in counted):
        return None
    return 100 * sum(access[part] for access in counted) / denominator


def access_percent(data: str, results: Sequence[dict[str, Any]], dense: bool, part: str = "numerator") -> float | None:
    """`pooled_access`; of prompts of HELMET (`data`) the mean of the tasks' percentages, as in the paper (C.2)."""
    if data != "helmet":
        return pooled_access(results, dense, part)
    of_task: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        of_task.setdefault(result["id"].rpartition("/")[0], []).append(result)
    found = [pooled_access(own, dense, part) for own in of_task.values()]
    known = [value for value in found if value is not None]
    return sum(known) / len(known) if known and len(known) == len(found) else None


def _scores(prompts: list[Prompt], results: Results, tasks: Sequence[str]) -> dict[str, np.ndarray] | None:
    """Task to per-prompt scores in prompt order; None if a result is missing, as a mean would then not be matched."""
    found: dict[str, list[float]] = {task: [] for task in tasks}
    for prompt in prompts:
        if prompt.sample.task not in found:
            continue
        result = results.get(prompt.sample.id)
        if result is None or "error" in result:
            return None
        found[prompt.sample.task].append(result["score"])
    return {task: np.array(values) for task, values in found.items()}


def _rounded(interval: Interval) -> dict[str, float]:
    return {
        "value": round(interval.value, 2),
        "half": round(interval.half, 2),
        "low": round(interval.low, 2),
        "high": round(interval.high, 2),
    }


class _Report:
    """Works out the cells of one run; `summary` is the whole of it."""

    def __init__(self, store: Store) -> None:
        self.manifest = store.complete_manifest()
        self.settings = self.manifest["settings"]
        self.prompts = store.prompts()
        self.tasks = tuple(self.settings["tasks"])
        self.data = self.manifest["origin"]["data"]
        # a part of the tasks with a mean of its own
        self.groups = {"rag": RAG} if self.data == "helmet" and set(RAG) < set(self.tasks) else {}
        self.conditions = from_manifest(self.manifest, store.manifest_path)
        self.results = {condition: store.results(slug(condition)) for condition in self.conditions}
        self.damaged = store.damaged()
        self.most_tokens = max(prompt.n_tokens for prompt in self.prompts)
        # official data in a folder of another name than their length
        self.short = self.data in ("hub", "jsonl", "helmet") and not paper_tables.of_length(
            self.most_tokens, self.settings["length"]
        )
        self.dense: Results | None = next((self.results[c] for c in self.conditions if c.method == "dense"), None)

    def summary(self) -> dict[str, Any]:
        entries = [self._entry(condition) for condition in self.conditions]
        counts = Counter(prompt.sample.task for prompt in self.prompts).values()
        return {
            "data": data_statement(self.manifest),
            "model": self.settings["model"],
            "length": self.settings["length"],
            "n": max(counts),
            "fewest": min(counts),
            "tasks": list(self.tasks),
            "groups": {name: list(tasks) for name, tasks in self.groups.items()},
            "access_mean": "mean of the tasks' percentages" if self.data == "helmet" else "pooled",
            "mean": mean_label(self.tasks),
            "prompt_tokens": self._lengths(),
            "conditions": entries,
            "estimators": self._estimators(),
            "warnings": [*self.manifest.get("warnings", []), *self._warnings(entries)],
        }

    def _lengths(self) -> dict[str, dict[str, int]]:
        lengths = {task: [p.n_tokens for p in self.prompts if p.sample.task == task] for task in self.tasks}
        return {task: {"least": min(v), "median": int(np.median(v)), "most": max(v)} for task, v in lengths.items()}

    def _entry(self, condition: SantaConfig) -> dict[str, Any]:
        results = self.results[condition]
        good = [result for result in results.values() if "error" not in result]
        own = swept(condition)
        return {
            "name": name(condition),
            "slug": slug(condition),
            "method": condition.method,
            "S": own["budget"],
            "parents": own["parents"],
            "P": own["parent_size"],
            "R": own["representatives"],
            "estimator": own["estimator"],
            "done": len(good),
            "failed": sorted(sample_id for sample_id, result in results.items() if "error" in result),
            "prompts": len(self.prompts),
            "hit_cap": sum(result["hit_cap"] for result in good),
            "new_tokens": sum(result["n_new"] for result in good),
            "cells": {column: self._cell(condition, column) for column in (MEAN, *self.groups, *self.tasks)},
        }

    def _cell(self, condition: SantaConfig, column: str) -> dict[str, Any]:
        """One table cell: of a task, or of an equal-weight mean. Without all of its results it has no score."""
        tasks = self.tasks if column == MEAN else self.groups.get(column, (column,))
        results = self.results[condition]
        wanted = [prompt for prompt in self.prompts if prompt.sample.task in tasks]
        good = [r for p in wanted if (r := results.get(p.sample.id)) is not None and "error" not in r]

        def read(part: str) -> float | None:
            return access_percent(self.data, good, condition.method == "dense", part)

        parts = {"access": "numerator", "access_without_routing": "row_read", "bound": "bound"}
        cell: dict[str, Any] = {
            "n": len(good),
            **{key: _percent(read(part)) if good else None for key, part in parts.items()},
            "score": None,
            "retained": None,
            "difference": None,
            "paper": None,
        }
        value = paper_tables.lookup(
            self.settings | {"data": self.data}, tasks if column in self.groups else self.tasks, condition,
            MEAN if column in self.groups else column,
        )  # fmt: skip
        if value is not None and not self.short:
            cell["paper"] = {"access": value.access, "score": value.score, "half": value.half, "table": value.table}
        scores = _scores(wanted, results, tasks)
        if scores is None:
            return cell
        interval = statistics.mean_interval(scores, self.settings["data_seed"])
        cell["score"] = _rounded(interval)
        dense = _scores(wanted, self.dense, tasks) if self.dense is not None else None
        if dense is not None:
            level = 100 * float(np.mean([values.mean() for values in dense.values()]))
            kept = statistics.retained(interval.value, level)
            cell["retained"] = _percent(kept)
            if condition.method != "dense":
                cell["difference"] = self._paired({task: scores[task] - dense[task] for task in tasks})
        return cell

    def _estimators(self) -> dict[str, Any] | None:
        """Pooled minus per head on matched prompts: at each setting that has both, and over these settings together."""
        settings, differences = [], []
        for pooled in self.conditions:
            twin = replace(pooled, estimator="per_head")
            if pooled.estimator != "pooled" or twin not in self.results:
                continue
            left, right = (_scores(self.prompts, self.results[c], self.tasks) for c in (pooled, twin))
            if left is None or right is None:
                continue
            differences.append({task: left[task] - right[task] for task in self.tasks})
            access = {
                c.estimator: access_percent(self.data, list(self.results[c].values()), False) for c in (twin, pooled)
            }
            settings.append(
                {
                    "name": name(pooled).removesuffix(" pooled"),
                    "S": pooled.budget,
                    "access": {estimator: _percent(value) for estimator, value in access.items()},
                    "difference": self._paired(differences[-1]),
                }
            )
        if not settings:
            return None
        mean = {task: np.mean([difference[task] for difference in differences], axis=0) for task in self.tasks}
        return {"settings": settings, "all": self._paired(mean)}

    def _paired(self, differences: dict[str, np.ndarray]) -> dict[str, float]:
        return _rounded(statistics.mean_interval(differences, self.settings["data_seed"]))

    def _warnings(self, entries: list[dict[str, Any]]) -> list[str]:
        found = list(self.damaged)
        if old_santa(self.manifest) and any(condition.method == "santa" for condition in self.conditions):
            found.append("SANTA of this run sampled rows without replacement, as the method gumbel_rows does now")
        if self.short:
            found.append(
                f"the longest prompt has {self.most_tokens} tokens, so these are not prompts of length "
                f"{self.settings['length']}; the paper's values are left out"
            )
        for condition, entry in zip(self.conditions, entries, strict=True):
            shown = label(condition)
            missing = entry["prompts"] - entry["done"] - len(entry["failed"])
            if entry["failed"]:
                found.append(
                    f"{shown}: {len(entry['failed'])} prompts failed ({', '.join(entry['failed'][:3])} ...); no mean"
                )
            if missing:
                found.append(f"{shown}: {missing} of {entry['prompts']} prompts have no result yet; no mean")
            if condition.method == "dense" or not entry["done"]:
                continue
            good = {i: r for i, r in self.results[condition].items() if "error" not in r}
            if not any(result["sparse_calls"] for result in good.values()):
                same = self.dense is not None and all(
                    i in self.dense and self.dense[i].get("output") == r["output"] for i, r in good.items()
                )
                found.append(
                    f"{INVALID}, {shown}: not one sparse call"
                    + (", and the outputs are those of dense attention" if same else "")
                )
            for column, cell in entry["cells"].items():
                difference = cell["difference"]
                if difference and difference["low"] > 0:
                    where = mean_label(self.tasks) if column == MEAN else column
                    found.append(
                        f"{shown} is above dense on {where} by {difference['value']:.2f} [{difference['low']:.2f}, "
                        f"{difference['high']:.2f}]: more than its interval, so look at prompts and template first"
                    )
        return found


def _percent(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def data_statement(manifest: dict[str, Any]) -> str:
    """One sentence on where the prompts come from. Only official data make RULER scores."""
    origin = manifest["origin"]
    if origin["data"] == "hub":
        return f"RULER prompts of {origin['repository']} at revision {origin['revision']}"
    if origin["data"] == "jsonl":
        return "RULER prompts from local files in RULER's layout"
    if origin["data"] == "helmet":
        return "HELMET prompts, from its files and templates in a local folder"
    if origin["data"] == "longbench":
        words = f"{origin['shortened']} of them without their middle" if origin["shortened"] else "all of them whole"
        return f"LongBench v2 prompts from local files, {words}"
    if origin["data"] == "builtin:tiny":
        return "builtin prompts in the tiny model's own grammar; these are not RULER scores"
    own = "builtin prompts in this project's own wording; these are not"
    return f"{own} {'HELMET' if manifest.get('settings', {}).get('tasks') == ['json_kv'] else 'RULER'} scores"


def summarise(store: Store) -> dict[str, Any]:
    """The summary of a run's directory, from its files alone. The same files give the same summary."""
    return _Report(store).summary()


def exit_code(summary: dict[str, Any]) -> int:
    """0 for a complete and valid run; 1 if a prompt failed or is missing, or if a sparse setting was never sparse."""
    complete = all(entry["done"] == entry["prompts"] for entry in summary["conditions"])
    return int(not complete or any(warning.startswith(INVALID) for warning in summary["warnings"]))


CSV_FIELDS = (
    "name method parents P R estimator S column n score half low high retained access access_without_routing bound "
    "difference difference_low difference_high paper_score paper_access paper_table"
).split()


def summary_csv(summary: dict[str, Any]) -> str:
    """One line per condition and column (each task, and the mean)."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_FIELDS, lineterminator="\n")
    writer.writeheader()
    for entry in summary["conditions"]:
        for column, cell in entry["cells"].items():
            score, difference, paper = (cell[name] or {} for name in ("score", "difference", "paper"))
            line = {name: entry[name] for name in ("name", "method", "parents", "P", "R", "estimator", "S")}
            line |= {name: cell[name] for name in ("n", "retained", "access", "access_without_routing", "bound")}
            line |= {"column": column, "score": score.get("value")}
            line |= {name: score.get(name) for name in ("half", "low", "high")}
            line |= {"difference": difference.get("value"), "difference_low": difference.get("low")}
            line |= {"difference_high": difference.get("high"), "paper_score": paper.get("score")}
            line |= {"paper_access": paper.get("access"), "paper_table": paper.get("table")}
            writer.writerow(line)
    return text.getvalue()


def write_reports(store: Store, plot: bool = True) -> tuple[dict[str, Any], list[str]]:
    """Write summary.json, summary.csv, table.md and, where it can be drawn, access_accuracy.png.

    Returns the summary and notes on what was left out.
    """
    from latent_santa.eval.report import plots, tables

    summary = summarise(store)
    directory = store.directory
    write_atomic(directory / "summary.json", json.dumps(summary, indent=1) + "\n")
    write_atomic(directory / "summary.csv", summary_csv(summary))
    write_atomic(directory / "table.md", tables.markdown(summary))
    notes = []
    if plot:
        try:
            write_atomic(directory / "access_accuracy.png", plots.access_accuracy(summary))
        except plots.NoPicture as reason:
            notes.append(f"no picture: {reason}")
    return summary, notes
