"""``patch`` and the handle it returns."""

from __future__ import annotations

import copy
import functools
import io
import operator
import warnings
from collections.abc import Hashable
from dataclasses import fields
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from latent_santa.access import AccessLedger
from latent_santa.config import SantaConfig
from latent_santa.routing_keys import scale_group

from .attention import NAME, PatchedLayer, attention_forward
from .control import CACHE_NAMES, Controller
from .families import Adapter, base_model, check, find_adapters
from .prefill_store import PrefillStore
from .team_store import TeamStore

SETTINGS = frozenset(field.name for field in fields(SantaConfig))
_patched_models = 0


def patch(model: PreTrainedModel, config: SantaConfig | None = None, **overrides: Any) -> SantaHandle:
    """Patch a loaded model so that decoding reads sampled teams of cache rows.

    The prefill stays dense. Nothing outside this instance changes: other models of the class are untouched.

    Args:
        model: a native transformers causal language model (or its base model) with MLA or GQA attention.
        config: settings; default :class:`SantaConfig`.
        **overrides: fields of :class:`SantaConfig` to change, such as ``budget=256``.

    Returns:
        A handle, also a context manager: ``with latent_santa.patch(model, budget=512) as santa: ...``.

    Raises:
        TypeError: ``model`` is no transformers model, or ``config`` no :class:`SantaConfig`.
        ValueError: a setting is invalid.
        RuntimeError: the model is patched already.
        NotImplementedError: the model is of a kind that is not supported; it is left unchanged.
    """
    settings = _checked(config, SantaConfig()).with_overrides(**overrides)
    adapters = find_adapters(model)
    if any("_latent_santa" in adapter.module.__dict__ for adapter in adapters):
        raise RuntimeError(
            f"this {type(model).__name__} is patched already: change settings with handle.configure(...), or call "
            "handle.unpatch() first"
        )
    _check_routing(adapters, settings)
    check(model, adapters)
    return SantaHandle(model, Controller(base_model(model, adapters), adapters, settings))


def _checked(config: SantaConfig | None, default: SantaConfig) -> SantaConfig:
    if config is not None and not isinstance(config, SantaConfig):
        raise TypeError(f"config is a {type(config).__name__}: give a SantaConfig, or settings by name (budget=256)")
    return default if config is None else config


def _check_routing(adapters: list[Adapter], config: SantaConfig) -> None:
    """See that the model's keys divide into the groups of an integer routing dtype; raises ValueError."""
    if config.routing_dtype != "model":
        for dims in {dims for adapter in adapters for dims in adapter.key_dims}:
            scale_group(dims, config.routing_dtype)


