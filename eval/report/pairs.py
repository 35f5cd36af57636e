"""Two runs on their equal prompts: paired differences of every setting that both have."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from latent_santa.eval.errors import EvalError
from latent_santa.eval.report import statistics
from latent_santa.eval.report.summary import access_percent
from latent_santa.eval.report.tables import plain_table
from latent_santa.eval.run.conditions import from_manifest, label, slug
from latent_santa.eval.run.store import Store, differences


def compare(first: Store, second: Store) -> dict[str, Any]:
    """What the second run changed: scores and rows of each setting on the prompts that both answered under it.

    Prompts are equal if their number, text and accepted answers are. Intervals resample prompts within tasks, as in a
    run's own tables, with the first run's seed.

    Raises EvalError if the runs have no prompt or no setting in common, or no results on common prompts.
    """
    stores = (first, second)
    settings = [store.complete_manifest()["settings"] for store in stores]
    texts = [{p.sample.id: p.sample.text_sha256 for p in store.prompts()} for store in stores]
    common = [p.sample for p in first.prompts() if texts[1].get(p.sample.id) == p.sample.text_sha256]
    if not common:
        raise EvalError(f"{first.directory} and {second.directory} have no equal prompts: nothing can be paired")
    named = [{slug(c): c for c in from_manifest(s.manifest(), s.manifest_path)} for s in stores]
    shared = [name for name in named[0] if name in named[1]]
    if not shared:
        raise EvalError(
            f"no setting is in both runs: {first.directory} has {', '.join(named[0])}; {second.directory} has "
            f"{', '.join(named[1])}"
        )
    entries, data = [], first.manifest()["origin"]["data"]
    for name in shared:
        results = [store.results(name) for store in stores]
        both = [s for s in common if all("score" in found.get(s.id, {}) for found in results)]
        if not both:
            continue
        scores: dict[str, list[float]] = {}
        for sample in both:
            scores.setdefault(sample.task, []).append(results[1][sample.id]["score"] - results[0][sample.id]["score"])
        difference = statistics.mean_interval(
            {task: np.array(values) for task, values in scores.items()}, settings[0]["data_seed"]
        )
        dense = named[0][name].method == "dense"
        entries.append(
            {
                "name": label(named[0][name]),
                "n": len(both),
                "access": [access_percent(data, [found[s.id] for s in both], dense) for found in results],
                "changed_answers": sum(results[0][s.id]["output"] != results[1][s.id]["output"] for s in both),
                "difference": {"value": difference.value, "low": difference.low, "high": difference.high},
            }
        )
    if not entries:
        raise EvalError("no prompt has a result in both runs under the same setting")
    return {
        "runs": [str(store.directory) for store in stores],
        "prompts": [len(texts[0]), len(texts[1]), len(common)],
        "settings": differences(*settings),
        "only": [[name for name in mine if name not in other] for mine, other in (named, named[::-1])],
        "settings_of_both": entries,
    }


def show(found: dict[str, Any], console: Console) -> None:
    """Print the comparison on 80 columns."""
    first, second = found["runs"]
    console.print(Text(f"{second} minus {first}, paired on {found['prompts'][2]} equal prompts"))
    table = plain_table(
        "", ("Setting", "n", "rows %\nfirst", "rows %\nsecond", "score, second\nminus first", "other\nanswers")
    )
    for entry in found["settings_of_both"]:
        span = entry["difference"]
        interval = "" if entry["n"] == 1 else f" [{span['low']:+.1f}, {span['high']:+.1f}]"
        rows = ["-" if access is None else f"{access:.1f}" for access in entry["access"]]
        table.add_row(
            entry["name"], str(entry["n"]), *rows, f"{span['value']:+.1f}{interval}", str(entry["changed_answers"])
        )
    console.print(table)
    console.print(Text("Brackets: 95 % intervals, prompts resampled within tasks. rows: of those that dense reads."))
    left = [
        f"{count - found['prompts'][2]} prompts of {run}"
        for count, run in zip(found["prompts"], found["runs"], strict=False)
        if count > found["prompts"][2]
    ]
    left += [f"{', '.join(names)} of {run}" for names, run in zip(found["only"], found["runs"], strict=True) if names]
    if left:
        console.print(Text(f"Not compared, as the other run lacks them: {'; '.join(left)}."))
    for line in found["settings"]:
        console.print(Text(f"The runs differ in {line}"))
