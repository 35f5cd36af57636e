"""Whole decoding steps of a model: every setting in turn on the same filled cache, in paired rounds.

A turn measures a setting twice. A bare step is one hand-made call of one token per sequence, its work on the device
included. ``generate`` is timed by what reaches a streamer: the mean time between tokens, stopping checks, sampling and
all. Both begin at the same cached rows; prompts are never computed again.
"""

from __future__ import annotations

import copy
import inspect
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

import latent_santa
from latent_santa import dense
from latent_santa.config import SantaConfig
from latent_santa.eval.bench.filled import FilledCache, collect, timed
from latent_santa.eval.bench.settings import Setting
from latent_santa.patches import experts
from latent_santa.patches.control import CACHE_NAMES
from latent_santa.patches.graphs.engine import ENGINES

# steps of a turn before the timed ones; a first turn captures its graph in the first of them
UNTIMED = 3
LEAST_STEPS = 4
# a turn of slow steps takes fewer of them
TURN_MS = 2000.0
FULL = "does not fit in the device's memory"


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        steps: timed steps of a turn, where they are quick.
        rounds: turns of every setting. The order is reversed from round to round.
        seconds: no round begins after so long; None: no limit. One round is measured in any case.
    """

    steps: int = 16
    rounds: int = 5
    seconds: float | None = None

    @property
    def free(self) -> int:
        """Rows that a turn may write behind the filled ones."""
        return UNTIMED + self.steps + 8


class Clock(BaseStreamer):
    """Notes when something reaches it: the prompt first, then each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def milliseconds(self) -> float:
        """Mean time between tokens, after the untimed ones."""
        first, last = self.times[UNTIMED + 1], self.times[-1]
        return 1000 * (last - first) / (len(self.times) - UNTIMED - 2)