class SantaHandle:
    """A patched model's settings, ledger and way back. Made by :func:`patch`.

    Attributes:
        model: the patched model.
        sequence_keys: noise keys, one integer a sequence of the batch, or None for the place in the batch. A sequence
            draws the same noise wherever its key is the same. A cache keeps the keys it was first filled under.
        shadow: when True, every sparse call also computes dense attention on the same cache and records the error.
        batch: the name of the batch that is generated next, such as a tuple of prompt ids, for the two stores; or None
            (the default), under which they keep and find nothing. Equal names must mean equal prompts in equal order.
        team_store: a :class:`TeamStore` for prompts that are generated several times under settings of one grouping,
            or None (the default), which groups every prompt anew.
        prefill_store: a :class:`PrefillStore` for prompts that are generated several times under any settings, or None
            (the default), which computes every prefill. A base model with a hook of accelerate makes no use of it.
    """

    def __init__(self, model: PreTrainedModel, controller: Controller) -> None:
        global _patched_models
        self.model = model
        self._controller = controller
        self._undo: list[tuple[Any, str, bool, Any]] = []
        base = controller.base
        ALL_ATTENTION_FUNCTIONS[NAME] = attention_forward
        _patched_models += 1
        for adapter in controller.adapters:
            module = adapter.module
            config = copy.copy(module.config)
            config._attn_implementation_internal = NAME
            self._set(module, "_latent_santa", PatchedLayer(adapter, controller, module.config))
            self._set(module, "config", config)
            for name, value in adapter.replaces.items():
                self._set(module, name, value)
        self._hooks = [
            base.register_forward_pre_hook(controller.before, with_kwargs=True),
            base.register_forward_hook(controller.after, with_kwargs=True),
        ]
        if hasattr(model, "generate"):
            self._set(model, "generate", self._watched(model.generate))
        if hasattr(model, "_prefill"):
            self._set(model, "_prefill", self._chunked(model._prefill))

    def _set(self, target: Any, name: str, value: Any) -> None:
        self._undo.append((target, name, name in target.__dict__, target.__dict__.get(name)))
        target.__dict__[name] = value

    def unpatch(self) -> None:
        """Give the model back exactly as it was. Calling it again does nothing."""
        global _patched_models
        if not self._undo:
            return
        for hook in self._hooks:
            hook.remove()
        for target, name, had, old in reversed(self._undo):
            if had:
                target.__dict__[name] = old
            else:
                del target.__dict__[name]
        self._undo.clear()
        _patched_models -= 1
        if _patched_models == 0:
            del ALL_ATTENTION_FUNCTIONS[NAME]

    def __enter__(self) -> SantaHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.unpatch()

    @property
    def patched(self) -> bool:
        """Whether the model is still patched."""
        return bool(self._undo)

    @property
    def config(self) -> SantaConfig:
        """Settings in force; change them with :meth:`configure`."""
        return self._controller.config

    def configure(self, config: SantaConfig | None = None, **overrides: Any) -> SantaConfig:
        """Change settings between generations, without patching again: some by name, or all by a new configuration.

        Decode settings apply to the next call, the seed to caches filled from now on. When a setting that shapes teams
        changes, a cache that is already grouped is grouped anew at its next sparse call.
        """
        settings = _checked(config, self.config).with_overrides(**overrides)
        _check_routing(self._controller.adapters, settings)
        self._controller.config = settings
        return self.config

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SETTINGS:
            raise AttributeError(f"{name} is a setting: change it with configure({name}={value!r})")
        super().__setattr__(name, value)

    @property
    def sequence_keys(self) -> list[int] | None:
        return self._controller.sequence_keys

    @sequence_keys.setter
    def sequence_keys(self, keys: list[int] | None) -> None:
        try:
            self._controller.sequence_keys = None if keys is None else [operator.index(key) for key in keys]
        except TypeError as error:
            raise TypeError(f"sequence_keys={keys!r}: give a list of integers, one a sequence, or None") from error

    @property
    def team_store(self) -> TeamStore | None:
        return self._controller.team_store

    @team_store.setter
    def team_store(self, store: TeamStore | None) -> None:
        self._controller.team_store = store

    @property
    def batch(self) -> Hashable | None:
        return self._controller.batch

    @batch.setter
    def batch(self, name: Hashable | None) -> None:
        self._controller.batch = name

    @property
    def prefill_store(self) -> PrefillStore | None:
        return self._controller.prefill_store

    @prefill_store.setter
    def prefill_store(self, store: PrefillStore | None) -> None:
        self._controller.prefill_store = store
        base = self._controller.base
        wrapped = any(target is base and name == "forward" for target, name, *_ in self._undo)
        if store is not None and self.patched and not wrapped and not hasattr(base, "_hf_hook"):
            self._set(base, "forward", self._controller.reusing(base.forward))

    @property
    def access(self) -> AccessLedger:
        """The ledger of rows read (Equations 13 and 14)."""
        return self._controller.access

    @property
    def layers(self) -> int:
        """Patched attention layers."""
        return len(self._controller.adapters)

    @property
    def layout(self) -> str:
        """``"mla"`` or ``"gqa"``."""
        return self._controller.adapters[0].layout

    @property
    def sparse_calls(self) -> int:
        """Single-token calls of the model that sampled, replays included."""
        return self._controller.calls.get("decode", 0) + self._controller.calls.get("replay", 0)

    @property
    def full_calls(self) -> int:
        """Sparse calls in which K covered every team of every sequence, which are dense attention."""
        return self._controller.full_calls

    @property
    def dense_calls(self) -> int:
        """Decoding calls that attended densely: method "dense", verification of drafts, or no cache."""
        calls = self._controller.calls
        return calls.get("dense", 0) + calls.get("verify", 0) + calls.get("uncached", 0)

    @property
    def prefill_calls(self) -> int:
        """Calls whose rows were (or will be) grouped."""
        return self._controller.calls.get("prefill", 0)

    @property
    def shadow(self) -> bool:
        return self._controller.shadow

    @shadow.setter
    def shadow(self, on: bool) -> None:
        self._controller.shadow = bool(on)

    def shadow_errors(self) -> torch.Tensor:
        """Relative attention errors recorded by shadow mode, ``(layers, calls, B)`` float32 on the CPU.

        An entry is the mean over heads of ||estimate - dense|| / ||dense||, on the same query and cache.
        """
        log = self._controller.shadow_log
        if not log:
            return torch.empty(0, 0, 0)
        sizes = sorted({errors.numel() for calls in log.values() for errors in calls})
        if len(sizes) > 1:
            raise ValueError(
                f"calls with batch sizes {sizes} were recorded; shadow_errors needs one: reset() in between"
            )
        calls = min(map(len, log.values()))  # a call that failed on its way recorded some layers only
        return torch.stack([torch.stack(log[layer][:calls]).cpu() for layer in sorted(log)])

    def prepare(self, cache: Any, attention_mask: torch.Tensor | None = None) -> None:
        """Group a filled cache's rows now, instead of at its next sparse call.

        Args:
            cache: a dynamic cache, filled by this model, patched or not.
            attention_mask: ``(B, N)`` padding mask of its rows, or None when all are real.
        """
        self._controller.prepare(cache, attention_mask)

    def reset(self) -> None:
        """Forget the ledger, call counts and shadow errors."""
        self.access.reset()
        self._controller.calls.clear()
        self._controller.full_calls = 0
        self._controller.shadow_log.clear()

    def report(self) -> str:
        """A table of settings, calls and rows, and each layer's rows, as text."""
        console = Console(file=io.StringIO(), width=100, color_system=None)
        config, calls = self.config, self._controller.calls
        console.print(
            f"{type(self.model).__name__}: {self.layers} {self.layout.upper()} layers patched, method {config.method}, "
            f"{config.parents} parents, P={config.parent_size}, R={config.representatives}, S={config.budget} "
            f"(K={config.teams_per_head}), {config.estimator}, {config.noise} noise"
        )
        console.print(
            f"calls: {self.prefill_calls} prefill, {self.sparse_calls} sparse ({calls.get('replay', 0)} replays, "
            f"{self.full_calls} with every team selected), {self.dense_calls} dense"
        )
        equation = "Equation 14" if self.layout == "mla" else "Equation 13"
        table = Table(title=f"rows read by decoding calls ({equation}); logical access, not time")
        for column in ("layer", "calls", "routing", "union", "suffix", "dense", "percent", "w/o routing", "bytes %"):
            table.add_column(column, justify="right")
        summary = self.access.as_dict()
        for entry in (*summary["per_layer"], {"layer": "all", **summary["totals"]}):
            percents = (entry["percent"], entry["percent_without_routing"], entry["bytes_percent"])
            table.add_row(
                *(str(entry[name]) for name in ("layer", "calls", "routing", "union", "suffix", "dense")),
                *("-" if value is None else f"{value:.2f}" for value in percents),
            )
        console.print(table)
        stream = console.file
        assert isinstance(stream, io.StringIO)
        return stream.getvalue()

    def __repr__(self) -> str:
        state = f"{self.layers} layers patched" if self.patched else "unpatched"
        return f"<SantaHandle of {type(self.model).__name__}: {state}, {self.config}>"

    def _watched(self, generate: Any) -> Any:
        """``generate`` that refuses caches it cannot use at once, and says so when nothing in it was sparse."""

        @functools.wraps(generate)
        def watched(*args: Any, **kwargs: Any) -> Any:
            own = getattr(self.model, "generation_config", None)
            asked = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
            kinds = (
                kwargs.get("cache_implementation"),
                *(getattr(g, "cache_implementation", None) for g in (asked, own)),
            )
            kind = next((kind for kind in kinds if kind is not None), None)
            if kind not in (None, "dynamic", "dynamic_full"):
                raise NotImplementedError(
                    f"cache_implementation={kind!r}: supported is DynamicCache, what generate() makes by default; "
                    "leave the option out"
                )
            before = dict(self._controller.thread.made)
            result = generate(*args, **kwargs)
            now = self._controller.thread.made
            made = {kind: number - before.get(kind, 0) for kind, number in now.items()}
            sparse = made.get("decode", 0) + made.get("replay", 0)
            if self.patched and self.config.method != "dense" and not sparse:
                warnings.warn(f"no call of this generation was sparse: {_why_dense(made)}", stacklevel=2)
            return result

        return watched

    def _chunked(self, prefill: Any) -> Any:
        """``_prefill`` that tells the controller where a prompt given in chunks ends.

        A chunk looks like any other call; only generate() knows that more follow. The rows of all of them are grouped
        together, and only the last chunk's last token is replayed.
        """

        @functools.wraps(prefill)
        def chunked(
            input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
        ) -> Any:
            if generation_config.prefill_chunk_size is None:
                return prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
            mask = model_kwargs.get("attention_mask")
            cache = next((model_kwargs[name] for name in CACHE_NAMES if model_kwargs.get(name) is not None), None)
            held = 0 if cache is None else cache.get_seq_length()
            if mask is not None:
                rows = mask.shape[1]
            else:  # newer releases drop a mask of ones and keep its length
                rows = getattr(generation_config, "_mask_length", held + input_ids.shape[1])
            if held and 0 < rows - held < self.config.parent_size:
                # a turn of fewer than P tokens joins the suffix: one ordinary call, in no need of chunks
                generation_config = copy.copy(generation_config)
                generation_config.prefill_chunk_size = None
                return prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
            self._controller.thread.prefill_target = rows
            try:
                return prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
            finally:
                self._controller.thread.prefill_target = None

        return chunked


def _why_dense(made: dict[str, int]) -> str:
    if made.get("uncached"):
        return "it ran without a cache (use_cache=False), so there are no rows to group"
    if made.get("verify"):
        return "it made calls of several tokens only (drafts, or a turn of fewer than P tokens), which attend densely"
    return "it made no single-token call on a filled cache, and first_token='dense' replays nothing"
