"""Dense prefills of prompts that are generated again and again under other decode settings."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from .cache_layer import TeamLayer

# what a prefill's rows and output depend on beside the call's own arguments
CONFIG_NAMES = ("_attn_implementation", "output_hidden_states", "output_router_logits", "return_dict", "use_cache")


@dataclass(frozen=True)
class _Kept:
    """One prefill.

    Attributes:
        arguments: what the base model was called with (:func:`arguments`).
        rows: each layer's keys and values, ``(B, heads, N, D)``, before the last token is replayed.
        hidden: the output's hidden states, ``(B, N, hidden)``, of all positions: which of them are turned into logits
            is decided outside of the base model.
        kind: the output's class.
        cache_name: the output's field for the cache, or None if it has none.
    """

    arguments: dict[str, Any]
    rows: list[tuple[Tensor, Tensor]]
    hidden: Tensor
    kind: type
    cache_name: str | None


class PrefillStore:
    """Keeps the cache rows and the output of named batches' prefills, so that each is computed once.

    A prefill is dense, so it depends on the prompt and on no setting of :class:`SantaConfig`. A handle whose
    ``prefill_store`` is one of these asks it when a named batch (``handle.batch``) fills an empty cache in one call.
    What it gets is copied into the cache, and the base model's layers are not run; calls are counted, rows grouped and
    the last token replayed as after any prefill. Ids, mask and every other argument are compared, so a wrong name costs
    a prefill and changes nothing. The model's weights are not compared: :meth:`clear` it when they change.

    Everything stays on its device. One thread at a time may use a store.

    Attributes:
        limit_bytes: what would not fit is not kept, and is computed each time.
        found: how often a prefill was found instead of computed.
        bytes: what is kept now.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.found = 0
        self.bytes = 0
        self._kept: dict[Hashable, _Kept] = {}

    def clear(self) -> None:
        """Free everything."""
        self._kept.clear()
        self.bytes = 0

    def fill(self, batch: Hashable, given: dict[str, Any], cache: Cache) -> Any:
        """Copy the batch's rows into an empty cache and return the base model's output, or None if nothing is kept.

        Args:
            batch: the batch's name.
            given: the call's :func:`arguments`.
            cache: of :class:`TeamLayer` layers.
        """
        kept = self._kept.get(batch)
        if kept is None or not _same(kept.arguments, given):
            return None
        self.found += 1
        for layer, rows in zip(cache.layers, kept.rows, strict=True):
            layer.update(*rows)
        fields: dict[str, Any] = {"last_hidden_state": kept.hidden.clone()}
        if kept.cache_name is not None:
            fields[kept.cache_name] = cache
        return kept.kind(**fields)

    def keep(self, batch: Hashable, given: dict[str, Any], layers: Sequence[TeamLayer], output: Any) -> None:
        """Keep a prefill that has just been computed, in the place of an earlier one of the same name.

        Outputs with more in them than hidden states and cache are not kept.
        """
        old = self._kept.pop(batch, None)
        self.bytes -= _bytes(old) if old is not None else 0
        filled = dict(output) if isinstance(output, dict) else {}
        hidden = filled.pop("last_hidden_state", None)
        names = [name for name, value in filled.items() if isinstance(value, Cache)]
        if hidden is None or len(names) < len(filled):
            return
        if any(layer.get_seq_length() != given["input_ids"].shape[1] for layer in layers):
            return
        views = _Kept(
            given, [(layer.keys, layer.values) for layer in layers], hidden, type(output), names[0] if names else None
        )
        # measured before anything is copied: a copy that does not fit could take the memory that the batch needs
        if self.bytes + _bytes(views) > self.limit_bytes:
            return
        self._kept[batch] = _Kept(
            {name: _copied(value) for name, value in given.items()},
            [(_copied(keys), _copied(values)) for keys, values in views.rows],
            _copied(hidden),
            views.kind,
            views.cache_name,
        )
        self.bytes += _bytes(views)


def arguments(base: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """All that decides the outcome of a call on an empty cache, or None for a call that cannot be compared."""
    given = {name: value for name, value in kwargs.items() if value is not None and not isinstance(value, Cache)}
    if "input_ids" not in given or not all(isinstance(v, (Tensor, bool, int, float, str)) for v in given.values()):
        return None
    return given | {f"config.{name}": getattr(base.config, name, None) for name in CONFIG_NAMES}


def _same(kept: dict[str, Any], given: dict[str, Any]) -> bool:
    return kept.keys() == given.keys() and all(_equal(value, given[name]) for name, value in kept.items())


def _equal(kept: Any, given: Any) -> bool:
    if type(kept) is not type(given):
        return False
    if isinstance(kept, Tensor):
        return kept.dtype == given.dtype and kept.device == given.device and torch.equal(kept, given)
    return bool(kept == given)


def _copied(value: Any) -> Any:
    return value.clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value


def _bytes(kept: _Kept) -> int:
    tensors = [kept.hidden, *(part for rows in kept.rows for part in rows)]
    tensors += [value for value in kept.arguments.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