class Point:
    """All settings on one filled cache.

    Attributes:
        results: by setting's name what was measured, ready for JSON; turns add to it.
    """

    def __init__(
        self,
        model: Any,
        filled: FilledCache,
        batch: int,
        context: int,
        settings: Sequence[Setting],
        plan: Plan,
        results: dict[str, dict[str, Any]],
    ) -> None:
        self.model, self.filled, self.plan, self.results = model, filled, plan, results
        self.settings = settings
        self.device = model.get_input_embeddings().weight.device
        generator = torch.Generator().manual_seed(1)
        shape = (batch, context + 1)
        self._ids = torch.randint(model.config.vocab_size, shape, generator=generator).to(self.device)
        parameters = inspect.signature(type(model).forward).parameters
        self._cache_name = next(name for name in CACHE_NAMES if name in parameters)
        self._dropped: set[str] = set()  # no longer measured: they did not fit beside the others
        self._patches: dict[tuple[bool, bool], tuple[Any, Any]] = {}
        # a captured step belongs to one cache and one kind of call
        self._caches = {s.name: (filled.for_patched(), filled.for_patched()) for s in settings if s.patched}

    def measure(self) -> Iterator[str]:
        """Give every setting its turns; yields after each the name of the setting."""
        begun = time.perf_counter()
        try:
            for number in range(self._rounds_done(), self.plan.rounds):
                if number and self.plan.seconds is not None and time.perf_counter() - begun > self.plan.seconds:
                    return
                order = [s for s in self.settings if not self._missing(s) and s.name not in self._dropped]
                for setting in order if number % 2 == 0 else reversed(order):
                    self._turn(setting)
                    yield setting.name
        finally:
            for _, santa in self._patches.values():
                santa.unpatch()
            self._patches.clear()

    def _patched(self, setting: Setting) -> tuple[Any, Any]:
        """The model that the setting runs on, and its handle, under the setting; no handle without a patch."""
        if setting.overrides is None:
            return self.model, None
        kind = (setting.compile, setting.eager)
        if kind not in self._patches:
            graphs = "off" if setting.eager or self.device.type not in ENGINES else "on"
            twin = _twin(self.model)
            self._patches[kind] = twin, latent_santa.patch(twin, graphs=graphs, compile=setting.compile)
        model, santa = self._patches[kind]
        santa.configure(SantaConfig(**setting.overrides))
        return model, santa

    def _missing(self, setting: Setting) -> str | None:
        return self.results.get(setting.name, {}).get("missing")

    def _rounds_done(self) -> int:
        """Rounds that every setting has had; a round that was interrupted is forgotten."""
        lengths = [
            len(self.results.get(s.name, {}).get("generate_ms", ())) for s in self.settings if not self._missing(s)
        ]
        done = min(lengths, default=self.plan.rounds)
        for setting in self.settings:
            for times in ("bare_ms", "generate_ms"):
                del self.results.get(setting.name, {}).get(times, [])[done:]
        return done

    def _turn(self, setting: Setting) -> None:
        result = self.results.setdefault(setting.name, {"bare_ms": [], "generate_ms": []})
        reason = self._attempt(setting, result)
        if reason == FULL:  # graphs of the others may hold what is missing
            for caches in self._caches.values():
                for cache in caches:
                    cache.layers[0].graph = None
            collect(self.device)
            reason = self._attempt(setting, result)
        if reason is None:
            return
        self._dropped.add(setting.name)
        if not result["bare_ms"]:
            self.results[setting.name] = {"missing": reason}
        else:
            result["dropped"] = reason  # its rounds up to here stay

    @torch.no_grad()
    def _attempt(self, setting: Setting, result: dict[str, Any]) -> str | None:
        """Measure a turn; why it cannot be made, or None."""
        first = not result["bare_ms"]
        if first:
            collect(self.device)
        try:
            model, santa = self._patched(setting)
            if santa is not None:
                result["prepare_ms"] = self.filled.rewind(self._caches[setting.name][0], santa)
                santa.reset()
            own = self._own_bytes(santa)
            before = self._allocated()
            bare = self._bare(model, self._cache(setting, santa, 0))
            generated = self._generated(model, self._cache(setting, santa, 1), bare)
        except RuntimeError as error:
            # a capture says as text that memory was out
            if isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in str(error):
                return FULL
            if str(error).startswith(('graphs="on"', "compile=True")):
                return str(error)
            raise
        if first:  # later turns find their graph's memory taken
            result |= self._memory(own, before)
        result["bare_ms"].append(bare)
        result["generate_ms"].append(generated)
        result |= _facts(model, santa)
        result.pop("dropped", None)
        return None

    def _bare(self, model: Any, cache: Any) -> float:
        """Median time of a step, the head included."""
        times: list[float] = []
        while len(times) < UNTIMED + LEAST_STEPS or (
            len(times) < UNTIMED + self.plan.steps and sum(times[UNTIMED:]) < TURN_MS
        ):
            token = self._ids[:, len(times) % self._ids.shape[1], None]
            call = partial(model, input_ids=token, use_cache=True, logits_to_keep=1, **{self._cache_name: cache})
            times.append(timed(call, self.device)[1])
        return statistics.median(times[UNTIMED:])

    def _generated(self, model: Any, cache: Any, bare: float) -> float:
        """Mean time of a token through ``generate``; as many tokens as the bare step's time allows."""
        steps = max(LEAST_STEPS, min(self.plan.steps, int(TURN_MS / bare)))
        clock = Clock()
        torch.manual_seed(3)
        model.generate(
            self._ids,
            attention_mask=torch.ones_like(self._ids),
            max_new_tokens=UNTIMED + steps + 1,
            # of random weights the likeliest token is often the same one, whose experts would be read once
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            eos_token_id=self.model.config.vocab_size,  # looked for, and never found
            pad_token_id=0,
            streamer=clock,
            **{self._cache_name: cache},
        )
        return clock.milliseconds()

    def _cache(self, setting: Setting, santa: Any, use: int) -> Any:
        """The filled cache for a bare step (0) or for ``generate`` (1)."""
        if santa is None:
            return self.filled.for_transformers()
        cache = self._caches[setting.name][use]
        self.filled.rewind(cache, santa)
        return cache

    def _allocated(self) -> int | None:
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def _own_bytes(self, santa: Any) -> int:
        """What a setting holds before its turn: weights, and patched rows and teams. An unpatched turn copies rows."""
        weights = sum(weight.numel() * weight.element_size() for weight in self.model.parameters())
        return weights if santa is None else weights + self.filled.bytes + self.filled.team_bytes(santa)

    def _memory(self, own: int, before: int | None) -> dict[str, int | None]:
        if before is None:
            return {"peak": None, "reserved": None}
        peak = torch.cuda.max_memory_allocated(self.device) - before + own
        return {"peak": peak, "reserved": torch.cuda.max_memory_reserved(self.device)}


def _twin(model: Any) -> Any:
    """The model again, with modules of its own and the same weights: several patches can then stand at once."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def _facts(model: Any, santa: Any) -> dict[str, Any]:
    """What ran in a turn: experts, graphs, rows read."""
    found: dict[str, Any] = {
        "experts": {
            "bare": sorted(set(experts.implementations(model))),
            "generate": sorted(set(experts.while_decoding(model))),
            "kernels": any("forward" in vars(module) for module in model.modules() if hasattr(module, "gate_up_proj")),
            "same_bits": santa is not None and santa.exact_parts > 0,
        }
    }
    if santa is None:
        return {**found, "percent": 100.0, "replayed": 0}
    graphs = santa.graphs
    found |= {"percent": santa.access.percent, "steps": santa.sparse_calls + santa.dense_calls}
    found |= {"replayed": graphs.replayed, "launched": dict(graphs.eager), "compiled": santa.compiled}
    if graphs.captured:
        found["capture_s"] = graphs.seconds / graphs.captured
    if santa.config.method == "absorbed_dense":
        found["operator"] = dense.last_used()
    return found
