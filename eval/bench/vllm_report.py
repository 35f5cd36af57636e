"""The table of ``bench vllm``: dense and sampled steps of vLLM side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a run, those of points and of mixed loads.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else; the message names it.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:  # json and UTF-8 errors are ValueErrors
        raise ValueError(f"{path} holds no rows of bench vllm ({error})") from error
    rows = [row for row in rows if isinstance(row, dict) and "setting" in row]
    if not rows:
        raise ValueError(f"{path} holds no rows of bench vllm")
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: milliseconds per step of each point, then tokens per second of the mixed load; - where nothing ran.

    Behind a sampled number stands how many times as fast it is as the fastest dense setting.
    """
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    lines = ["| | " + " | ".join(settings) + " |", "| --- |" + " ---: |" * len(settings)]
    points: dict[str, dict[str, float | None]] = {}
    for row in rows:
        points.setdefault(_name(row), {})[row["setting"]] = row.get("tokens_per_second", row["step_ms"])
    for name, cells in points.items():
        dense = [cells[s] for s in settings if s.startswith("dense") and cells.get(s)]
        faster = name.startswith("mixed")
        best = (max if faster else min)(dense) if dense else None  # type: ignore[type-var]
        shown = []
        for setting in settings:
            value = cells.get(setting)
            text = "-" if value is None else f"{value:,.0f}" if faster else f"{value:.2f}"
            if value and best and not setting.startswith("dense"):
                text += f" ({value / best if faster else best / value:.2f}x)"
            shown.append(text)
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def _name(row: dict[str, Any]) -> str:
    if "requests" in row:
        thousands = (round(row[end] / 1024) for end in ("shortest", "longest"))
        return "mixed load, {} requests of {}K to {}K, tokens per second".format(row["requests"], *thousands)
    return f"batch {row['batch']}, {row['context'] // 1024}K, ms"
