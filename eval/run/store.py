"""The files of a run: frozen prompts, a manifest, and one appended line a result, safe against a kill at any moment."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latent_santa.eval.errors import EvalError
from latent_santa.eval.sources.samples import Sample, sample_from_dict, sample_to_dict

FORMAT = 1
MANIFEST_FIELDS = ("key", "prompts_sha256", "settings", "conditions")
_UNFINISHED = ".unfinished"


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file by new content in one step: a reader, or a crash, sees the old file or the new one."""
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_UNFINISHED)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def check_writable(directory: Path) -> None:
    """Raises EvalError if an --out directory cannot be made or written to. Leaves nothing behind."""
    made: list[Path] = []
    try:
        made = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise EvalError(f"--out {directory}: cannot be written to ({error.strerror}); give another --out") from error
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()


@dataclass(frozen=True)
class Prompt:
    """A frozen sample with what it became for the run's tokenizer: number of tokens, and the hash of their ids."""

    sample: Sample
    n_tokens: int
    ids_sha256: str


class Store:
    """A run's directory. Several processes may append at once, each to files of its own (`rank`)."""

    def __init__(self, directory: Path, rank: int = 0, world: int = 1) -> None:
        self.directory = directory
        self.rank, self.world = rank, world
        self._manifest: dict[str, Any] | None = None
        self._prompts: list[Prompt] | None = None

    @property
    def manifest_path(self) -> Path:
        return self.directory / "manifest.json"

    @property
    def prompts_path(self) -> Path:
        return self.directory / "prompts.jsonl"

    @property
    def results_directory(self) -> Path:
        return self.directory / "results"

    @property
    def frozen(self) -> bool:
        """Whether prompts and manifest are in place (the manifest is written last)."""
        return self.manifest_path.is_file()

    @property
    def has_results(self) -> bool:
        """Whether any result was written, of whichever settings."""
        return any(path.stat().st_size for path in self.results_directory.glob("*.jsonl"))

    def thaw(self) -> None:
        """Forget the frozen prompts and settings, so that a run can begin anew."""
        self._manifest = self._prompts = None
        self.manifest_path.unlink()

    def sweep(self) -> None:
        """Remove files that a killed run was about to put in place."""
        for directory in (self.directory, self.results_directory):
            for path in directory.glob(f".*{_UNFINISHED}"):
                path.unlink(missing_ok=True)

    def freeze(self, manifest: dict[str, Any], prompts: Iterable[Prompt]) -> None:
        """Write the prompts, then the manifest with their hash and the run's key. Nothing is generated before this."""
        lines = [
            json.dumps(sample_to_dict(prompt.sample) | {"n_tokens": prompt.n_tokens, "ids_sha256": prompt.ids_sha256})
            for prompt in prompts
        ]
        content = "\n".join(lines) + "\n"
        digest = hashlib.sha256(content.encode()).hexdigest()
        key = hashlib.sha256(json.dumps([manifest["settings"], digest], sort_keys=True).encode()).hexdigest()
        write_atomic(self.prompts_path, content)
        self.write_manifest({"format": FORMAT, "key": key, "prompts_sha256": digest} | manifest)

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Replace the manifest."""
        self._manifest = self._prompts = None
        write_atomic(self.manifest_path, json.dumps(manifest, indent=1) + "\n")

    def manifest(self) -> dict[str, Any]:
        """The manifest, read once. Raises EvalError if there is none, or one of another format."""
        if self._manifest is not None:
            return self._manifest
        try:
            manifest = json.loads(self.manifest_path.read_text())
        except OSError as error:
            raise EvalError(f"{self.directory} holds no run: it has no manifest.json") from error
        except json.JSONDecodeError as error:
            raise EvalError(f"{self.manifest_path} is not JSON ({error})") from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            found = manifest.get("format") if isinstance(manifest, dict) else None
            raise EvalError(f"{self.manifest_path} has format {found!r}; this version reads {FORMAT}")
        if missing := [name for name in MANIFEST_FIELDS if name not in manifest]:
            raise EvalError(f"{self.manifest_path} is no manifest of a run: it lacks {', '.join(missing)}")
        self._manifest = manifest
        return manifest

    def prompts(self) -> list[Prompt]:
        """The frozen prompts in their order, read once. Raises EvalError if the file was changed after freezing."""
        if self._prompts is not None:
            return self._prompts
        if not self.prompts_path.is_file():
            raise EvalError(
                f"{self.directory} has no prompts.jsonl, which tables are made from; a copy of a run without it keeps "
                "the tables that it has"
            )
        content = self.prompts_path.read_bytes()
        if hashlib.sha256(content).hexdigest() != self.manifest()["prompts_sha256"]:
            raise EvalError(
                f"{self.prompts_path} is not the file that was frozen: its hash differs from the manifest's"
            )
        records = [json.loads(line) for line in content.decode().splitlines()]
        self._prompts = [
            Prompt(sample_from_dict(record), record["n_tokens"], record["ids_sha256"]) for record in records
        ]
        return self._prompts

    def _own_path(self, slug: str) -> Path:
        return self.results_directory / (f"{slug}.jsonl" if self.world == 1 else f"{slug}.rank{self.rank}.jsonl")

    def append(self, slug: str, result: dict[str, Any]) -> None:
        """Add one result and wait until it is on the disk. A broken last line of a killed run is cut off first."""
        path = self._own_path(slug)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
            file.write(json.dumps(result).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _parts(self, slug: str) -> list[Path]:
        parts = sorted(self.results_directory.glob(f"{slug}.rank*.jsonl"))
        return [self.results_directory / f"{slug}.jsonl", *parts]

    def results(self, slug: str) -> dict[str, dict[str, Any]]:
        """Prompt id to result, from the merged file and all processes' files, with failures.

        Only results of this run's key and of unchanged prompts count; of several for a prompt, one without an error
        wins, then the last.
        """
        key = self.manifest()["key"]
        texts = {prompt.sample.id: prompt.sample.text_sha256 for prompt in self.prompts()}
        found: dict[str, dict[str, Any]] = {}
        for path in self._parts(slug):
            for result in _complete_lines(path):
                sample_id = str(result.get("id"))
                if result.get("run") != key or texts.get(sample_id) != result.get("text_sha256"):
                    continue
                if sample_id in found and "error" in result and "error" not in found[sample_id]:
                    continue
                found[sample_id] = result
        return found

    def merge(self, slug: str) -> None:
        """Gather a condition's results in one file, in the order of the prompts, each once."""
        parts = self._parts(slug)
        if not any(path.is_file() for path in parts):
            return
        found = self.results(slug)
        ordered = [found[prompt.sample.id] for prompt in self.prompts() if prompt.sample.id in found]
        write_atomic(parts[0], "".join(json.dumps(result) + "\n" for result in ordered))
        for path in parts[1:]:
            path.unlink(missing_ok=True)


def _complete_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Results of a file. A last line without its end, or an unreadable one, was cut by a crash and is left out."""
    if not path.is_file():
        return
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            result = json.loads(line)
        except ValueError:
            continue
        if isinstance(result, dict):
            yield result


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """What changed between two nested dicts of settings, one line each: name, old value, new value."""
    found = []
    for name in sorted(set(old) | set(new)):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{prefix}{name}.")
        elif before != after:
            found.append(f"{prefix}{name}: {before!r} then, {after!r} now")
    return found
