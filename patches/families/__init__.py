"""Families of models: which modules are attention layers, and how each layout's rows and queries are read."""

from .adapter import Adapter
from .find import base_model, check, find_adapters

__all__ = ["Adapter", "base_model", "check", "find_adapters"]
