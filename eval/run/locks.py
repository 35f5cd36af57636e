"""One writer per file and per run directory: locks of the operating system, which end with their process."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from latent_santa.eval.errors import EvalError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

NAME = ".running"


def locked(file: BinaryIO, wait: bool) -> bool | None:
    """Lock an open file for this process. False: another holds it (and `wait` is off); None: no locks here."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


def in_place(file: BinaryIO, path: Path) -> bool:
    """Whether the path still is the open file, and not one that took its place."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def exclusive(path: Path) -> Iterator[BinaryIO]:
    """The file, made if it is missing, open for appending; others that come this way wait for its end."""
    while True:
        with path.open("a+b") as file:
            locked(file, wait=True)
            if in_place(file, path):
                yield file
                return


@contextmanager
def run_lock(directory: Path, first: bool) -> Iterator[str | None]:
    """Hold a run's directory while the process writes to it; yields a note where the system has no locks.

    A lock ends with its process, however that ends, so a crash leaves none behind. Only the `first` of several
    processes takes it, for all of them.

    Raises EvalError naming the process that holds it.
    """
    if not first:
        yield None
        return
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / NAME
    while True:
        with path.open("a+b") as file:
            held = locked(file, wait=False)
            if held is False:
                raise EvalError(
                    f"{directory} is being written to by {_holder(path)}: wait for its end, stop it, or give another "
                    "--out"
                )
            if not in_place(file, path):
                continue  # its holder ended, and took it away, between our opening and locking
            file.truncate(0)
            about = {"process": os.getpid(), "machine": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            file.write(json.dumps(about).encode())
            file.flush()
            try:
                yield None if held else f"this system has no file locks: let no other process write to {directory}"
            finally:
                path.unlink(missing_ok=True)
                for empty in made:  # nothing was written: leave no trace
                    with suppress(OSError):
                        empty.rmdir()
            return


def _holder(path: Path) -> str:
    try:
        about = json.loads(path.read_bytes())
        return f"process {about['process']} on {about['machine']} since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
