"""SANTA++ for transformers: decoding that reads a few sampled teams of cache rows, straight from latents.

``patch`` is the front door; the method itself lives in this package's modules and needs only PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from latent_santa.access import AccessLedger
    from latent_santa.config import SantaConfig
    from latent_santa.patches import SantaHandle, handle, patch, unpatch

__version__ = "0.1.0"
__all__ = ["AccessLedger", "SantaConfig", "SantaHandle", "handle", "patch", "unpatch"]


# Names are imported when they are first asked for: PyTorch and transformers take seconds, and --help needs neither.
_HOMES = {"AccessLedger": "access", "SantaConfig": "config"}
_HOMES |= dict.fromkeys(("SantaHandle", "handle", "patch", "unpatch"), "patches")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"latent_santa.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
