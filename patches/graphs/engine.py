"""Capturing a function's launches on a CUDA device, to launch them again all at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Engine(Protocol):
    """How the launches of a function are kept. One object per kept function."""

    def __init__(self, device: torch.device) -> None: ...

    def first(self, run: Callable[[], Any]) -> Any:
        """Run once as an ordinary step, so that what is made at a first use is made before :meth:`capture`."""

    def capture(self, run: Callable[[], Any]) -> Any:
        """Keep the launches of ``run`` without running them; what it returns is where each replay leaves its result."""

    def replay(self) -> None:
        """Launch them again."""


_POOLS: dict[tuple[torch.device, int], torch.cuda.CUDAGraph] = {}
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}
_CAPTURING = threading.Lock()


class CudaGraph:
    """A CUDA graph.

    Graphs that replay on one stream take their memory from one pool: they run one after another, so that a second
    graph's intermediate results may lie where the first one's did, and a released graph's memory serves the next one.
    """

    def __init__(self, device: torch.device) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._side = _STREAMS.setdefault(device, torch.cuda.Stream(device))
        # on the default stream nothing can be captured
        self._main = torch.cuda.current_stream(device)
        key = (device, self._main.cuda_stream)
        if key not in _POOLS:
            # a pool goes with its last graph, so one that does nothing stays
            _POOLS[key] = torch.cuda.CUDAGraph()
            self._captured(_POOLS[key], None, lambda: torch.zeros(1, device=device))
        self._pool = _POOLS[key].pool()

    def first(self, run: Callable[[], Any]) -> Any:
        self._side.wait_stream(self._main)
        with torch.cuda.stream(self._side):
            result = run()
        self._main.wait_stream(self._side)
        return result

    def capture(self, run: Callable[[], Any]) -> Any:
        return self._captured(self._graph, self._pool, run)

    def _captured(self, graph: torch.cuda.CUDAGraph, pool: Any, run: Callable[[], Any]) -> Any:
        # other threads may allocate and launch in the meantime
        with _CAPTURING, torch.cuda.stream(self._side):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = run()
            finally:
                graph.capture_end()
        return result

    def replay(self) -> None:
        self._graph.replay()


# an engine per kind of device
ENGINES: dict[str, type[Engine]] = {"cuda": CudaGraph}
