"""Prefill, replay and decode: what happens before and after each call of the base model."""

from __future__ import annotations

import inspect
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from latent_santa.access import AccessLedger
from latent_santa.config import SantaConfig
from latent_santa.methods import METHODS
from latent_santa.noise import noise_keys
from latent_santa.probes import PROBES
from latent_santa.prompt_queries import EVERY

from .cache_layer import TeamLayer, adopt_cache
from .calls import Kind, ModelCall, classify
from .families import Adapter
from .graphs import StepGraphs
from .grouping import group_waiting
from .last_token import last_token, replace_last
from .limits import context_limit
from .regrouping import due, regroup_generated
from .spread_counts import SpreadCounts

CACHE_NAMES = ("cache", "past_key_values")


class ThreadState(threading.local):
    """What belongs to the calling thread: threads may generate on one model at the same time.

    Attributes:
        call: the present call.
        made: calls by kind, which no reset forgets.
        prefill_target: rows that a prompt given in chunks will have cached at its end, or None.
        draft_prompt: the prompt's length in a generation with drafts, or None.
        asked: rows that the present generation may come to hold, or None when unknown.
        beams: whether the present generation moves rows between sequences.
        shown: the cache layer whose padding the present generation has shown to be the known one.
        looked: the cache layer for whose decoding steps the model was last looked at.
        state: what was seen of its weights at the first step of the present generation, or None.
        generating: whether ``generate`` runs, which asks for the last logits only.
        all_logits: whether the present call of the model asks for more logits than the last token's.
        replaying: whether the base model is called from within its own hook.
        preparing: whether a prefill is being made to be used several times, which leaves the replay for later.
        heard: each layer's queries and scales of dense calls, call by call, while a recording listens; else None.
    """

    def __init__(self) -> None:
        self.call = ModelCall(Kind.UNCACHED)
        self.made: Counter[Kind] = Counter()
        self.prefill_target: int | None = None
        self.draft_prompt: int | None = None
        self.heard: dict[int, list[tuple[Tensor, float]]] | None = None
        self.asked: int | None = None
        self.beams = False
        self.shown: weakref.ref[TeamLayer] | None = None
        self.looked: weakref.ref[TeamLayer] | None = None
        self.state: tuple[Any, ...] | None = None
        self.generating = self.all_logits = self.replaying = self.preparing = False


