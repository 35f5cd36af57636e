"""The base model's ``forward``: a decoding step replays its graph where one stands, and is captured where that pays."""

from __future__ import annotations

import functools
import logging
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import Cache

from latent_santa.methods import METHODS

from ..calls import ModelCall
from .captured import CapturedStep, Conditions
from .engine import ENGINES
from .reasons import Look, reason_of_call

if TYPE_CHECKING:
    from ..cache_layer import TeamLayer
    from ..control import Control

log = logging.getLogger("latent_santa")

MODES = ("auto", "on", "off")
# a capture costs what some replays save: so many steps must follow where their number is known, and so many must have
# been made on the same rows where it is not
LEAST_AHEAD, LEAST_BEHIND = 4, 2
# captures in a row that served fewer steps than they cost, after which a cache gets no more
MOST_WASTED = 3
SHORT = "too few steps to pay for a capture"
WASTED = "captures of this cache's steps served too few of them: settings, masks or rows change from step to step"


class StepGraphs:
    """Takes the place of the base model's ``forward``.

    Attributes:
        mode: ``"auto"``, ``"on"`` (a step that cannot be captured is refused) or ``"off"``.
        replayed: steps that were replays of a graph.
        captured: steps of which a graph was made, in ``seconds`` altogether.
        eager: steps that ran launch by launch, by reason.
        forward: the base model's own.
    """

    def __init__(self, control: Control, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"graphs={mode!r}: choose from {', '.join(MODES)}")
        functools.update_wrapper(self, control.base.forward)
        self.control, self.mode = control, mode
        self.forward = control.base.forward
        self._look: Look | None = None
        self._behind: weakref.WeakKeyDictionary[TeamLayer, tuple[Any, int]] = weakref.WeakKeyDictionary()
        self._wasted: weakref.WeakKeyDictionary[TeamLayer, int] = weakref.WeakKeyDictionary()
        self._failed: dict[Conditions, str] = {}
        self.reset()
        if mode == "on":
            self._refuse(Look.at(control.base).reason)

    def reset(self) -> None:
        """Forget the counts."""
        self.replayed = self.captured = 0
        self.seconds = 0.0
        self.eager: Counter[str] = Counter()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.control.thread.call
        if self.mode == "off" or not call.kind.one_token:
            return self.forward(*args, **kwargs)
        reason = self._looked(call).reason or reason_of_call(self.control, call, kwargs)
        if reason is None:
            given = self._given(kwargs)
            conditions = self._conditions(given)
            graph = call.layers[0].graph
            if graph is not None and graph.serves(call, conditions):
                self.replayed += 1
                graph.served += 1
                return self._done(graph, call, graph.replay(call, given))
            call.layers[0].graph = None  # its memory goes to the next one
            reason = self._failed.get(conditions) or self._spent(call.layers[0], graph)
            if reason is None and (graph is not None or self._pays(call)):
                return self._capture(call, conditions, given)
        self._refuse(reason)
        self.eager[reason or SHORT] += 1
        return self.forward(**kwargs)

    def _spent(self, first: TeamLayer, graph: CapturedStep | None) -> str | None:
        """Why the cache gets no more captures, or None; ``graph`` is one that no longer serves."""
        if graph is not None:
            wasted = self._wasted.get(first, 0) + 1 if graph.served < LEAST_AHEAD else 0
            self._wasted[first] = wasted
        return WASTED if self.mode == "auto" and self._wasted.get(first, 0) >= MOST_WASTED else None

    def _refuse(self, reason: str | None) -> None:
        if self.mode == "on" and reason is not None:
            raise RuntimeError(
                f'graphs="on": a decoding step cannot be captured: {reason}; change that, or use graphs="auto", which '
                "runs such a step launch by launch"
            )

    def _looked(self, call: ModelCall) -> Look:
        """The model as it was when this thread's present generation began; of hand-made calls, as it is."""
        thread, first = self.control.thread, call.layers[0]
        look = self._look if thread.looked is not None and thread.looked() is first else None
        if look is None or not (thread.generating or look.holds()):
            look = self._look = Look.at(self.control.base)
            thread.looked, thread.state = weakref.ref(first), None
        return look

    def _given(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The call's arguments without its padding mask, which a captured step keeps itself."""
        return {name: value for name, value in kwargs.items() if name != "attention_mask"}

    def _conditions(self, given: dict[str, Any]) -> Conditions:
        assert self._look is not None
        arguments = tuple(
            (name, (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value)
            for name, value in given.items()
            if not isinstance(value, Cache)
        )
        thread = self.control.thread
        if thread.state is None or not thread.generating:  # nobody moves weights within a generation
            thread.state = self._look.weights(self.control.base)
        # a cache may outlive its patch, and the next one may compile what this one did not
        return Conditions(self, self.control.config, (thread.state, self._look.switched()), arguments)

    def _pays(self, call: ModelCall) -> bool:
        """Whether as many steps follow as a capture costs: so many were asked for, or so many were made already."""
        first = call.layers[0]
        if self.mode == "on":
            return True
        if first.asked is not None:
            return first.asked - 1 - first.get_seq_length() > LEAST_AHEAD  # the last token is not fed
        rows, made = self._behind.get(first, (None, 0))
        made = made + 1 if rows is first.buffers else 1
        self._behind[first] = (first.buffers, made)
        return made > LEAST_BEHIND

    def _capture(self, call: ModelCall, conditions: Conditions, given: dict[str, Any]) -> Any:
        """Make the step and keep its launches for the next ones."""
        begun = time.perf_counter()
        engine = ENGINES[call.layers[0].keys.device.type](call.layers[0].keys.device)
        graph = CapturedStep(engine, call, self.control, conditions, given)
        with _shown():
            output = graph.first(call, given)
            try:
                graph.capture(call, given)
            except (RuntimeError, NotImplementedError) as error:
                reason = self._failed[conditions] = f"its capture failed: {str(error).strip().splitlines()[0]}"
                self._refuse(reason)
                log.warning("decoding steps run launch by launch: %s", reason)
                self.eager[reason] += 1
                return self._done(graph, call, output)
        call.layers[0].graph = graph
        self.captured += 1
        self.seconds += time.perf_counter() - begun
        return self._done(graph, call, output)

    def _done(self, graph: CapturedStep, call: ModelCall, output: Any) -> Any:
        rows = call.layers[0].get_seq_length() + 1
        for layer in call.layers:
            layer.advance(rows)
        assert graph.fixed.ring is not None
        self.control.access.step_done(graph.fixed.ring)
        config, teams = self.control.config, call.layers[0].grouped.teams
        # teams of generated rows may have come to the captured ones
        call.full = graph.fixed.full and (teams is None or METHODS[config.method].every_team(teams, config))
        return output


@contextmanager
def _shown() -> Iterator[None]:
    """Say on a terminal what a first step waits for."""
    if not sys.stderr.isatty():
        yield
        return
    print("latent_santa: capturing the decoding step as a CUDA graph ...", end="", file=sys.stderr, flush=True)
    begun = time.perf_counter()
    yield
    print(f" {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)
