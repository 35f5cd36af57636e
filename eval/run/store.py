"""The files of a run: frozen prompts, a manifest, and one appended line a result, safe against a kill at any moment."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latent_santa.eval.errors import EvalError
from latent_santa.eval.run.locks import exclusive
from latent_santa.eval.sources.samples import Sample, sample_from_dict, sample_to_dict

FORMAT = 1
MANIFEST_FIELDS: dict[str, type] = {"key": str, "prompts_sha256": str, "settings": dict, "conditions": list}
_REPORTED: dict[str, dict[str, type]] = {
    "settings": {
        "model": str, "data": str, "tasks": list, "n": int, "length": int, "data_seed": int, "seed": int,
        "kmeans_seed": int, "noise": str, "quant": str, "dtype": str, "first_token": str,
    },
    "origin": {"data": str},
}  # fmt: skip
_UNFINISHED = ".unfinished"


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file by new content in one step: a reader, or a crash, sees the old file or the new one.

    What is no file of its own (/dev/stdout, a pipe, a link) stays, and is written to. Raises OSError that names the
    file, also for a full disk.
    """
    data = content.encode() if isinstance(content, str) else content
    with _naming(path):
        if path.exists() and (path.is_symlink() or not path.is_file()):
            path.write_bytes(data)
            return
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


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let the system's errors name the file that was to be written; a full disk names none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename, error.filename2 = str(path), None
        raise


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


def check_file(option: str, path: Path) -> None:
    """Raises EvalError if the file of an ``option`` cannot be written; pipes and links are not tried."""
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise EvalError(f"{option} {path}: give a file in an existing directory")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise EvalError(f"{option} {path}: cannot be written ({error.strerror}); give another file") from error


@dataclass(frozen=True)
class Prompt:
    """A frozen sample with what it became for the run's tokenizer.

    n_tokens    number of tokens
    ids_sha256  hash of their ids
    rendered    the text that was tokenised, in parts (`fold`): a chat template may say something else tomorrow; None
                in runs of earlier versions
    """

    sample: Sample
    n_tokens: int
    ids_sha256: str
    rendered: tuple[str | None, ...] | None = None

    @property
    def text(self) -> str | None:
        """The text that was tokenised, if the run has it."""
        if self.rendered is None:
            return None
        return "".join(self.sample.input if part is None else part for part in self.rendered)


def fold(text: str, body: str) -> tuple[str | None, ...]:
    """A text in parts, None where `body` stands, so that a run's prompts do not hold long inputs twice."""
    before, found, after = text.partition(body)
    return (before, None, after) if found else (text,)


