"""What Triton's interpreter needs to run these kernels on CPU tensors."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .support import interpreting

INTERPRETED = tl.constexpr(interpreting())


def let_loops_count() -> None:
    """Triton 3.6's interpreter turns one-element arrays into loop bounds with int(), which NumPy 2.4 refuses."""
    if not triton.__version__.startswith("3.6."):
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if INTERPRETED.value:
    let_loops_count()
