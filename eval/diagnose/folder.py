"""The files of a diagnostic: a manifest, one appended line per result, and what is made of them at the end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from latent_santa.eval.errors import EvalError
from latent_santa.eval.run.environment import environment
from latent_santa.eval.run.locks import exclusive
from latent_santa.eval.run.store import differences, write_atomic


class Folder:
    """A directory that holds one diagnostic's results; the same command with the same directory continues them.

    A result is a dict with at least "prompt" and "key", which name its place; the last one of a place counts.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self.name = directory, name
        self._manifest, self._lines = directory / "manifest.json", directory / "results.jsonl"

    def begin(self, settings: dict[str, Any], prompts: dict[str, str]) -> None:
        """Write the manifest, or see that the one that is there is of the same settings and prompts.

        prompts: names and hashes. Raises EvalError naming what is different.
        """
        now = {"diagnostic": self.name, "settings": settings, "prompts": prompts}
        if not self._manifest.exists():
            write_atomic(self._manifest, json.dumps({**now, "environment": environment()}, indent=1) + "\n")
            return
        try:
            then = json.loads(self._manifest.read_text(encoding="utf-8"))
        except ValueError as error:
            raise EvalError(f"{self._manifest} is damaged ({error}): give another --out") from error
        changed = differences({name: then.get(name) for name in now}, json.loads(json.dumps(now)))
        if changed:
            listed = "".join(f"\n  {line}" for line in changed)
            raise EvalError(f"{self.directory} holds results of other settings:{listed}\nGive another --out.")

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest as it was written."""
        found: dict[str, Any] = json.loads(self._manifest.read_text(encoding="utf-8"))
        return found

    def results(self) -> dict[tuple[str, str], dict[str, Any]]:
        """(prompt, key) to its result. A line that a kill cut short does not count."""
        found = {}
        for line in self._lines.read_bytes().split(b"\n")[:-1] if self._lines.exists() else ():
            result = json.loads(line)
            found[result["prompt"], result["key"]] = result
        return found

    def append(self, result: dict[str, Any]) -> None:
        """Add a result, which is on the disk when this returns."""
        with exclusive(self._lines) as file:
            file.seek(0)
            whole = file.read()
            if whole and not whole.endswith(b"\n"):
                file.truncate(whole.rfind(b"\n") + 1)
            file.write(json.dumps(result).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def write(self, suffix: str, content: str | bytes) -> Path:
        """Replace one of the files made of the results, such as frontier.md; returns its path."""
        path = self.directory / f"{self.name}{suffix}"
        write_atomic(path, content)
        return path
