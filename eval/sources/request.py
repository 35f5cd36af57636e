"""What is asked of a source of prompts, and what it gives."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from latent_santa.eval.errors import EvalError
from latent_santa.eval.sources.samples import Sample


@dataclass(frozen=True)
class Request:
    """Which prompts are wanted: n of each task, around `length` tokens, drawn with `seed`.

    start  number of the first sample of a builtin task
    more   what one source alone reads, under the names of the manifest's settings
    """

    data: str  # "builtin", "hub", "jsonl:DIR", "helmet:DIR" or "longbench:PATH"
    tasks: tuple[str, ...]
    n: int
    length: int
    seed: int = 42
    select: str = "sample"
    haystack: str = "prose"
    hub_revision: str = "main"
    offline: bool = False
    start: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Loaded:
    """Samples in task order, what they were made from (goes into the manifest), and what a reader should know."""

    samples: list[Sample]
    origin: dict[str, Any]
    warnings: list[str] = field(default_factory=list)


def choose(available: int, n: int, task: str, seed: int, select: str) -> list[int]:
    """Record numbers of a task: the first n, or n drawn without replacement, in file order either way."""
    if n > available:
        raise EvalError(f"--n {n}: {task} has {available} records")
    if select == "first":
        return list(range(n))
    return sorted(random.Random(f"{seed}/{task}").sample(range(available), n))
