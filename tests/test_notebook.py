"""The notebook runs from its first cell to its last, at a small size, and ends with the frontier's picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "eval/notebook/first_look.ipynb"


def test_the_notebook_runs(monkeypatch, capsys):
    plt = pytest.importorskip("matplotlib.pyplot")
    for name, value in (("LENGTH", "384"), ("PROMPTS", "1"), ("TOKENS", "4")):
        monkeypatch.setenv(f"NOTEBOOK_{name}", value)
    plt.switch_backend("Agg")
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in cells)
    names = {}
    for number, source in enumerate(code):
        exec(compile(source, f"cell {number}", "exec"), names)
    shown = capsys.readouterr().out
    assert "sampled:" in shown and "pooled   S=256" in shown
    assert names["axes"].images[0].get_array().shape[0] > 100
    plt.close("all")
