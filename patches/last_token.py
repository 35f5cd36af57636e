"""The arguments and the output of the base model, cut to a prompt's last token: what Appendix F's replay runs on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache


def last_token(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the base model for the last token alone.

    Everything that has an entry per token is cut: ``(B, N, ...)`` tensors, positions ``(..., N)``, and features of
    visual tokens, which follow one another in the order of their mask. The padding mask covers all rows and stays.
    """
    tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
    batch, new = tokens.shape[:2]
    cut = {}
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and name != "attention_mask":
            if value.dim() >= 2 and value.shape[:2] == (batch, new):
                value = value[:, -1:]
            elif name in ("position_ids", "cache_position") and value.shape[-1] == new:
                value = value[..., -1:]
        cut[name] = value
    visual = kwargs.get("visual_pos_masks")
    features = kwargs.get("deepstack_visual_embeds")
    if isinstance(visual, Tensor) and features is not None:
        last = torch.zeros_like(visual)
        last[:, -1] = True
        cut["deepstack_visual_embeds"] = [part[last[visual].to(part.device)] for part in features]
    return cut


def replace_last(output: Any, again: Any) -> Any:
    """The prefill's output with the replayed token's hidden states in the last place."""

    def joined(dense: Any, sparse: Any) -> Any:
        # a layer whose states were not asked for has none
        return dense if dense is None else torch.cat((dense[:, :-1], sparse.to(dense.device)), 1)

    if isinstance(output, tuple):
        parts = []
        for dense, sparse in zip(output, again, strict=True):
            if isinstance(dense, tuple):
                parts.append(tuple(map(joined, dense, sparse)))
            else:
                parts.append(dense if isinstance(dense, Cache) or not _states(dense) else joined(dense, sparse))
        return tuple(parts)
    output.last_hidden_state = joined(output.last_hidden_state, again.last_hidden_state)
    if getattr(output, "hidden_states", None) is not None:
        output.hidden_states = tuple(map(joined, output.hidden_states, again.hidden_states))
    return output


def _states(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 3
