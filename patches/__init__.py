"""Everything Hugging Face: patching a loaded model, its cache layer, and prefill, replay and decode."""

from .handle import SantaHandle
from .patch import handle, patch, unpatch
from .prefilled import Prefilled

__all__ = ["Prefilled", "SantaHandle", "handle", "patch", "unpatch"]
