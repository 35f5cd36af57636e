"""SANTA++ for transformers: decoding that reads a few sampled teams of cache rows, straight from latents.

``patch`` is the front door; the method itself lives in this package's modules and needs only PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .access import AccessLedger
from .config import SantaConfig

if TYPE_CHECKING:
    from latent_santa.patches import SantaHandle, patch

__version__ = "0.1.0"
__all__ = ["AccessLedger", "SantaConfig", "SantaHandle", "patch"]


def __getattr__(name: str) -> Any:
    # transformers takes seconds to import; the method alone does not need it
    if name in ("patch", "SantaHandle"):
        from latent_santa import patches

        return getattr(patches, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
