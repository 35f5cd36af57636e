"""From a run's files to its summary: scores with intervals, retained scores, access, paired differences, warnings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from latent_santa.config import SantaConfig
from latent_santa.eval.errors import EvalError
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

    def __init__(self, store: Store, answered: bool = False) -> None:
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
        self.left_out = self._keep_answered() if answered else []
        self.most_tokens = max(prompt.n_tokens for prompt in self.prompts)
        # official data in a folder of another name than their length
        self.short = self.data in ("hub", "jsonl", "helmet") and not paper_tables.of_length(
            self.most_tokens, self.settings["length"]
        )
        self.dense: Results | None = next((self.results[c] for c in self.conditions if c.method == "dense"), None)

    def _keep_answered(self) -> list[str]:
        """Leave out what is not matched: settings without an answer, and prompts that not all others answered.

        Returns what was left out, in words. Raises EvalError if nothing is left.
        """
        good = {c: {i: r for i, r in found.items() if "error" not in r} for c, found in self.results.items()}
        begun = [condition for condition in self.conditions if good[condition]]
        left = [f"{label(c)} has no answer and is left out" for c in self.conditions if c not in begun]
        kept = [p for p in self.prompts if all(p.sample.id in good[condition] for condition in begun)]
        if not begun or not kept:
            raise EvalError("no prompt has an answer under every setting: there is nothing to compare yet")
        if len(kept) < len(self.prompts):
            left.append(
                f"{len(kept)} of {len(self.prompts)} prompts, which every setting answered; the others are left out"
            )
        ids = {prompt.sample.id for prompt in kept}
        self.prompts, self.conditions = kept, begun
        self.results = {c: {i: r for i, r in good[c].items() if i in ids} for c in begun}
        self.tasks = tuple(task for task in self.tasks if any(prompt.sample.task == task for prompt in kept))
        return left

    def against(self, base: str) -> dict[str, Any]:
        """Every setting's paired difference from one of them, and its rows as a share of that one's.

        base  label of the setting, or the name of its results. Raises EvalError if the run has none such with answers.
        """
        named = {key: c for c in self.conditions for key in (label(c), slug(c))}
        if base not in named:
            raise EvalError(f"--against {base!r}: the run has {', '.join(label(c) for c in self.conditions)}")
        scores = {c: _scores(self.prompts, self.results[c], self.tasks) for c in self.conditions}
        own = scores[named[base]]
        if own is None:
            raise EvalError(
                f"--against {base!r}: it has not answered every prompt: --answered compares on those it has"
            )
        read = {
            c: access_percent(self.data, list(self.results[c].values()), c.method == "dense") for c in self.conditions
        }
        lines = []
        for condition, numbers in scores.items():
            if condition != named[base] and numbers is not None:
                rows, whole = read[condition], read[named[base]]
                lines.append(
                    {
                        "setting": label(condition),
                        "access": _percent(rows),
                        "share": round(rows / whole, 3) if rows is not None and whole else None,
                        "difference": self._paired({task: numbers[task] - own[task] for task in self.tasks}),
                    }
                )
        return {"setting": label(named[base]), "access": _percent(read[named[base]]), "lines": lines}

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
        found = [*self.damaged, *self.left_out]
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


def summarise(store: Store, answered: bool = False, against: str | None = None) -> dict[str, Any]:
    """The summary of a run's directory, from its files alone. The same files give the same summary.

    answered  only prompts that every setting has answered, and settings that have answers: of a run that was stopped
    against   a setting that the others are paired with, beside dense

    Raises EvalError if there is no such setting, or no such prompt.
    """
    return _summary(_Report(store, answered), against)


def _summary(report: _Report, against: str | None) -> dict[str, Any]:
    return report.summary() | {"against": None if against is None else report.against(against)}


def exit_code(summary: dict[str, Any]) -> int:
    """0 for a complete and valid run; 1 if a prompt failed or is missing, or if a sparse setting was never sparse."""
    complete = all(entry["done"] == entry["prompts"] for entry in summary["conditions"])
    return int(not complete or any(warning.startswith(INVALID) for warning in summary["warnings"]))


def write_reports(
    store: Store, plot: bool = True, answered: bool = False, against: str | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Write summary.json, summary.csv, answers.csv, table.md and, where it can be drawn, access_accuracy.png.

    answered, against  as of `summarise`

    Returns the summary and notes on what was left out.
    """
    from latent_santa.eval.report import csv_files, plots, tables

    report = _Report(store, answered)
    summary = _summary(report, against)
    directory = store.directory
    write_atomic(directory / "summary.json", json.dumps(summary, indent=1) + "\n")
    write_atomic(directory / "summary.csv", csv_files.summary_csv(summary))
    write_atomic(directory / "answers.csv", csv_files.answers_csv(report.results))
    write_atomic(directory / "table.md", tables.markdown(summary))
    notes = []
    if plot:
        try:
            write_atomic(directory / "access_accuracy.png", plots.access_accuracy(summary))
        except plots.NoPicture as reason:
            notes.append(f"no picture: {reason}")
            # an earlier one may show results that no longer count
            (directory / "access_accuracy.png").unlink(missing_ok=True)
    return summary, notes