class Store:
    """A run's directory. Several processes may append at once, each to files of its own (`rank`)."""

    def __init__(self, directory: Path, rank: int = 0, world: int = 1) -> None:
        self.directory = directory
        self.rank, self.world = rank, world
        self._manifest: dict[str, Any] | None = None
        self._prompts: list[Prompt] | None = None
        self._damaged: dict[tuple[Path, str], str] = {}

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
        return self.manifest_path.exists()

    @property
    def has_results(self) -> bool:
        """Whether any result was written, of whichever settings."""
        return any(path.stat().st_size for path in self.results_directory.glob("*.jsonl"))

    def thaw(self) -> None:
        """Forget the frozen prompts and settings, so that a run can begin again."""
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
            json.dumps(
                sample_to_dict(prompt.sample)
                | {"n_tokens": prompt.n_tokens, "ids_sha256": prompt.ids_sha256, "rendered": prompt.rendered}
            )
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
        """The manifest, read once. Raises EvalError if there is none, or one that this version cannot read."""
        if self._manifest is not None:
            return self._manifest
        path = self.manifest_path
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise EvalError(f"{self.directory} holds no run: it has no manifest.json") from error
        except OSError as error:
            raise EvalError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:  # no UTF-8, or no JSON
            raise EvalError(f"{path} is not JSON ({error})") from error
        found = manifest.get("format") if isinstance(manifest, dict) else None
        if found != FORMAT:
            newer = isinstance(found, int) and found > FORMAT
            more = "; a newer version of latent-santa wrote it: update this one" if newer else ""
            raise EvalError(f"{path} has format {found!r}; this version reads {FORMAT}{more}")
        if missing := [name for name in MANIFEST_FIELDS if name not in manifest]:
            raise EvalError(f"{path} is no manifest of a run: it lacks {', '.join(missing)}")
        for name, kind in MANIFEST_FIELDS.items():
            if not isinstance(manifest[name], kind):
                raise EvalError(f"{path} is damaged: its {name} is {manifest[name]!r}, not a {kind.__name__}")
        self._manifest = manifest
        return manifest

    def complete_manifest(self) -> dict[str, Any]:
        """The manifest with everything that tables are made from. Raises EvalError naming what it lacks."""
        manifest = self.manifest()
        for where, kinds in _REPORTED.items():
            part = manifest.get(where)
            for name, kind in kinds.items():
                value = part.get(name) if isinstance(part, dict) else None
                if not isinstance(value, kind) or isinstance(value, bool):
                    raise EvalError(
                        f"{self.manifest_path} is damaged: {where}.{name} is {value!r}, not of type {kind.__name__}"
                    )
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
            Prompt(sample_from_dict(record), record["n_tokens"], record["ids_sha256"], record.get("rendered"))
            for record in records
        ]
        return self._prompts

    def _own_path(self, slug: str) -> Path:
        return self.results_directory / (f"{slug}.jsonl" if self.world == 1 else f"{slug}.rank{self.rank}.jsonl")

    def append(self, slug: str, result: dict[str, Any]) -> None:
        """Add one result and wait until it is on the disk. A broken last line of a killed run is cut off first."""
        path = self._own_path(slug)
        with _naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with exclusive(path) as file:
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
        """Files that may hold a condition's results: the merged one, then those of the processes."""
        merged = self.results_directory / f"{slug}.jsonl"
        return [path for path in (merged, *sorted(self.results_directory.glob(f"{slug}.rank*.jsonl"))) if path.exists()]

    def results(self, slug: str) -> dict[str, dict[str, Any]]:
        """Prompt id to result, from the merged file and all processes' files, with failures.

        Only whole results of this run's key, of this condition and of unchanged prompts count; of several for a
        prompt, one without an error wins, then the last. `damaged` names what was left out.
        """
        return self._chosen(slug, {path: path.read_bytes() for path in self._parts(slug)})

    def damaged(self) -> list[str]:
        """What was left out of the results that were asked for, one line per file and reason."""
        return list(self._damaged.values())

    def _chosen(self, slug: str, contents: dict[Path, bytes]) -> dict[str, dict[str, Any]]:
        texts = {prompt.sample.id: prompt.sample.text_sha256 for prompt in self.prompts()}
        found: dict[str, dict[str, Any]] = {}
        for path, content in contents.items():
            problems: dict[str, int] = {}
            for result in _complete_lines(content):
                sample_id = str(result.get("id"))
                if result.get("run") != self.manifest()["key"] or texts.get(sample_id) != result.get("text_sha256"):
                    continue
                if (problem := _problem(result, slug)) is not None:
                    problems[problem] = problems.get(problem, 0) + 1
                elif sample_id not in found or "error" not in result or "error" in found[sample_id]:
                    found[sample_id] = result
            for problem, times in problems.items():
                self._damaged[path, problem] = f"{path.name}: {times} results do not count: {problem}"
        return found

    def merge(self, slug: str) -> None:
        """Gather a condition's results in one file, in the order of the prompts, each once.

        Results of other runs and conditions stay, behind these. A result that another process adds meanwhile waits for
        the end of the merge.
        """
        parts = self._parts(slug)
        if not parts:
            return
        merged = self.results_directory / f"{slug}.jsonl"
        with ExitStack() as held:
            contents = {}
            for path in parts:
                file = held.enter_context(exclusive(path))
                file.seek(0)
                contents[path] = file.read()
            found = self._chosen(slug, contents)
            lines = [json.dumps(found[p.sample.id]) for p in self.prompts() if p.sample.id in found]
            key = self.manifest()["key"]
            for content in contents.values():
                for result in _complete_lines(content):
                    if result.get("run") != key or result.get("condition", slug) != slug:
                        lines.append(json.dumps(result))
            write_atomic(merged, "".join(line + "\n" for line in lines))
            for path in parts:
                if path != merged:
                    path.unlink(missing_ok=True)


def _complete_lines(content: bytes) -> Iterator[dict[str, Any]]:
    """Results of a file. A last line without its end, or an unreadable one, was cut by a crash and is left out."""
    for line in content.split(b"\n")[:-1]:
        try:
            result = json.loads(line)
        except ValueError:
            continue
        if isinstance(result, dict):
            yield result


def _problem(result: dict[str, Any], slug: str) -> str | None:
    """Why a result cannot count in a table of this condition, or None."""
    if result.get("condition", slug) != slug:
        return f"they are of {result['condition']!r}, so the file was renamed"
    if "error" in result:
        return None if isinstance(result["error"], str) else "error is no text"
    for name, right in _RESULT_FIELDS.items():
        if name not in result:
            return f"{name} is missing"
        if not right(result[name]):
            return f"{name} is {result[name]!r}"
    return None


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_RESULT_FIELDS: dict[str, Callable[[Any], bool]] = {
    "score": lambda value: isinstance(value, (int, float)) and 0 <= value <= 1,  # NaN is neither
    "output": lambda value: isinstance(value, str),
    "n_new": _count,
    "hit_cap": lambda value: isinstance(value, bool),
    "sparse_calls": _count,
    "access": lambda value: isinstance(value, dict) and all(map(_number, value.values())),
}


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


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
