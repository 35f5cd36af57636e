"""Norms, MLPs, routers and the rotary embedding of a model under ``torch.compile``, for calls of one token.

Around attention a decoding step is hundreds of small kernels. Compiled, those of one part become one or a few. They
round where PyTorch's own kernels do not, and the other way round: outputs differ by rounding, so this is an option. A
prefill runs as ever. On a GPU some parts have kernels of our own instead (:mod:`.own_kernels`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .families.spread import spread_weight
from .own_kernels import own_forward

Forward = Callable[..., Any]

# what is compiled, by class, weights, input and backend: another patch of the same or a like model finds it again
_made: dict[Any, Forward] = {}
# tokens of a call without a dimension for them, from which on it is taken for a prefill's
FEW = 64


def compile_parts(base: nn.Module, backend: str = "inductor") -> list[tuple[nn.Module, str, Forward]]:
    """What replaces what: (module, name of its method, replacement that compiles calls of one token).

    Parts of one class and one size share what is compiled, once per batch size, at a part's first call of one token.
    One part is compiled here, to see that it can be.

    Args:
        base: the base model, on its device.
        backend: of ``torch.compile``.

    Raises:
        RuntimeError: ``torch.compile`` does not work here; the message says why.
    """

    if any(map(spread_weight, base.parameters())):
        raise RuntimeError(
            "compile=True: the model's weights are spread over processes (tensor parallelism), and parts that exchange "
            "results are not compiled here: leave it out"
        )

    def variant(module: nn.Module, sizes: Any, shape: torch.Size) -> Forward:
        key = (type(module), sizes, shape, backend)
        if key not in _made:
            _made[key] = _compiled(type(module).forward, backend)
        return _made[key]

    found: list[tuple[nn.Module, str, Forward]] = []
    tried = False
    for module in base.modules():
        if "forward" in vars(module):  # a forward of its own is somebody else's replacement
            continue
        own = own_forward(module, base)
        if own is not None:
            found.append((module, "forward", own))
        if own is not None or not _part(module):
            continue
        sizes = tuple((name, weight.shape, weight.dtype) for name, weight in module.named_parameters())
        if not tried:
            tried = True
            _try(module, functools.partial(variant, module, sizes))
        found.append((module, "forward", _of_one_token(module, functools.partial(variant, module, sizes))))
    return found


def _of_one_token(module: nn.Module, variant: Callable[[torch.Size], Forward]) -> Forward:
    original = module.forward

    @functools.wraps(original)
    def forward(states: Tensor, *args: Any, **kwargs: Any) -> Any:
        # (B, T, ...), or (B * T, ...) where a model flattens tokens first
        few = states.shape[1] == 1 if states.dim() > 2 else states.shape[0] <= FEW
        # torch.compile looks for hooks when it compiles, and for none that come later
        hooked = any(part._forward_hooks or part._forward_pre_hooks for part in module.children())
        if not few or hooked:
            return original(states, *args, **kwargs)
        return variant(states.shape)(module, states, *args, **kwargs)

    return forward


def _compiled(forward: Forward, backend: str) -> Forward:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    # variants are counted and limited per code object, so each size gets one of its own
    call.__code__ = call.__code__.replace()
    compiled: Forward = torch.compile(call, backend=backend, dynamic=False)
    return compiled


def _try(module: nn.Module, variant: Callable[[torch.Size], Forward]) -> None:
    weight = next(module.parameters())
    states = torch.zeros(1, 1, weight.shape[-1], dtype=weight.dtype, device=weight.device)
    try:
        with torch.no_grad():
            variant(states.shape)(module, states)
    except Exception as error:  # whatever a missing compiler, driver or header raises
        inner = getattr(error, "inner_exception", error)
        reason = str(inner).strip().partition("\n")[0]
        raise RuntimeError(
            f"compile=True cannot be used here: torch.compile failed ({type(inner).__name__}: {reason}); leave it out"
        ) from error


def _part(module: nn.Module) -> bool:
    return _norm(module) or _mlp(module) or _router(module) or _rotary(module)


def _norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith(("RMSNorm", "LayerNorm")) and next(module.parameters(), None) is not None


def _mlp(module: nn.Module) -> bool:
    """A gated or plain MLP of ordinary linear layers; quantised ones have kernels that cannot be looked into."""
    linear = [child for name, child in module.named_children() if name.endswith("_proj")]
    return hasattr(module, "down_proj") and bool(linear) and all(type(child) is nn.Linear for child in linear)


def _router(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Router") and hasattr(module, "weight")


def _rotary(module: nn.Module) -> bool:
    """An embedding that gives cosines and sines. One that gives complex numbers would not be compiled."""
    frequencies = getattr(module, "inv_freq", None)
    if not type(module).__name__.endswith("RotaryEmbedding") or not isinstance(frequencies, Tensor):
        return False
    place = torch.zeros(1, 1, dtype=torch.int64, device=frequencies.device)
    try:
        with torch.no_grad():
            angles = module(torch.zeros(1, 1, 1, device=place.device), place)
    except (TypeError, ValueError, IndexError, RuntimeError):
        return False  # one that takes other arguments runs as it is: once per step
    return isinstance(angles, tuple) and not any(part.is_complex() for part in angles)
