"""Samples of RULER's own output files on disk: `<task>/validation.jsonl`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from latent_santa.eval.errors import EvalError

FILE = "validation.jsonl"


def find(directory: Path, task: str, length: int) -> Path:
    """The file of a task: `DIR/<task>/`, `DIR/<length>/<task>/`, or RULER's `.../<length>/data/<task>/` below DIR.

    A folder named by the length wins over DIR itself. Raises EvalError if none is found, or several.
    """
    if not directory.is_dir():
        raise EvalError(f"--data jsonl:{directory}: no such directory")
    for pattern in (f"{length}/{task}", f"{length}/data/{task}", f"**/{length}/data/{task}", task, f"data/{task}"):
        found = sorted(path for path in directory.glob(f"{pattern}/{FILE}") if path.is_file())
        if len(found) > 1:
            listed = ", ".join(str(path) for path in found)
            raise EvalError(
                f"--data jsonl:{directory}: several files for {task} at length {length}: {listed}; name one"
            )
        if found:
            return found[0]
    raise EvalError(
        f"--data jsonl:{directory}: no {FILE} for {task} at length {length}; looked for {task}/, {length}/{task}/ and "
        f"{length}/data/{task}/ below it"
    )


def text(path: Path) -> str:
    """The text of a file. Raises EvalError if it cannot be read, or is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise EvalError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise EvalError(f"{path} is not UTF-8: {error}") from error


def read(path: Path) -> tuple[list[dict[str, Any]], str]:
    """All records of a file and its SHA-256. Raises EvalError naming a line that is not a JSON object."""
    records = []
    content = text(path)
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise EvalError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(record, dict):
            raise EvalError(f"{path}, line {number}: expected a JSON object, got {type(record).__name__}")
        records.append(record)
    return records, hashlib.sha256(content.encode()).hexdigest()
