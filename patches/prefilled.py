"""A prompt's dense prefill, kept to be generated from many times: one prefill for many settings or many questions.

The cache goes back to the prefill's end before each use, with the last row held back: ``generate`` then feeds the last
token as an ordinary one-token call, which is Appendix F's replay. Rows below it never change, so nothing is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from .control import CACHE_NAMES, Control
from .grouping import group_waiting
from .recorded import Recorded


class Prefilled:
    """The cache of a dense prefill and the ways to use it. Made by ``santa.prefill``.

    Uses follow one another: a new one takes the cache from the one before. ``generate`` and ``follow`` of several
    threads wait for each other.

    Attributes:
        input_ids: ``(B, N)`` int64, the prompt.
        attention_mask: ``(B, N)``, or None when all tokens are real.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        control: Control,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        kwargs: dict[str, Any],
    ) -> None:
        _check_ids("input_ids", input_ids)
        _check_mask(input_ids, attention_mask)
        self.input_ids, self.attention_mask = input_ids, attention_mask
        self._model, self._control = model, control
        self._lock, self._busy = threading.RLock(), False
        self._check_patched()
        self._name = next(name for name in CACHE_NAMES if name in control.names)
        self._kwargs = kwargs
        self._fill()

    @torch.no_grad()
    def _fill(self) -> None:
        """Compute the prefill, and keep as many queries as the settings in force look at, or most other settings do."""
        control = self._control
        self._states, self._last, self._cache = [], [], DynamicCache(config=control.base.config)
        control.thread.preparing = True
        try:
            options = {
                "max_new_tokens": 1,
                "do_sample": False,
                "num_beams": 1,
                "num_return_sequences": 1,
                self._name: self._cache,
            }
            self._model.generate(self.input_ids, attention_mask=self.attention_mask, **self._kwargs, **options)
            self._queries = control.observed
        finally:
            control.thread.preparing = False
        self._states = [layer.snapshot() for layer in self._layers]
        # a replay writes the last row again
        self._last = [(state.keys[..., -1:, :].clone(), state.values[..., -1:, :].clone()) for state in self._states]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One use at a time; a use from within a use (a streamer's) could only break the outer one.

        Raises:
            RuntimeError: this thread is already using the prompt.
        """
        with self._lock:
            if self._busy:
                raise RuntimeError("this prefilled prompt is being generated from: finish that first, or prefill again")
            self._busy = True
            try:
                yield
            finally:
                self._busy = False

    def _check_patched(self) -> None:
        if not self._control.handle.patched:
            raise RuntimeError(
                "the model is no longer patched under this handle, so nothing would be sampled: patch it again, and "
                "prefill with the new handle"
            )

    @property
    def _layers(self) -> list[Any]:
        return self._cache.layers

    @property
    def vocabulary(self) -> int:
        """Token ids that the model knows."""
        return int(self._model.config.get_text_config(decoder=True).vocab_size)

    @property
    def bytes(self) -> int:
        """Memory of the rows, in bytes, team records aside."""
        parts = (part for state in self._states for part in (state.keys, state.values))
        return sum(part.numel() * part.element_size() for part in parts)

    def rewound(self) -> Any:
        """The cache as the prefill left it, all N rows, grouped under the settings in force.

        Where these look at the queries of all prompt tokens and others were in force before, it is computed again.

        Raises:
            RuntimeError: the patch was undone.
        """
        self._check_patched()
        if self._control.observed > self._queries:
            self._fill()
        for layer, state, last in zip(self._layers, self._states, self._last, strict=True):
            layer.rewind(state)
            layer.overwrite_last(*last)
        mask = None if self.attention_mask is None else self.attention_mask.bool()
        group_waiting(self._layers, self._control.adapters, mask, self._control.config)
        self._states = [layer.snapshot() for layer in self._layers]
        return self._cache

    def held_back(self) -> Any:
        """The cache of the prompt's rows but the last, whose token the next call feeds."""
        cache = self.rewound()
        for layer in self._layers:
            layer.hold_back_last()
        return cache

    def generate(self, **kwargs: Any) -> Any:
        """``model.generate`` on the prompt under the settings in force, without computing its prefill again."""
        with self._alone():
            return self._generate(self.input_ids, self.attention_mask, self.held_back(), kwargs)

    def follow(self, turn: Tensor, **kwargs: Any) -> Any:
        """``model.generate`` on the prompt and a further turn ``(B, Q)`` int64 behind it."""
        _check_ids("turn", turn, least=0)
        if turn.shape[0] != self.input_ids.shape[0]:
            raise ValueError(
                f"turn has {turn.shape[0]} sequences behind {self.input_ids.shape[0]} prompts: give one each"
            )
        if not turn.shape[1]:
            return self.generate(**kwargs)  # generate feeds all ids again when none is new to the cache
        ids = torch.cat((self.input_ids, turn.to(self.input_ids.device)), 1)
        mask = None
        if self.attention_mask is not None:
            mask = torch.nn.functional.pad(self.attention_mask, (0, turn.shape[1]), value=1)
        with self._alone():
            return self._generate(ids, mask, self.rewound(), kwargs)

    def _generate(self, ids: Tensor, mask: Tensor | None, cache: Any, kwargs: dict[str, Any]) -> Any:
        """``generate`` repeats ids for beams and returned sequences, but no cache that it is given."""
        settings = kwargs.get("generation_config") or self._model.generation_config
        if kwargs.get("use_cache", getattr(settings, "use_cache", None)) is False:
            raise ValueError("use_cache=False: a prefilled prompt is its cache; switch it on in generation settings")
        asked = (
            kwargs.get(name) or getattr(settings, name, None) or 1 for name in ("num_beams", "num_return_sequences")
        )
        copies = max(asked)
        if copies > 1:
            cache.batch_repeat_interleave(copies)
        return self._model.generate(ids, attention_mask=mask, **{self._name: cache}, **kwargs)

    def record(self, max_new_tokens: int) -> Recorded:
        """Decode densely and greedily, and keep each call's queries and rows, for other settings to attend.

        Raises:
            ValueError: the prompt is a batch of several sequences.
        """
        return Recorded(self, self._control, max_new_tokens)

    def step(self, tokens: Tensor, cache: Any, rows: int) -> Tensor:
        """Logits ``(B, vocabulary)`` behind one more token per sequence; ``rows`` with it are real, padding aside."""
        mask = None
        if self.attention_mask is not None:
            mask = torch.nn.functional.pad(self.attention_mask, (0, rows - self.input_ids.shape[1]), value=1)
        positions = torch.full_like(tokens, rows - 1) if mask is None else mask.long().sum(-1, keepdim=True) - 1
        given = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, self._name: cache}
        logits: Tensor = self._model(**given, use_cache=True).logits[:, -1]
        return logits


def _check_ids(name: str, ids: Any, least: int = 1) -> None:
    """See that ``ids`` are token ids of at least one sequence and ``least`` tokens.

    Raises:
        TypeError: they are no tensor of integers.
        ValueError: they are of another shape.
    """
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
        got = f"a tensor of {ids.dtype}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise TypeError(
            f"{name} is {got}: give token ids, (B, N) int64, as in tokenizer(text, return_tensors='pt').input_ids"
        )
    if ids.dim() != 2 or not ids.shape[0] or ids.shape[1] < least:
        raise ValueError(f"{name} has shape {tuple(ids.shape)}: give (B, N), at least one sequence and {least} tokens")


def _check_mask(ids: Tensor, mask: Any) -> None:
    """See that ``mask`` fits the prompts and hides none of their last tokens, which the replay runs again.

    Raises:
        ValueError: it does not.
    """
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask ({got}) must have the shape of input_ids, {tuple(ids.shape)}")
    if not bool(mask[:, -1].all()):
        raise ValueError("attention_mask hides the last token of a prompt: pad on the left (padding_side='left')")