class Control:
    """Keeps the state of the base model's calls. Its hooks classify a call, make the cache ready, and replay.

    Attributes:
        config: settings in force; may change between calls.
        sequence_keys: noise keys of the next batch, or None for the places in it.
        shadow: whether sampled calls also record their error against dense attention.
        access: the ledger.
        calls: base-model calls by kind, per configuration that was in force.
        full_calls: sampled calls in which K covered every team, which are dense attention.
        thread: the calling thread's present call and what goes with it.
        graphs: the base model's ``forward``, which replays decoding steps.
    """

    def __init__(self, base: PreTrainedModel, adapters: list[Adapter], config: SantaConfig, graphs: str) -> None:
        self.base, self.adapters, self.config = base, adapters, config
        self._others = adapters[0].peers if adapters[0].groups_apart else None
        self.access = AccessLedger()
        self.sequence_keys: list[int] | None = None
        self.shadow = False
        self.shadow_log: dict[int, list[Tensor]] = {}
        self.calls: dict[SantaConfig, Counter[Kind]] = {}
        self.full_calls = 0
        self.thread = ThreadState()
        self._lock = threading.Lock()
        self.handle: Any = None  # whose control this is
        self._limit = context_limit(base.config)
        names = list(inspect.signature(type(base).forward).parameters)[1:]
        self.names = [n for n in names if n not in ("args", "kwargs")]
        self.graphs = StepGraphs(self, graphs)

    @property
    def observed(self) -> int:
        """How many queries of a prompt's end are kept: in a prefill for any settings, as many as any method needs that
        does not need all of them."""
        if self.thread.preparing:
            few = (method.window for method in METHODS.values() if method.window != EVERY)
            return max(PROBES, METHODS[self.config.method].queries(self.config), *few)
        return METHODS[self.config.method].queries(self.config)

    def count(self, kind: Kind) -> int:
        """Calls of one kind since the last reset, whatever the settings."""
        return sum(made[kind] for made in self.calls.values())

    def count_full(self) -> None:
        """Note that K covered every team in this call, which makes it dense attention."""
        with self._lock:
            self.full_calls += 1

    def end(self, call: ModelCall) -> None:
        """Count a call that has run; where processes have sharing groups of their own, with what the others read."""
        if isinstance(call.ledger, SpreadCounts):
            assert self._others is not None
            call.ledger.join(self.access, self._others)
        if call.full:
            self.count_full()

    def log_error(self, layer: int, error: Tensor) -> None:
        """Keep a shadow error of one layer's call."""
        with self._lock:
            self.shadow_log.setdefault(layer, []).append(error)

    def reset(self) -> None:
        """Forget the ledger, call counts and shadow errors."""
        self.access.reset()
        self.graphs.reset()
        self.calls.clear()
        self.full_calls = 0
        self.shadow_log.clear()

    # hooks of the base model

    def before(self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        """Forward pre-hook: classify the call and make the cache ready for it."""
        kwargs = {**dict(zip(self.names, args, strict=False)), **kwargs}
        thread = self.thread
        if thread.replaying:
            return (), kwargs
        self._refuse(kwargs)
        cache = self._cache(kwargs)
        if cache is None:
            self.begin(ModelCall(Kind.UNCACHED))
            return (), kwargs
        tokens = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
        if tokens is None:
            raise ValueError("the base model was called with neither input_ids nor inputs_embeds")
        batch, new = tokens.shape[:2]
        layers = self._layers(cache)
        held = layers[0].get_seq_length()
        visible = visible_rows(kwargs.get("attention_mask"), batch, held + new)
        if held and not self._known(layers[0]) and layers[0].grouped.hides(visible):
            for layer in layers:
                layer.regroup()
        self.key_sequences(layers, batch, held, tokens.device)
        kind, prompt = classify(
            held,
            new,
            turn=self.config.parent_size,
            sampled=METHODS[self.config.method].sampled,
            chunked=thread.prefill_target is not None,
            prompt=thread.draft_prompt,
        )
        if prompt:
            regrouped = METHODS[self.config.method].regroup_after(self.config)
            for layer in layers:
                # where generated rows are grouped at all, those that still wait for it are grouped with the turn
                first = min(layer.grouped.stop, held) if regrouped and layer.grouped.teams is not None else held
                layer.waiting = (first if layer.waiting is None else layer.waiting[0], held + prompt)
        call = ModelCall(kind, layers, visible, (batch, held + new))
        self.begin(call)
        self._warn_beyond_limit(held + new, call, tokens.device)
        if kind.one_token:
            self._reserve(layers, held + new)
        if kind is Kind.DECODE:
            call.as_captured = self._as_captured(layers)
            if not call.as_captured:
                self._group(layers, visible)
        return (), kwargs

    def _reserve(self, layers: Sequence[TeamLayer], rows: int) -> None:
        """Let the cache have room for the step. What reads rows is laid out by the room, so it is there before a step
        whether or not that is captured, and both give the same bits."""
        for layer in layers:
            full = layer.buffers is None or layer.room < rows
            if full and layer.get_seq_length() and not torch.is_grad_enabled():
                layer.make_room(rows)

    def _as_captured(self, layers: Sequence[TeamLayer]) -> bool:
        """Whether a step captured under these settings stands on the cache, and no row waits to be grouped."""
        graph = layers[0].graph
        if graph is None or graph.conditions.config is not self.config or not graph.stands(layers):
            return False
        return all(layer.waiting is None and not due(layer) for layer in layers)

    def _known(self, layer: TeamLayer) -> bool:
        """Whether this generation showed its padding for the cache before: ``generate`` only adds to a mask.

        To look again would wait for the device on every step of a padded batch.
        """
        thread = self.thread
        if not thread.generating:
            return False
        known = thread.shown is not None and thread.shown() is layer
        thread.shown = weakref.ref(layer)
        return known

    def after(self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Forward hook: what follows a call."""
        try:
            return self._followed(base, kwargs, output)
        finally:
            if not self.thread.replaying:
                self.thread.call = ModelCall(Kind.UNCACHED)  # a cache goes when its user lets go of it

    def _followed(self, base: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """After a prefill, group its rows and replay its last token (Appendix F)."""
        call, thread = self.thread.call, self.thread
        self.end(call)
        if thread.replaying or call.kind is not Kind.PREFILL or thread.preparing or thread.all_logits:
            return output
        if self.config.first_token == "dense" or not METHODS[self.config.method].sampled:
            return output
        if thread.prefill_target is not None and call.layers[0].get_seq_length() < thread.prefill_target:
            return output  # another chunk of this prompt follows
        if any(layer.foreign for layer in call.layers):
            return output  # somebody pruned rows in the prefill, and the last token's may be among them
        self._group(call.layers, call.visible)
        for layer in call.layers:
            layer.hold_back_last()
        self.begin(ModelCall(Kind.REPLAY, call.layers, call.visible, call.size, call.step))
        thread.replaying = True
        try:
            again = base(**last_token(kwargs))
        finally:
            thread.replaying = False
        return replace_last(output, again)

    def prepare(self, cache: Any, mask: Tensor | None) -> None:
        """Group the rows of a filled cache that wait for it."""
        layers = self._layers(cache)
        if not layers[0].get_seq_length():
            return
        visible = visible_rows(mask, layers[0].keys.shape[0], layers[0].get_seq_length())
        self._group(layers, visible)

    def _group(self, layers: Sequence[TeamLayer], visible: Tensor | None) -> None:
        with torch.autocast(layers[0].keys.device.type, enabled=False):
            group_waiting(layers, self.adapters, visible, self.config)
            regroup_generated(layers, self.adapters, visible, self.config)

    # hooks of the model on top of it

    def asked(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook: whether more logits are asked for than the last token's, so that no one is sampled alone.

        A call that scores a whole text is dense at every position; ``generate`` and ``logits_to_keep=1`` decode.
        """
        keep = kwargs.get("logits_to_keep", 0)
        only_last = keep.numel() == 1 if isinstance(keep, Tensor) else keep == 1
        self.thread.all_logits = not self.thread.generating and (kwargs.get("labels") is not None or not only_last)

    def answered(self, model: Any, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook, after failures too."""
        self.thread.all_logits = False

    # steps of `before`

    def _refuse(self, kwargs: dict[str, Any]) -> None:
        if self.base.training and torch.is_grad_enabled():
            raise NotImplementedError(
                "the model is in training mode with gradients enabled; latent_santa supports inference: call "
                "model.eval() and use torch.no_grad(), or unpatch first"
            )
        if kwargs.get("output_attentions") or self.base.config.output_attentions:
            raise NotImplementedError(
                "output_attentions=True was asked for; sampled attention has no full attention weights: switch it off, "
                "or use santa.shadow for its error against dense attention"
            )

    def _cache(self, kwargs: dict[str, Any]) -> Any:
        """The call's cache, made where the call wants one and brings none; None where it runs without."""
        name = next((n for n in CACHE_NAMES if kwargs.get(n) is not None), None)
        if name is not None:
            return kwargs[name]
        use_cache = kwargs.get("use_cache")
        if not (self.base.config.use_cache if use_cache is None else use_cache):
            return None
        name = next(n for n in CACHE_NAMES if n in self.names)
        kwargs[name] = DynamicCache(config=self.base.config)
        return kwargs[name]

    def _layers(self, cache: Any) -> list[TeamLayer]:
        """The cache's layers, one per patched module. Where somebody else assigned rows, all of them wait again."""
        adopt_cache(cache)
        while len(cache.layers) < len(self.adapters):
            cache.layers.append(TeamLayer())
        layers: list[TeamLayer] = cache.layers
        for layer in layers:
            layer.asked = self.thread.asked
            if layer.foreign:
                layer.regroup()
        if all(layer.waiting is None for layer in layers):
            return layers  # all rows came through this package, in equal numbers
        lengths = {rows.shape[-2] for layer in layers if layer.get_seq_length() for rows in (layer.keys, layer.values)}
        if len(lengths) > 1:
            raise NotImplementedError(
                "the cache's layers, or their keys and values, hold different numbers of rows "
                f"({', '.join(map(str, sorted(lengths)))}): a method that evicts rows per layer beside latent_santa is "
                "not supported; evict the same number in each"
            )
        return layers

    def begin(self, call: ModelCall) -> None:
        self.thread.call = call
        call.ledger = self.access if self._others is None else SpreadCounts()
        self.thread.made[call.kind] += 1
        with self._lock:
            self.calls.setdefault(self.config, Counter())[call.kind] += 1

    def key_sequences(self, layers: Sequence[TeamLayer], batch: int, held: int, device: torch.device) -> None:
        """Key the noise of a cache's sequences when it is first filled."""
        if held and layers[0].noise_key is not None and layers[0].noise_key.shape[0] == batch:
            return
        keys = list(range(batch)) if self.sequence_keys is None else self.sequence_keys
        if len(keys) != batch:
            raise ValueError(
                f"sequence_keys has {len(keys)} entries for a batch of {batch} sequences (beams and returned sequences "
                "count): give one per sequence, or None for their places in the batch"
            )
        for layer in layers:
            layer.noise_key = noise_keys(self.config.seed, keys, device)

    def _warn_beyond_limit(self, rows: int, call: ModelCall, device: torch.device) -> None:
        if self._limit is None or rows <= self._limit:
            return
        step = call.on("step", device)
        if step is None or int(step.max()) <= self._limit:
            return
        warnings.warn(
            f"{int(step.max())} tokens are beyond the {self._limit} positions that this model was made for: its "
            "answers may be wrong, with dense attention too",
            stacklevel=2,
        )
        self._limit = None  # said once


def visible_rows(mask: Any, batch: int, length: int) -> Tensor | None:
    """A 2D padding mask as bool ``(batch, length)``, or None when every row is real.

    Raises:
        NotImplementedError: a mask of another kind.
        ValueError: a mask of another shape.
    """
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
