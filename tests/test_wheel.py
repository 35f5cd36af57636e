"""What a wheel holds: every module and data file that the package needs, and no training code."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {
    "latent_santa": "latent_santa",
    "patches": "latent_santa/patches",
    "kernels": "latent_santa/kernels",
    "eval": "latent_santa/eval",
}
DATA = (
    "latent_santa/py.typed",
    "latent_santa/eval/report/paper_tables.csv",
    "latent_santa/eval/tiny/lexicon.json",
    "latent_santa/eval/tiny/MODEL_CARD.md",
    "latent_santa/eval/tiny/model/model.safetensors",
    "latent_santa/eval/tiny/model/tokenizer.json",
)
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


def test_a_wheel_holds_every_module_and_no_training(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, tree)
    for room in ROOMS:
        shutil.copytree(ROOT / room, tree / room, ignore=shutil.ignore_patterns("__pycache__", "results", "*.egg-info"))
    subprocess.run([sys.executable, "-c", BUILD, tmp_path], cwd=tree, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        f"{package}/{path.relative_to(tree / room).as_posix()}"
        for room, package in ROOMS.items()
        for path in (tree / room).rglob("*.py")
    }
    training = {name for name in modules if name.startswith("latent_santa/eval/tiny/training/")}
    assert training and {name for name in names if name.endswith(".py")} == modules - training
    assert set(DATA) <= names
