"""One decoding step captured on one cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from latent_santa.config import SantaConfig
from latent_santa.kernels import Workspace, scratch

from ..calls import ModelCall
from .engine import Engine
from .fixed import FixedCall

if TYPE_CHECKING:
    from ..cache_layer import TeamLayer
    from ..control import Control


class Conditions(NamedTuple):
    """What a captured step took from the host, apart from the cache: another value needs another capture."""

    patch: Any
    config: SantaConfig
    model: Any
    arguments: tuple[tuple[str, Any], ...]


class CapturedStep:
    """The launches of one decoding step on one cache's reserved rows.

    Attributes:
        fixed: what changes from step to step, in tensors of its own.
        conditions: what it was captured under.
        served: steps that replayed it.
    """

    def __init__(
        self, engine: Engine, call: ModelCall, control: Control, conditions: Conditions, given: dict[str, Any]
    ) -> None:
        self.fixed, self.conditions, self.served = FixedCall(call), conditions, 0
        self._engine, self._control, self._scratch = engine, control, Workspace()
        self._rows = [_records(layer) for layer in call.layers]
        self._inputs = {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}
        # where a call leaves its positions to the model, the host would count them
        self._places: dict[str, Tensor] = {}
        for name, place in (("position_ids", self.fixed.place[None]), ("cache_position", self.fixed.place)):
            if name in control.names and given.get(name) is None:
                self._places[name] = place
        self._kept: dict[str, Tensor] = {}  # where each replay leaves its output
        self._output: tuple[type, str | None] = (dict, None)  # its type, and the name of the cache in it

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # a copied or pickled cache has other addresses, so it starts without a captured step
        return (type(None), ())

    def serves(self, call: ModelCall, conditions: Conditions) -> bool:
        """Whether the cache stands where it was captured, under the same conditions, with room for the call's row."""
        layers = call.layers
        return (
            layers[0].get_seq_length() < self.fixed.room
            and (call.visible is None or self.fixed.mask is not None)
            and self.conditions == conditions
            and (call.as_captured or self.stands(layers))
        )

    def stands(self, layers: Sequence[TeamLayer]) -> bool:
        """Whether rows and teams lie where they were captured."""
        return len(layers) == len(self._rows) and all(
            _same(_records(layer), kept) for layer, kept in zip(layers, self._rows, strict=True)
        )

    def first(self, call: ModelCall, given: dict[str, Any]) -> Any:
        """Make the step as it will be captured; its output."""
        self.fixed.set(call)
        with scratch(self._scratch):
            return self._with_cache(self._engine.first(lambda: self._run(call, given)), given)

    def capture(self, call: ModelCall, given: dict[str, Any]) -> None:
        """Keep the launches of the step. It must have been made before."""
        with scratch(self._scratch):
            self._kept = self._engine.capture(lambda: self._run(call, given))

    def _run(self, call: ModelCall, given: dict[str, Any]) -> dict[str, Tensor]:
        thread = self._control.thread
        present, thread.call = thread.call, self.fixed
        try:
            self.fixed.begin(call.layers)
            output = self._control.graphs.forward(**{**given, **self._inputs, **self._places})
            self.fixed.count()
        finally:
            self.fixed.end()
            thread.call = present
        cache = next((name for name, value in output.items() if isinstance(value, Cache)), None)
        self._output = type(output), cache
        return _tensors(output)

    def replay(self, call: ModelCall, given: dict[str, Any]) -> Any:
        """Launch the step on other inputs; its output."""
        self.fixed.set(call)
        with torch.inference_mode():  # as in FixedCall.set
            for name, held in self._inputs.items():
                held.copy_(given[name])
        self._engine.replay()
        # a copy of the caller's own: the next replay writes into the same tensors
        return self._with_cache({name: value.clone() for name, value in self._kept.items()}, given)

    def _with_cache(self, tensors: dict[str, Tensor], given: dict[str, Any]) -> Any:
        kind, name = self._output
        if name is None:
            return kind(**tensors)
        return kind(**tensors, **{name: next(value for value in given.values() if isinstance(value, Cache))})


def _records(layer: TeamLayer) -> tuple[Any, ...]:
    """What a captured step keeps of a layer. A suffix of limited length moves on over reserved rows and teams."""
    grouped = layer.grouped
    return layer.buffers, grouped.teams, grouped.exact, layer.limit, None if layer.limit else grouped.stop


def _same(now: tuple[Any, ...], kept: tuple[Any, ...]) -> bool:
    return now[0] is kept[0] and now[1] is kept[1] and now[2:] == kept[2:]


def _tensors(output: Any) -> dict[str, Tensor]:
    """The tensors of a model's output, which is a mapping of tensors and the cache.

    Raises:
        NotImplementedError: it holds something else.
    """
    for name, value in output.items():
        if not isinstance(value, (Tensor, Cache)):
            raise NotImplementedError(f"the model's output holds a {type(value).__name__} as {name}")
    return {name: value for name, value in output.items() if isinstance(value, Tensor)}
