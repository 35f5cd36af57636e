"""The handle of a patched model: settings, counts, and the way back."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from latent_santa.access import AccessLedger
from latent_santa.backends import BACKENDS
from latent_santa.config import SantaConfig
from latent_santa.routing_keys import scale_group

from .calls import Kind
from .control import Control
from .families import Adapter
from .graphs import StepGraphs
from .prefilled import Prefilled
from .report import report
from .scoring import score

if TYPE_CHECKING:
    from .patch import Edits

SETTINGS = frozenset(field.name for field in fields(SantaConfig))
# what `patch` takes beside them, and the way to change it afterwards
ONCE = {
    "preset": "give configure(latent_santa.SantaConfig.preset(...))",
    "graphs": "unpatch, and patch again with another graphs=",
    "compile": "unpatch, and patch again with another compile=",
}


def checked_settings(
    adapters: Sequence[Adapter], config: SantaConfig | None, default: SantaConfig, overrides: dict[str, Any]
) -> SantaConfig:
    """The settings that are asked for, seen to fit the model and this machine.

    Raises:
        TypeError: ``config`` is no :class:`SantaConfig`.
        ValueError: a setting is invalid, or does not fit the model's keys.
        RuntimeError: the backend cannot run here.
    """
    if config is not None and not isinstance(config, SantaConfig):
        raise TypeError(f"config is a {type(config).__name__}: give a SantaConfig, or settings by name (budget=256)")
    settings = (default if config is None else config).with_overrides(**overrides)
    if settings.routing_dtype != "model":
        for dims in {dims for adapter in adapters for dims in adapter.key_dims}:
            scale_group(dims, settings.routing_dtype)
    if settings.backend != "auto":
        device = next(adapters[0].module.parameters()).device
        reason = BACKENDS[settings.backend]().unavailable(device)
        if reason is not None:
            raise RuntimeError(
                f'backend="{settings.backend}" cannot run here: {reason}; use backend="torch", or "auto" to let each '
                "call choose"
            )
    return settings


class SantaHandle:
    """A patched model's settings, ledger and way back. Made by :func:`latent_santa.patch`.

    Threads may generate on one model at the same time: each has its own calls, and all share settings, ledger and
    counts. ``configure``, ``reset`` and the attributes below belong between generations.

    Under tensor parallelism every process makes the same calls, from one thread. What they must tell one another they
    exchange within the model's own calls, so ledger and report are the whole model's in each process, and asking for
    them waits for nobody.

    Attributes:
        model: the patched model.
        access: the ledger of rows read (Equations 13 and 14).
    """

    def __init__(self, model: PreTrainedModel, control: Control, edits: Edits) -> None:
        self.model = model
        self.access: AccessLedger = control.access
        self._control, self._edits = control, edits
        control.handle = self

    def unpatch(self) -> None:
        """Give the model back exactly as it was. Calling it again does nothing."""
        self._edits.undo()

    def __enter__(self) -> SantaHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.unpatch()

    @property
    def patched(self) -> bool:
        """Whether the model is still patched."""
        return self._edits.made

    @property
    def layers(self) -> int:
        """Patched attention layers."""
        return len(self._control.adapters)

    @property
    def layout(self) -> str:
        """How the cache's rows are laid out: ``"mla"`` or ``"gqa"``."""
        return self._control.adapters[0].layout

    # settings

    @property
    def config(self) -> SantaConfig:
        """Settings in force; change them with :meth:`configure`."""
        return self._control.config

    def configure(self, config: SantaConfig | None = None, **overrides: Any) -> SantaConfig:
        """Change settings between generations, without patching again: some by name, or all by a new configuration.

        Decode settings apply to the next call, the seed to caches filled from now on. When a setting that shapes teams
        changes, a cache that is already grouped is grouped again at its next sampled call.

        Raises:
            TypeError, ValueError, RuntimeError: as :func:`latent_santa.patch`; the settings stay as they were.
        """
        control = self._control
        for name in ONCE.keys() & overrides:
            raise ValueError(f"configure has no {name}, which patch takes: {ONCE[name]}")
        control.config = checked_settings(control.adapters, config, self.config, overrides)
        return self.config

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SETTINGS:
            raise AttributeError(f"{name} is a setting: change it with configure({name}={value!r})")
        super().__setattr__(name, value)

    @property
    def sequence_keys(self) -> list[int] | None:
        """Noise keys, one integer per sequence of the batch, or None for the places in the batch.

        A sequence draws the same noise wherever its key is the same. A cache keeps the keys it was first filled under.
        """
        return self._control.sequence_keys

    @sequence_keys.setter
    def sequence_keys(self, keys: Sequence[int] | None) -> None:
        try:
            self._control.sequence_keys = None if keys is None else [operator.index(key) for key in keys]
        except TypeError as error:
            raise TypeError(f"sequence_keys={keys!r}: give a list of integers, one per sequence, or None") from error

    @property
    def graphs(self) -> StepGraphs:
        """The decoding steps that replayed a CUDA graph, and those that did not, with the reasons."""
        return self._control.graphs

    @property
    def compiled(self) -> int:
        """Parts of the model that are compiled, or have our kernels, in calls of one token; they round otherwise."""
        return self._edits.parts if self._edits.compiled else 0

    @property
    def exact_parts(self) -> int:
        """Parts of the model that run on our kernels in calls of few tokens, with the bits of its own."""
        return 0 if self._edits.compiled else self._edits.parts

    @property
    def shadow(self) -> bool:
        """When True, every sampled call also computes dense attention on the same cache and records the error."""
        return self._control.shadow

    @shadow.setter
    def shadow(self, on: bool) -> None:
        self._control.shadow = bool(on)

    # one prompt, several uses

    def prepare(self, cache: Any, attention_mask: torch.Tensor | None = None) -> None:
        """Group a filled cache's rows now, instead of at its next sampled call.

        Args:
            cache: a dynamic cache, filled by this model, patched or not.
            attention_mask: ``(B, N)`` padding mask of its rows, or None when all are real.
        """
        self._control.prepare(cache, attention_mask)

    def prefill(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Prefilled:
        """Compute a prompt's dense prefill once, to generate from it many times under any settings.

        Args:
            input_ids: ``(B, N)`` int64 token ids, padded on the left.
            attention_mask: ``(B, N)``, 0 for padding, or None when all tokens are real.
            **kwargs: whatever else ``generate`` needs for the prompt, such as ``pixel_values``.
        """
        return Prefilled(self.model, self._control, input_ids, attention_mask, kwargs)

    def answer(self, context: torch.Tensor, questions: Sequence[torch.Tensor], **kwargs: Any) -> list[torch.Tensor]:
        """Answers to several questions about one context, which is prefilled and grouped once.

        Args:
            context: ``(1, N)`` int64 token ids.
            questions: each ``(1, Q)`` int64 token ids, that follow the context as a further turn.
            **kwargs: options of ``generate``, such as ``max_new_tokens``.

        Returns:
            For each question the new tokens, ``(1, T)`` int64; ``(R, T)`` with R returned sequences.

        Raises:
            TypeError: something is no tensor of token ids.
            ValueError: something is of another shape.
            RuntimeError: the model is no longer patched.
        """
        prefilled = self.prefill(context)
        answers = []
        for question in questions:
            output = prefilled.follow(question, **kwargs)
            tokens = output if isinstance(output, torch.Tensor) else output.sequences
            answers.append(tokens[:, context.shape[1] + question.shape[1] :])
        return answers

    def score(
        self, input_ids: torch.Tensor, continuation: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Log-probabilities of given continuations under sampled attention, token by token.

        One call over prompt and continuation would be a dense prefill; this makes a sampled call per token instead.

        Args:
            input_ids: ``(B, N)`` int64 prompts, padded on the left.
            continuation: ``(B, T)`` int64, padded on the right by -100.
            attention_mask: ``(B, N)``, 0 for padding, or None when all prompt tokens are real.

        Returns:
            ``(B, T)`` float32 natural logarithms; 0 where the continuation is padding.
        """
        return score(self.prefill(input_ids, attention_mask), continuation)

    # counts

    @property
    def sparse_calls(self) -> int:
        """Single-token calls of the model that sampled, replays included."""
        return self._control.count(Kind.DECODE) + self._control.count(Kind.REPLAY)

    @property
    def full_calls(self) -> int:
        """Sampled calls in which K covered every team of every sequence, which are dense attention. In GQA under tensor
        parallelism these are the teams of this process's KV heads."""
        return self._control.full_calls

    @property
    def dense_calls(self) -> int:
        """Decoding calls that attended densely: method "dense", verification of drafts, or no cache."""
        return sum(map(self._control.count, (Kind.DENSE, Kind.VERIFY, Kind.UNCACHED)))

    @property
    def prefill_calls(self) -> int:
        """Calls whose rows were (or will be) grouped."""
        return self._control.count(Kind.PREFILL)

    def shadow_errors(self) -> torch.Tensor:
        """Relative attention errors recorded by shadow mode, ``(layers, calls, B)`` float32 on the CPU.

        An entry is the mean over heads of ||estimate - dense|| / ||dense||, on the same query and cache.

        Raises:
            ValueError: the recorded calls had different batch sizes.
        """
        log = self._control.shadow_log
        if not log:
            return torch.empty(0, 0, 0)
        sizes = sorted({errors.numel() for calls in log.values() for errors in calls})
        if len(sizes) > 1:
            raise ValueError(
                f"calls with batch sizes {sizes} were recorded; shadow_errors needs one: reset() in between"
            )
        calls = min(map(len, log.values()))  # a call that failed on its way recorded some layers only
        return torch.stack([torch.stack(log[layer][:calls]).cpu() for layer in sorted(log)])

    def reset(self) -> None:
        """Forget the ledger, call counts and shadow errors."""
        self._control.reset()

    def report(self) -> str:
        """A table of settings, calls and rows, and each layer's rows, as text."""
        return report(self, self._control)

    def __repr__(self) -> str:
        state = f"{self.layers} layers patched" if self.patched else "unpatched"
        return f"<SantaHandle of {type(self.model).__name__}: {state}, {self.config}>"
