"""The embedded model: a small trained DeepSeek-V2-shaped network with its own tasks: see MODEL_CARD.md."""

from .load import load_tiny
from .source import samples
from .tasks import HARD_TASKS, TASKS

__all__ = ["HARD_TASKS", "TASKS", "load_tiny", "samples"]
