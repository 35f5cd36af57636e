"""One attention module of a patched model: adapter, then method, then ledger."""

from __future__ import annotations

import sys
import weakref
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from latent_santa.access import Unit, attended_unit
from latent_santa.backends import Backend, choose
from latent_santa.config import SantaConfig
from latent_santa.estimator import dense_attention
from latent_santa.methods import METHODS
from latent_santa.methods.base import Method
from latent_santa.step import DecodeStep, Draw, Output, Sampling
from latent_santa.teams import Teams

from .calls import Kind, ModelCall
from .control import Control
from .families import Adapter

NAME = "latent_santa"


class _Settled(NamedTuple):
    """What stays the same from step to step, for one grouping under one configuration."""

    teams: weakref.ref[Teams]
    config: SantaConfig
    unit: Unit
    backend: Backend | None


class PatchedLayer:
    """What one attention module does in each kind of call."""

    def __init__(self, adapter: Adapter, control: Control, config: Any) -> None:
        self.adapter, self.control, self.model_config = adapter, control, config
        self.layer: int = adapter.module.layer_idx
        self._settled: _Settled | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("a patched model cannot be pickled: unpatch it first")

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchedLayer:
        # the copy's generate and hooks would run the original
        raise RuntimeError("a patched model cannot be copied: unpatch it first, then copy it and patch the copy")

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        call = self.control.thread.call
        if call.kind.sampled:
            with torch.autocast(key.device.type, enabled=False):  # sampling is float32 whatever the model runs in
                return self._sampled(call, query, key, value, kwargs["scaling"]), None
        if call.kind.counted:
            self._count_dense(call, key, value)
            if self.control.thread.heard is not None:
                self.control.thread.heard.setdefault(self.layer, []).append((query, kwargs["scaling"]))
        if call.kind in (Kind.PREFILL, Kind.VERIFY) and (most := self.control.observed):
            call.layers[self.layer].observe(query, kwargs["scaling"], most)
        mask = call.dense_mask(mask, self.model_config._attn_implementation)
        return self._dense(query, key, value, mask, **kwargs)

    def _dense(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The model's own attention, as if it were not patched."""
        module = self.adapter.module
        key, value = self.adapter.expand(key, value)
        eager = vars(sys.modules[type(module).__module__]).get("eager_attention_forward")
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.model_config._attn_implementation, eager)
        return interface(module, query, key, value, mask, **kwargs)

    @torch.no_grad()
    def _sampled(self, call: ModelCall, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """The estimate; gradients do not pass through sampling."""
        config = self.control.config
        method = METHODS[config.method]
        step = self._step(call, query, key, value, scale)
        output = self._attend(method, step, config)
        dense = step.draw.step[:, None].expand_as(output.union)
        assert call.ledger is not None
        call.ledger.record(self.layer, self._unit(step), output.routing, output.union, output.suffix, dense)
        if self.layer == 0:
            call.full = method.full(step, config)
        if self.control.shadow:
            self._compare(step, output)
        return self.adapter.output(output.out, query.dtype)

    def _attend(self, method: Method, step: DecodeStep, config: SantaConfig) -> Output:
        peers = step.peers
        if peers is None or method.apart:
            return method.attend(step, config, self._backend)
        output = method.attend(step.together(), config, self._backend)
        return replace(output, out=peers.own(output.out, 2), lse=peers.own(output.lse, 2))

    def _step(self, call: ModelCall, query: Tensor, key: Tensor, value: Tensor, scale: float) -> DecodeStep:
        rows, device = self.adapter.rows(key, value), key.device
        visible, step = call.on("visible", device), call.on("step", device)
        assert step is not None
        adapter = self.adapter
        draw = Draw(call.noise_key(self.layer, device), step, self.layer, call.ahead, adapter.first)
        teams, suffix = call.layers[self.layer].grouped.teams, call.suffix(self.layer, device)
        peers = None if adapter.groups_apart else adapter.peers
        return DecodeStep(adapter.query(query), rows, teams, suffix, draw, scale, visible, peers)

    def _backend(self, step: DecodeStep, sampling: Sampling) -> Backend:
        """The backend of the sampled operator, asked for its limits once per grouping and configuration."""
        settled = self._settle(step)
        if settled is None or settled.backend is None:
            backend = choose(self.control.config.backend, step, sampling)
            if settled is not None:
                self._settled = settled._replace(backend=backend)
            return backend
        return settled.backend

    def _unit(self, step: DecodeStep) -> Unit:
        settled = self._settle(step)
        if settled is None:
            return METHODS[self.control.config.method].unit(step.rows, None, self.control.config)
        return settled.unit

    def _settle(self, step: DecodeStep) -> _Settled | None:
        config, settled = self.control.config, self._settled
        if step.teams is None:
            return None
        if settled is None or settled.teams() is not step.teams or settled.config is not config:
            unit = METHODS[config.method].unit(step.rows, step.teams, config)
            settled = self._settled = _Settled(weakref.ref(step.teams), config, unit, None)
        return settled

    def _count_dense(self, call: ModelCall, key: Tensor, value: Tensor) -> None:
        step = call.on("step", key.device)
        assert step is not None and call.ledger is not None
        dense = step[:, None].expand(-1, key.shape[1])
        none = torch.zeros_like(dense)
        unit = attended_unit(self.adapter.rows(key, value), None)
        call.ledger.record(self.layer, unit, none, dense, none, dense)

    def _compare(self, step: DecodeStep, output: Output) -> None:
        """Relative error of the estimate against dense attention on the same query and cache, head by head."""
        exact, _ = dense_attention(step.query, step.rows, step.visible, step.scale)
        exact = self.adapter.output(exact, torch.float32)
        error = (self.adapter.output(output.out, torch.float32) - exact).norm(dim=-1)
        relative = error / exact.norm(dim=-1).clamp_min(1e-20)
        mean = relative.flatten(1).mean(-1)
        if self.adapter.peers is not None:
            mean = self.adapter.peers.sum(mean) / self.adapter.peers.world
        self.control.log_error(self.layer, mean)


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Entry in transformers' attention interface; ``module`` carries its :class:`PatchedLayer`."""
    patched: PatchedLayer = module.__dict__["_latent_santa"]
    return patched(query, key, value, attention_mask, **kwargs)
