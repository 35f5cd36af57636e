"""Everything Hugging Face: patching a loaded model, its cache layer, and prefill, replay and decode."""

from .handle import SantaHandle, patch

__all__ = ["SantaHandle", "patch"]
