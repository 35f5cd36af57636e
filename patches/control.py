"""Prefill, replay and decode: what each call of the base model is, and what its attention layers do in it."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from latent_santa.access import AccessLedger
from latent_santa.config import SantaConfig
from latent_santa.noise import noise_keys

from .cache_layer import TeamLayer, adopt_cache
from .families import Adapter
from .grouping import group_waiting
from .prefill_store import PrefillStore, arguments
from .team_store import TeamStore

CACHE_NAMES = ("cache", "past_key_values")


@dataclass
class Call:
    """One forward call of the base model.

    Attributes:
        kind: ``"prefill"`` (dense, its rows get grouped), ``"verify"`` (a few tokens at once, dense, they join the
            suffix), ``"decode"`` or ``"replay"`` (one token, sparse), ``"dense"`` (one token under method "dense"), or
            ``"uncached"``.
        layers: the cache's layers.
        visible: ``(B, L)`` bool over all rows including this call's, or None when all are real.
        step: ``(B,)`` int64, rows that each sequence sees at its last token.
        noise: Gumbel draws made ahead, by layer.
    """

    kind: str
    layers: Sequence[TeamLayer] = ()
    visible: Tensor | None = None
    step: Tensor | None = None
    noise: dict[int, Tensor] = field(default_factory=dict)
    _moved: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict)

    @property
    def sparse(self) -> bool:
        return self.kind in ("decode", "replay")

    @property
    def counted(self) -> bool:
        """Whether the ledger counts it: prefill is outside the counter (Appendix C.1)."""
        return self.kind in ("decode", "replay", "dense", "verify")

    def on(self, name: str, device: torch.device) -> Tensor | None:
        """``visible`` or ``step`` on a layer's device, moved once a call."""
        value: Tensor | None = getattr(self, name)
        if value is None or value.device == device:
            return value
        key = (name, device)
        if key not in self._moved:
            self._moved[key] = value.to(device)
        return self._moved[key]


class ThreadState(threading.local):
    """What belongs to the calling thread: threads may generate on one model at the same time.

    Attributes:
        call: the present call.
        made: calls by kind, which no reset forgets.
        prefill_target: rows that a chunked prefill will have cached at its end, or None outside of one.
        replaying: whether the base model is called from within its own hook.
    """

    def __init__(self) -> None:
        self.call = Call("uncached")
        self.made: dict[str, int] = {}
        self.prefill_target: int | None = None
        self.replaying = False


