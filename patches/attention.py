"""The function that stands in the attention interface for patched layers."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from latent_santa.access import Unit
from latent_santa.backends import choose
from latent_santa.estimator import dense_attention, santa_attention
from latent_santa.noise import gumbel_noise
from latent_santa.rows import Rows
from latent_santa.step import DecodeStep, Draw, Output, Sampling

from .cache_layer import TeamLayer
from .control import Call, Controller
from .families import Adapter

NAME = "latent_santa"
# Gumbel draws made at once
NOISE_NUMBERS = 1 << 23


class PatchedLayer:
    """What one attention module does in each kind of call."""

    def __init__(self, adapter: Adapter, controller: Controller, config: Any) -> None:
        self.adapter, self.controller, self.model_config = adapter, controller, config
        self.layer: int = adapter.module.layer_idx

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("a patched model cannot be pickled: unpatch it first")

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchedLayer:
        # the copy's generate and hooks would run the original
        raise RuntimeError("a patched model cannot be copied: unpatch it first, then copy it and patch the copy")

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        call = self.controller.thread.call
        if call.sparse:
            with torch.autocast(key.device.type, enabled=False):  # sampling is float32 whatever the model runs in
                return self._sparse(call, query, key, value, kwargs["scaling"]), None
        if call.counted:
            self._count_dense(call, key, value)
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
    def _sparse(self, call: Call, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """The estimate; gradients do not pass through sampling."""
        config, cache = self.controller.config, call.layers[self.layer]
        rows, parts = self.adapter.rows(key, value), self.adapter.query(query)
        output = self._estimate(call, cache, rows, parts, scale)
        dense = self._dense_counts(call, rows.values.device).expand_as(output.union)
        unit = self._unit(config.method, rows, cache)
        self.controller.access.record(self.layer, unit, output.routing, output.union, output.suffix, dense)
        if self.controller.shadow:
            self._compare(call, rows, parts, scale, output)
        return self.adapter.output(output.out, query.dtype)

    def _estimate(self, call: Call, cache: TeamLayer, rows: Rows, parts: tuple[Tensor, ...], scale: float) -> Output:
        config, device = self.controller.config, rows.values.device
        visible, step = call.on("visible", device), call.on("step", device)
        assert step is not None and cache.noise_key is not None
        suffix = cache.suffix(visible)
        draw = Draw(cache.noise_key.to(device), step, self.layer)
        sampling = Sampling(config.teams_per_head, config.estimator, config.noise)
        teams = cache.grouped.teams
        decoding = DecodeStep(parts, rows, teams, suffix, draw, scale, visible)
        if config.method == "santa":
            self._count_full(call, rows.length - suffix.index.numel())
            return santa_attention(decoding, sampling)
        assert teams is not None
        self._count_full(call, teams.M)
        backend = choose(config.backend, decoding, sampling)
        if backend.name == "torch" and teams.M > sampling.k:
            decoding = replace(decoding, draw=replace(draw, made=self._noise(call, draw, *parts[0].shape[1:3])))
        return backend.sampled_attention(decoding, sampling)

    def _count_full(self, call: Call, choices: int) -> None:
        """Note, once a call, that K covers every team (or row), which makes it dense attention."""
        if self.layer == 0 and choices <= self.controller.config.teams_per_head:
            self.controller.count_full()

    def _noise(self, call: Call, draw: Draw, groups: int, heads: int) -> Tensor:
        """This layer's draws. The following layers' are made with it: one layer's take more launches than time."""
        if self.layer not in call.noise:
            stop, most = self.layer, 0
            for cache in call.layers[self.layer :]:
                teams = cache.grouped.teams
                if teams is None or cache.keys.device != draw.key.device or cache.keys.shape[1] != groups:
                    break
                most = max(most, teams.M)
                if (
                    stop > self.layer
                    and (stop + 1 - self.layer) * len(draw.key) * groups * heads * most > NOISE_NUMBERS
                ):
                    break
                stop += 1
            layers = torch.arange(self.layer, stop, device=draw.key.device)
            shared = self.controller.config.noise == "shared"
            made = gumbel_noise(draw.key, draw.step, layers, groups, heads, most, shared)
            call.noise = dict(zip(range(self.layer, stop), made, strict=True))
        return call.noise.pop(self.layer)

    @staticmethod
    def _dense_counts(call: Call, device: torch.device) -> Tensor:
        """Rows that dense attention would read, ``(B, 1)``."""
        step = call.on("step", device)
        assert step is not None
        return step[:, None]

    def _unit(self, method: str, rows: Rows, cache: TeamLayer) -> Unit:
        """What one row and one representative cost here, in the equation's units and in bytes."""
        key = sum(part.shape[-1] * part.element_size() for part in rows.keys)
        value = 0 if rows.values is rows.keys[0] else rows.values.shape[-1] * rows.values.element_size()
        teams = cache.grouped.teams
        if teams is None:  # SANTA scans keys and then reads values, which in MLA are part of the same row
            return replace(
                self.adapter.unit(method), routing_bytes=key, row_bytes=value or key, dense_bytes=key + value
            )
        held = sum(part.bytes() for part in teams.routing_keys)
        routing = held // teams.sizes.numel()
        return replace(self.adapter.unit(method), routing_bytes=routing, row_bytes=key + value, dense_bytes=key + value)

    def _count_dense(self, call: Call, key: Tensor, value: Tensor) -> None:
        dense = self._dense_counts(call, key.device).expand(-1, key.shape[1])
        none = torch.zeros_like(dense)
        row = key.shape[-1] * key.element_size() + value.shape[-1] * value.element_size()
        unit = replace(self.adapter.unit("dense"), row_bytes=row, dense_bytes=row)
        self.controller.access.record(self.layer, unit, none, dense, none, dense)

    def _compare(self, call: Call, rows: Rows, parts: tuple[Tensor, ...], scale: float, output: Output) -> None:
        """Relative error of the estimate against dense attention on the same query and cache, a head at a time."""
        exact, _ = dense_attention(parts, rows, call.on("visible", rows.values.device), scale)
        exact = self.adapter.output(exact, torch.float32)
        error = (self.adapter.output(output.out, torch.float32) - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(
            1e-20
        )
        self.controller.log_error(self.layer, error.flatten(1).mean(-1))


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Entry in transformers' attention interface; ``module`` carries its :class:`PatchedLayer`."""
    patched: PatchedLayer = module.__dict__["_latent_santa"]
    return patched(query, key, value, attention_mask, **kwargs)
