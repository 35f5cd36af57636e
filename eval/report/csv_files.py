"""A run as tables for other programs: the summary's cells, and the answers' scores and row counts one by one."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

from latent_santa.config import SantaConfig
from latent_santa.eval.run.conditions import slug

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


def answers_csv(results: Mapping[SantaConfig, Mapping[str, dict[str, Any]]]) -> str:
    """Every setting's score and row counts, prompt by prompt, without texts.

    results  setting to prompt id to result
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("setting", "prompt", "score", "numerator", "denominator"))
    for condition, found in results.items():
        for sample_id, result in sorted(found.items()):
            if "error" not in result:
                counts = (result["access"].get(name, 0) for name in ("numerator", "denominator"))
                writer.writerow((slug(condition), sample_id, result["score"], *counts))
    return text.getvalue()