class Controller:
    """Watches the base model's calls through hooks and keeps their state.

    Attributes:
        config: settings in force; may change between calls.
        access: the ledger.
        calls: number of base-model calls by kind.
        full_calls: sparse calls in which K covered every team, which are dense attention.
        thread: the calling thread's present call and what goes with it.
        batch: the name of the batch that is generated next, or None.
        team_store: where records of prompts that come again are kept, or None.
        prefill_store: where their prefills are kept, or None.
    """

    def __init__(self, base: PreTrainedModel, adapters: list[Adapter], config: SantaConfig) -> None:
        self.base, self.adapters, self.config = base, adapters, config
        self.access = AccessLedger()
        self.sequence_keys: list[int] | None = None
        self.calls: dict[str, int] = {}
        self.full_calls = 0
        self.thread = ThreadState()
        self.batch: Hashable | None = None
        self.team_store: TeamStore | None = None
        self.prefill_store: PrefillStore | None = None
        self._lock = threading.Lock()
        self.shadow = False
        self.shadow_log: dict[int, list[Tensor]] = {}
        names = list(inspect.signature(type(base).forward).parameters)[1:]
        self._names = [n for n in names if n not in ("args", "kwargs")]

    def count_full(self) -> None:
        """Note that K covered every team in this call, which makes it dense attention."""
        with self._lock:
            self.full_calls += 1

    def log_error(self, layer: int, error: Tensor) -> None:
        """Keep a shadow error of one layer's call."""
        with self._lock:
            self.shadow_log.setdefault(layer, []).append(error)

    def before(self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        """Forward pre-hook of the base model: classify the call and make the cache ready for it."""
        kwargs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if self.thread.replaying:
            return (), kwargs
        if base.training and torch.is_grad_enabled():
            raise NotImplementedError(
                "the model is in training mode with gradients enabled; latent_santa supports inference: call "
                "model.eval() and use torch.no_grad(), or unpatch first"
            )
        if kwargs.get("output_attentions") or base.config.output_attentions:
            raise NotImplementedError(
                "output_attentions=True was asked for; sampled attention has no full attention weights: switch it off, "
                "or use santa.shadow for its error against dense attention"
            )
        cache_name = next((n for n in CACHE_NAMES if kwargs.get(n) is not None), None)
        cache = kwargs[cache_name] if cache_name else None
        use_cache = kwargs.get("use_cache")
        if cache is None and (base.config.use_cache if use_cache is None else use_cache):
            cache_name = next(n for n in CACHE_NAMES if n in self._names)
            cache = kwargs[cache_name] = DynamicCache(config=base.config)
        if cache is None:
            self._begin(Call("uncached"))
            return (), kwargs
        adopt_cache(cache)
        tokens = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
        if tokens is None:
            raise ValueError("the base model was called with neither input_ids nor inputs_embeds")
        self._begin(self._classify(cache, tokens, kwargs.get("attention_mask")))
        if self.thread.call.kind == "decode":
            self._group(self.thread.call.layers, self.thread.call.visible)
        return (), kwargs

    def _begin(self, call: Call) -> None:
        self.thread.call = call
        self.thread.made[call.kind] = self.thread.made.get(call.kind, 0) + 1
        with self._lock:
            self.calls[call.kind] = self.calls.get(call.kind, 0) + 1

    def _classify(self, cache: Any, tokens: Tensor, mask: Any) -> Call:
        """Name the call by its number of tokens and by what the cache already holds."""
        batch, new = tokens.shape[:2]
        held = cache.get_seq_length()
        while len(cache.layers) < len(self.adapters):
            cache.layers.append(TeamLayer())
        layers = cache.layers
        visible = self._visible(mask, batch, held + new)
        if visible is None:
            step = torch.full((batch,), held + new, dtype=torch.int64, device=tokens.device)
        else:
            step = visible.sum(-1)
        if layers[0].noise_key is None or layers[0].noise_key.shape[0] != batch or held == 0:
            self._key_sequences(layers, batch, tokens.device)
        if held == 0:
            kind = "prefill"
        elif self.thread.prefill_target is not None:
            kind = "prefill"
        elif new == 1:
            kind = "dense" if self.config.method == "dense" else "decode"
        else:
            kind = "prefill" if new >= self.config.parent_size else "verify"
        if kind == "prefill":
            for layer in layers:
                start = layer.waiting[0] if layer.waiting is not None else held
                layer.waiting = (start, held + new)
        return Call(kind, layers, visible, step)

    @staticmethod
    def _visible(mask: Any, batch: int, length: int) -> Tensor | None:
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            got = f"a mask of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise NotImplementedError(
                f"got {got} as attention_mask; supported is None or a 2D padding mask (batch, cached + new tokens)"
            )
        if tuple(mask.shape) != (batch, length):
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}, but {batch} sequences with {length} cached and new "
                f"tokens need ({batch}, {length})"
            )
        return mask.bool()

    def _key_sequences(self, layers: Sequence[TeamLayer], batch: int, device: torch.device) -> None:
        keys = list(range(batch)) if self.sequence_keys is None else self.sequence_keys
        if len(keys) != batch:
            raise ValueError(
                f"sequence_keys has {len(keys)} entries for a batch of {batch} sequences (beams and returned sequences "
                "count): give one a sequence, or None for their place in the batch"
            )
        for layer in layers:
            layer.noise_key = noise_keys(self.config.seed, keys, device)

    def prepare(self, cache: Any, mask: Tensor | None) -> None:
        """Group the rows of a filled cache that wait for it."""
        adopt_cache(cache)
        batch, length = cache.layers[0].keys.shape[0], cache.get_seq_length()
        self._group(cache.layers, self._visible(mask, batch, length))

    def _group(self, layers: Sequence[TeamLayer], visible: Tensor | None) -> None:
        with torch.autocast(layers[0].keys.device.type, enabled=False):
            group_waiting(layers, self.adapters, visible, self.config, self.team_store, self.batch)

    def reusing(self, forward: Any) -> Any:
        """The base model's ``forward``, which takes the prefill of a named batch from the store if it is there."""

        @functools.wraps(forward)
        def reused(*args: Any, **kwargs: Any) -> Any:
            store, batch, call = self.prefill_store, self.batch, self.thread.call
            given = arguments(self.base, kwargs) if not args and self._reusable() else None
            if store is None or given is None:
                return forward(*args, **kwargs)
            cache = next(value for value in kwargs.values() if isinstance(value, Cache))
            output = store.fill(batch, given, cache)
            if output is None:
                output = forward(**kwargs)
                store.keep(batch, given, call.layers, output)
            return output

        return reused

    def _reusable(self) -> bool:
        """Whether the present call fills an empty cache with all of a named batch's prompt, and nothing but that."""
        call = self.thread.call
        return (
            self.prefill_store is not None
            and self.batch is not None
            and call.kind == "prefill"
            and call.layers[0].get_seq_length() == 0
            and self.thread.prefill_target is None
            and not self.base.training
            and not torch.is_grad_enabled()
            and not hasattr(self.base, "_hf_hook")  # accelerate moves weights, inputs and outputs around the call
        )

    def after(self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Forward hook of the base model: after a prefill, group its rows and replay its last token."""
        call = self.thread.call
        if self.thread.replaying or call.kind != "prefill":
            return output
        if self.config.first_token == "dense" or self.config.method == "dense":
            return output
        if self.thread.prefill_target is not None and call.layers[0].get_seq_length() < self.thread.prefill_target:
            return output  # another chunk of this prompt follows
        self._group(call.layers, call.visible)
        for layer in call.layers:
            layer.hold_back_last()
        self._begin(Call("replay", call.layers, call.visible, call.step))
        self.thread.replaying = True
        try:
            again = base(**_last_token(kwargs))
        finally:
            self.thread.replaying = False
        return _replace_last(output, again)


def _last_token(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the base model for the last token alone."""
    kwargs = dict(kwargs)
    for name in ("input_ids", "inputs_embeds"):
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name][:, -1:]
    for name in ("position_ids", "cache_position"):
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name][..., -1:]
    return kwargs


def _replace_last(output: Any, again: Any) -> Any:
    """The prefill's output with the replayed token's hidden states in the last place."""

    def joined(dense: Tensor, sparse: Tensor) -> Tensor:
        return torch.cat((dense[:, :-1], sparse.to(dense.device)), 1)

    if isinstance(output, tuple):
        return (joined(output[0], again[0]), *output[1:])
    output.last_hidden_state = joined(output.last_hidden_state, again.last_hidden_state)
    if getattr(output, "hidden_states", None) is not None:
        output.hidden_states = tuple(map(joined, output.hidden_states, again.hidden_states))
    return output
