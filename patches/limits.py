"""How many positions a model was made for."""

from __future__ import annotations

from typing import Any


def context_limit(config: Any) -> int | None:
    """Positions that the model takes, if its configuration says so.

    Rotary embeddings that are stretched with YaRN reach ``factor`` times the length that they were trained for. Some
    configurations state that product as ``max_position_embeddings``, others the trained length: the larger one counts.
    Of other ways to stretch, ``max_position_embeddings`` is the reach.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    for kind in (rope, *(value for value in rope.values() if isinstance(value, dict))):  # per layer type in some
        trained = kind.get("original_max_position_embeddings")
        if limit and trained and kind.get("rope_type", kind.get("type")) == "yarn":
            limit = max(limit, int(trained * kind.get("factor", 1)))
    return limit
