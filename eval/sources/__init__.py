"""Sources of prompts behind one reader: builtin generators, the tiny model's own, RULER's files or the hub's copy of
them, HELMET's and LongBench's files.

A new source is a function from a `Request` to `Loaded`, a line in `family`, and one in `load_samples`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latent_santa.eval.errors import EvalError

from . import builtin, hub, jsonl, longbench, shapes
from .haystack import open_haystack
from .request import Loaded, Request, choose
from .tasks import Family

if TYPE_CHECKING:
    from latent_santa.eval.run.render import Renderer

_OF_FILES: dict[str, Family] = {"hub": "official", "jsonl": "official", "helmet": "helmet", "longbench": "longbench"}


def family(data: str, tiny: bool) -> Family:
    """Which task names a data option has; the tiny model has builtin tasks of its own. Raises EvalError if unknown."""
    if data == "builtin":
        return "tiny" if tiny else "builtin"
    kind, colon, _ = data.partition(":")
    found = _OF_FILES.get(kind) if colon or data == "hub" else None
    if found is None:
        raise EvalError(f"unknown --data {data!r}; choose builtin, hub or jsonl:DIR")
    if tiny:
        raise EvalError(f"--model builtin:tiny understands its own prompts only; --data must be builtin, not {data}")
    return found


def load_samples(
    request: Request, renderer: Renderer, tiny: bool, advance: Callable[[str], None] = lambda task: None
) -> Loaded:
    """All samples of a request; calls `advance(task)` after each. Raises EvalError, early where it can."""
    kind = family(request.data, tiny)
    if kind == "helmet":
        from . import helmet  # it imports numpy, which --help can do without

        return helmet.load(request, renderer, advance)
    if kind == "longbench":
        return longbench.load(request, renderer, advance)
    if kind == "official":
        return _official(request, advance)
    if kind == "tiny":
        return _tiny(request, renderer, advance)
    haystack = open_haystack(request.haystack)
    samples = []
    for task in request.tasks:
        made = builtin.samples(task, request.n, request.length, renderer.count, request.seed, haystack, request.start)
        for sample in made:
            samples.append(sample)
            advance(task)
    return Loaded(samples, {"data": "builtin", "haystack": haystack.name, "haystack_sha256": haystack.sha256})


def _tiny(request: Request, renderer: Renderer, advance: Callable[[str], None]) -> Loaded:
    from latent_santa.eval.tiny import source

    known = {"prose": "grammar", "pydoc": "topics"}
    if request.haystack not in known:
        raise EvalError(f"--haystack {request.haystack}: the tiny model knows {' and '.join(known)} only")
    samples = []
    for task in request.tasks:
        try:
            made = source.samples(
                task,
                request.n,
                request.length,
                renderer.tokenizer,
                request.seed,
                request.start,
                haystack=known[request.haystack],
            )
        except ValueError as error:
            raise EvalError(str(error)) from error
        for sample in made:
            samples.append(sample)
            advance(task)
    return Loaded(samples, {"data": "builtin:tiny", "haystack": request.haystack})


def _official(request: Request, advance: Callable[[str], None]) -> Loaded:
    files: dict[str, Any] = {}
    records: dict[str, list[dict[str, Any]]] = {}
    if request.data == "hub":
        revision = hub.resolve_revision(request.hub_revision, request.offline)
        for record in hub.load(request.length, revision):
            records.setdefault(record["task"], []).append(record)
        origin: dict[str, Any] = {"data": "hub", "repository": hub.REPOSITORY, "revision": revision}
        missing = [task for task in request.tasks if task not in records]
        if missing:
            raise EvalError(f"--data hub: no record of {', '.join(missing)}; there are {', '.join(sorted(records))}")
    else:
        directory = Path(request.data.removeprefix("jsonl:"))
        for task in request.tasks:
            records[task], files[task] = jsonl.read(jsonl.find(directory, task, request.length))
        origin = {"data": "jsonl", "files_sha256": files}
    samples, warnings = [], []
    for task in request.tasks:
        for number in choose(len(records[task]), request.n, task, request.seed, request.select):
            sample, odd = shapes.sample_of(records[task][number], task, number, origin["data"])
            samples.append(sample)
            warnings += [text for text in odd if text not in warnings]
            advance(task)
    return Loaded(samples, origin, warnings)
