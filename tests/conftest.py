"""Without a GPU the Triton kernels run in Triton's interpreter, which must be asked for before Triton is imported."""

from __future__ import annotations

import importlib.util
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _let_loops_count() -> None:
    """Triton 3.6's interpreter turns one-element arrays into loop bounds with int(), which NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):  # type: ignore[no-untyped-def]
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    import triton

    if triton.__version__.startswith("3.6."):
        _let_loops_count()
