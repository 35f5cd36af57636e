"""A stand-in for CUDA graphs on the CPU, so that everything around a graph is tested without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from latent_santa.patches.graphs import engine


class CallAgain:
    """Replays a function by calling it again, and leaves its result where the first one stood, as a graph does."""

    def __init__(self, device: torch.device) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._run: Callable[[], Any] = dict

    def first(self, run: Callable[[], Any]) -> Any:
        result = run()
        self._kept = {name: value.clone() for name, value in result.items()}
        return result

    def capture(self, run: Callable[[], Any]) -> Any:
        self._run = run
        return self._kept

    def replay(self) -> None:
        with torch.inference_mode():  # a graph writes wherever it was captured
            for name, value in self._run().items():
                self._kept[name].copy_(value)


@contextmanager
def on_the_cpu(kind: type = CallAgain) -> Iterator[None]:
    """Let models on the CPU have graphs of this kind."""
    with patch.dict(engine.ENGINES, {"cpu": kind}):
        yield
