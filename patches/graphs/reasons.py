"""Why a decoding step runs launch by launch, told before anything is captured."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache

from latent_santa.methods import METHODS

from ..families.spread import spread_weight
from .engine import ENGINES

if TYPE_CHECKING:
    from ..calls import ModelCall
    from ..control import Control

# the types of arguments that a captured step may keep
PLAIN = (bool, int, float, str, type(None))
ASKED = ("output_attentions", "output_hidden_states", "output_router_logits")
# this package's hooks, and those of transformers that only act where outputs of layers are asked for
OWN_HOOKS = ("latent_santa.", "transformers.utils.output_capturing")
# where a module holds what a step depends on
HELD = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")
# rotary embeddings that look at the positions on the host
GROWING = ("dynamic", "longrope")


@dataclass(frozen=True)
class Look:
    """What was seen of a model at one moment. A look passes over every module, so a generation takes one.

    Attributes:
        reason: why no step of this model can be captured, or None.
        held: dictionaries in which its modules hold children, weights, buffers and hooks.
        parts: these.
        tensors: those of them that are tensors.
        adapters: layers with adapters (PEFT), which may be switched from call to call.
    """

    reason: str | None
    held: tuple[dict[Any, Any], ...]
    parts: tuple[Any, ...]
    tensors: tuple[Tensor, ...]
    adapters: tuple[Any, ...]

    @classmethod
    def at(cls, base: Any) -> Look:
        """Look at a base model."""
        modules = tuple(base.modules())
        adapters = (m for m in modules if hasattr(m, "active_adapters") and hasattr(m, "scaling"))
        held = tuple(vars(module)[name] for module in modules for name in HELD)
        parts = _parts(held)
        tensors = tuple(part for part in parts if isinstance(part, Tensor))
        return cls(_reason(base), held, parts, tensors, tuple(adapters))

    def holds(self) -> bool:
        """Whether the model still has the modules, weights and hooks that were seen."""
        now = _parts(self.held)
        return len(now) == len(self.parts) and all(map(operator.is_, now, self.parts))

    def weights(self, base: Any) -> tuple[Any, ...]:
        """Where the weights lie, and how experts run: what launches depend on beside their inputs and adapters."""
        experts = tuple(getattr(config, "_experts_implementation", None) for config in _configs(base))
        return (*map(Tensor.data_ptr, self.tensors), experts)

    def switched(self) -> tuple[Any, ...]:
        """Which adapters are on, and how much each counts."""
        return tuple(
            (m.disable_adapters, m.merged, tuple(m.active_adapters), tuple(m.scaling.items())) for m in self.adapters
        )


def _parts(held: tuple[dict[Any, Any], ...]) -> tuple[Any, ...]:
    return tuple(chain.from_iterable(map(dict.values, held)))  # without Python's own loop: every hand-made step asks


def _configs(base: Any) -> list[Any]:
    return [base.config, *(getattr(base.config, name) for name in base.config.sub_configs)]


def _reason(base: Any) -> str | None:
    if any(map(spread_weight, base.parameters())):
        return "its heads are spread over processes, which exchange results inside of a step (tensor parallelism)"
    devices = {tensor.device for tensor in base.parameters()}
    if len(devices) > 1:
        return f"the model is spread over {len(devices)} devices ({', '.join(sorted(map(str, devices)))})"
    device = next(iter(devices))
    if device.type not in ENGINES:
        return f"the model is on {device}, and supported is CUDA"
    routed = any(parameter.dim() == 3 for parameter in base.parameters())  # experts' weights, one behind the other
    for config in _configs(base):
        if routed and getattr(config, "_experts_implementation", None) == "eager":
            return 'its experts run one by one (experts_implementation="eager"), and the host looks which are hit'
        rope = getattr(config, "rope_parameters", None) or {}
        if isinstance(rope, dict) and rope.get("rope_type") in GROWING:
            return f"its rotary embedding ({rope['rope_type']}) looks at the positions on the host"
        for name in ASKED:
            if getattr(config, name, False):
                return f"{name}=True stands in its configuration"
    if not getattr(base.config, "return_dict", True):
        return "return_dict=False stands in its configuration"
    for name, module in base.named_modules():
        if hasattr(module, "_hf_hook"):
            return f"accelerate moves weights around {name or 'the model'}"
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(str(getattr(hook, "__module__", "")).startswith(OWN_HOOKS) for hook in hooks):
            return f"{name or 'the model'} has forward hooks, which a graph does not call"
    return None


def reason_of_call(control: Control, call: ModelCall, kwargs: dict[str, Any]) -> str | None:
    """Why this step cannot be captured or replayed, or None."""
    config = control.config
    if control.shadow:
        return "santa.shadow compares every step with dense attention"
    if control.thread.heard is not None:
        return "the queries of its layers are recorded"
    if not METHODS[config.method].fixed_shapes:
        return f"method {config.method!r} has steps of varying shapes"
    if torch.is_grad_enabled():
        return "gradients are enabled: use torch.no_grad() or torch.inference_mode()"
    if control.thread.beams:
        return "beam search moves rows between sequences"
    device = call.layers[0].keys.device
    if torch.is_autocast_enabled(device.type):
        return "autocast is enabled"
    for name in ASKED:
        if kwargs.get(name):
            return f"{name}=True was asked for"
    if not kwargs.get("return_dict", True):
        return "return_dict=False was asked for"
    for name, value in kwargs.items():
        if not isinstance(value, (Tensor, Cache, *PLAIN)):
            return f"the call brings a {type(value).__name__} as {name}"
    if kwargs.get("position_ids") is None and hasattr(control.base, "rope_deltas"):
        return "the call brings no position_ids, and this model derives them on the host"
    if call.as_captured:
        return None  # what follows was so when the step was captured
    if not all(layer.get_seq_length() for layer in call.layers):
        return "some layers hold no rows (an early exit)"
    if len({layer.grouped.stop for layer in call.layers}) > 1:
        return "the teams of its layers end at different rows"
    return None
