"""The paper's numbers of Tables 1 and 7, for runs whose conditions are the paper's.

paper_diagnostics.csv holds them, copied from the paper's text: one cell per line, with its 95 % interval where the
paper has one. In Table 1 ``what`` is the grouping and its routing key, in Table 7 the threshold.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Any

from latent_santa.eval.report.paper_tables import QWEN, same_model


@cache
def _numbers() -> dict[tuple[str, int, str, str], tuple[str, str, str]]:
    with (Path(__file__).parent / "paper_diagnostics.csv").open(newline="", encoding="utf-8") as file:
        return {
            (cell["table"], int(cell["length"]), cell["task"], cell["what"]): (cell["value"], cell["low"], cell["high"])
            for cell in csv.DictReader(file)
        }


def paper_value(table: str, settings: dict[str, Any], task: str, what: str) -> str | None:
    """The paper's cell as text, if model, data and length are the paper's; the number of prompts may differ.

    A run with int8 weights is another model than the paper's.
    """
    official = settings["data"] == "hub" or settings["data"].startswith("jsonl:")
    if not official or not same_model(settings["model"], QWEN) or settings["quant"] != "none":
        return None
    found = _numbers().get((table, settings["length"], task, what))
    if found is None:
        return None
    value, low, high = found
    return f"{value} [{low}, {high}]" if low else value
