"""Steps that run many times on the same tensors, on CUDA as a captured graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache

import torch

# calls from which on a capture takes no longer than it saves
LEAST_CALLS = 4


@lru_cache
def _capture_stream(device: torch.device, thread: int) -> torch.cuda.Stream:
    """One stream per device and thread.

    The matrix library keeps a workspace of tens of megabytes for every stream it has seen, so there should be few; but
    two threads cannot capture on one stream at a time.
    """
    return torch.cuda.Stream(device)


def release_ended_graphs(device: torch.device) -> None:
    """Give back the memory of graphs that are no more, where an eighth of the device or less is free.

    PyTorch keeps it until an allocation fails, and cannot give it back while another graph is captured: a process that
    clusters prompt after prompt would run out of memory in a capture.
    """
    free, total = torch.cuda.mem_get_info(device)
    if free <= total // 8:
        torch.cuda.empty_cache()


class GraphedStep:
    """A step that is called many times on the same tensors.

    On CUDA the second call captures it in a graph, which that call and all later ones launch: the step's kernels are
    shorter than their launches one by one. Everything that changes must change in place. Of few ``calls``, where the
    caller knows their number, none is captured.
    """

    def __init__(self, step: Callable[[], None], device: torch.device, calls: int = LEAST_CALLS) -> None:
        self.step, self.device, self.pays = step, device, calls >= LEAST_CALLS
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm = False

    def __call__(self) -> None:
        if self.device.type != "cuda" or not (self.warm and self.pays):
            self.step()  # libraries that initialise themselves at first use must not do so in a capture
            self.warm = True
            return
        if self.graph is None:
            self.graph = self._capture()
        self.graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        release_ended_graphs(self.device)
        # the context manager torch.cuda.graph would collect garbage first, which takes longer than the whole loop
        graph, stream = torch.cuda.CUDAGraph(), _capture_stream(self.device, threading.get_ident())
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.step()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return graph
