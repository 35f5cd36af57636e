"""Routed experts while ``generate`` decodes: they stay on the implementation that does not copy their weights.

On a GPU ``generate`` changes ``"grouped_mm"`` to ``"batched_mm"`` for its decoding steps, which gathers a copy of the
chosen experts' weights on every step: equal at one sequence, and 8 ms of a step at eight (DeepSeek-V2-Lite's shape, one
H200). Outputs of the two differ by rounding. Nothing of the model's configuration changes: the model's own
``set_experts_implementation`` keeps its meaning, and an implementation that the user chose is left alone in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from transformers import PreTrainedModel

SWITCH = "_optimize_model_for_decode"
GROUPED = "grouped_mm"
# where PyTorch's grouped product of bfloat16 is one kernel; elsewhere it loops over experts and waits for the device
CAPABILITIES = (9, 10)


def experts_stay(model: PreTrainedModel) -> dict[str, Callable[..., Any]]:
    """Replacements of the model's own methods, by name: none for a release whose ``generate`` changes no experts."""
    if not hasattr(model, SWITCH):
        return {}
    switch = getattr(model, SWITCH)

    @wraps(switch)
    def unless_grouped(*args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = switch(*args, **kwargs) if reason_not(model) else nullcontext()
        return context

    return {SWITCH: unless_grouped}


def reason_not(model: PreTrainedModel) -> str | None:
    """Why decoding steps of ``generate`` do not keep the grouped product, in words for a user; None when they do."""
    ran = sorted(set(implementations(model)))
    if not ran:
        return "it has no routed experts"
    if GROUPED not in ran:
        return f"its experts run as {', '.join(ran)}"
    weights = [weight for module in model.modules() if _routed(module) for weight in module.parameters(recurse=False)]
    for weight in weights:
        if not weight.is_cuda:
            return f"experts are on {weight.device.type}"
        if weight.dtype != torch.bfloat16:
            return f"the grouped product of {str(weight.dtype).removeprefix('torch.')} weights waits for the device"
        if torch.cuda.get_device_capability(weight.device)[0] not in CAPABILITIES:
            return "the grouped product waits for this device"
    return None


def implementations(model: PreTrainedModel) -> list[str]:
    """How each layer's routed experts run outside of ``generate``'s decoding steps, in the model's order."""
    return [module.config._experts_implementation for module in model.modules() if _routed(module)]


def while_decoding(model: PreTrainedModel) -> list[str]:
    """How each layer's routed experts run in a decoding step of ``generate`` on the model as it is now."""
    with getattr(model, SWITCH, nullcontext)():
        return implementations(model)


def _routed(module: Any) -> bool:
    """Whether a module is one of transformers' classes whose experts have several implementations."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "config")
