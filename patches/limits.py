"""How many positions a model was made for."""

from __future__ import annotations

from typing import Any


def context_limit(config: Any) -> int | None:
    """Positions that the model was made for, if its configuration says so.

    Scaled rotary embeddings reach ``factor`` times their original length; most configurations state the product as
    ``max_position_embeddings``, some (Qwen2.5 with YaRN) the original length.
    """
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if limit is None or original is None or factor is None:
        return limit
    return max(limit, int(original * factor))
