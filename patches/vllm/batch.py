"""Which request is which row of a batch.

The plugin's only host code that runs in each step is its metadata builder, and vLLM gives a builder tensors, without
the requests' ids. Both of vLLM's model runners prepare the inputs of a real batch (not of a dummy run or a capture) in
one method just before the builder runs; it is wrapped here to note the ids. This changes no argument and no result.
"""

from __future__ import annotations

import functools
from typing import Any

_ids: list[str] | None = None


def take() -> list[str] | None:
    """The ids of the batch that is being prepared, in its order; None for a dummy run, and after they were taken."""
    global _ids
    ids, _ids = _ids, None
    return ids


def watch() -> None:
    """Wrap the runners' methods, once per process."""
    from vllm.v1.worker import gpu_model_runner

    _wrap(gpu_model_runner.GPUModelRunner, "_prepare_inputs", lambda runner, _: runner.input_batch.req_ids)
    try:
        from vllm.v1.worker.gpu import model_runner
    except ImportError:  # it needs Triton, which a CPU's vLLM does without
        return
    _wrap(model_runner.GPUModelRunner, "prepare_inputs", lambda _, batch: batch.req_ids)


def _wrap(owner: Any, name: str, ids_of: Any) -> None:
    own = getattr(owner, name)
    if hasattr(own, "notes_ids"):
        return

    @functools.wraps(own)
    def noting(self: Any, *args: Any, **options: Any) -> Any:
        global _ids
        result = own(self, *args, **options)
        _ids = list(ids_of(self, result))
        return result

    noting.notes_ids = True  # type: ignore[attr-defined]
    setattr(owner, name, noting)
