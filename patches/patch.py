"""``patch``: everything that is changed on a loaded model, and the list that undoes it."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from latent_santa.config import SantaConfig

from .compiled import compile_parts
from .control import Control
from .exact_parts import exact_parts
from .experts import experts_stay
from .families import base_model, check, find_adapters
from .generating import wrapped
from .handle import SantaHandle, checked_settings
from .layer import NAME, PatchedLayer, attention_forward

_patched_models = 0


def patch(
    model: PreTrainedModel,
    config: SantaConfig | None = None,
    *,
    preset: str | None = None,
    graphs: str = "auto",
    compile: bool = False,
    **overrides: Any,
) -> SantaHandle:
    """Patch a loaded model so that decoding reads sampled teams of cache rows.

    The prefill stays dense. Nothing outside this instance changes: other models of the class are untouched.

    Args:
        model: a native transformers causal language model (or its base model) with MLA or GQA attention.
        config: settings; default :class:`SantaConfig`.
        preset: ``"paper"``, ``"recommended"`` or ``"many_heads"`` settings instead of ``config``
            (:meth:`SantaConfig.preset`).
        graphs: ``"auto"`` captures a decoding step on a CUDA device as one graph and replays it for the tokens that
            follow, with the same result; a step that cannot be captured runs launch by launch, and ``report()`` says
            why. ``"on"`` refuses such a step instead, and ``"off"`` captures none.
        compile: put norms, MLPs, routers and the rotary embedding under ``torch.compile`` in calls of one token, and
            where Triton runs, attention's inputs and projections, experts and softmax routers on kernels of our own.
            Outputs then differ by rounding, and the first decoding step of each batch size takes seconds longer.
            Without it only those parts run on our kernels that give the same bits as the model's own on this device.
        **overrides: fields of :class:`SantaConfig` to change, such as ``budget=256``.

    Returns:
        A handle, also a context manager: ``with latent_santa.patch(model, budget=512) as santa: ...``.

    Raises:
        TypeError: ``model`` is no transformers model, ``config`` no :class:`SantaConfig`, or ``compile`` no
            bool.
        ValueError: a setting is invalid.
        RuntimeError: the model is patched already, or the backend, the graphs or the compiler that were asked for
            cannot run here.
        NotImplementedError: the model is of a kind that is not supported; it is left unchanged.
    """
    if isinstance(model, nn.Module) and _find(model) is not None:
        raise RuntimeError(
            f"this {type(model).__name__} is patched already: change settings with handle.configure(...), or undo it "
            "with handle.unpatch(); latent_santa.handle(model) gives the handle back, latent_santa.unpatch(model) "
            "undoes without it"
        )
    if preset is not None:
        if config is not None:
            raise ValueError(f"config and preset={preset!r} were both given: give one, and change fields by name")
        config = SantaConfig.preset(preset)
    if not isinstance(compile, bool):
        raise TypeError(f"compile={compile!r}: must be True or False")
    adapters = find_adapters(model)
    settings = checked_settings(adapters, config, SantaConfig(), overrides)
    check(model, adapters)
    control = Control(base_model(model, adapters), adapters, settings, graphs)
    parts = compile_parts(control.base) if compile else exact_parts(control.base)
    return SantaHandle(model, control, Edits(model, control, parts, compile))


def handle(model: nn.Module) -> SantaHandle:
    """The handle of a patched model.

    Raises:
        TypeError: ``model`` is no module.
        RuntimeError: the model is not patched.
    """
    found = _find(model)
    if found is None:
        raise RuntimeError(f"this {type(model).__name__} is not patched: latent_santa.patch(model) gives a handle")
    return found


def unpatch(model: nn.Module) -> None:
    """Give a patched model back exactly as it was. A model that is not patched is left alone.

    Raises:
        TypeError: ``model`` is no module.
    """
    found = _find(model)
    if found is not None:
        found.unpatch()


def _find(model: nn.Module) -> SantaHandle | None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"got a {type(model).__name__}: give the model, not its name, path or handle")
    marks = (module.__dict__.get("_latent_santa") for module in model.modules())
    return next((mark.control.handle for mark in marks if mark is not None), None)


class Edits:
    """What the patch set on a model, in order, with what stood there before.

    Attributes:
        parts: parts of the model that are compiled, or run on our kernels.
        compiled: whether these round otherwise than the model's own.
    """

    def __init__(
        self, model: PreTrainedModel, control: Control, parts: list[tuple[nn.Module, str, Any]], compiled: bool
    ) -> None:
        global _patched_models
        self.parts, self.compiled = len(parts), compiled
        self._undo: list[tuple[Any, str, bool, Any]] = []
        ALL_ATTENTION_FUNCTIONS[NAME] = attention_forward
        _patched_models += 1
        for adapter in control.adapters:
            module = adapter.module
            config = copy.copy(module.config)
            config._attn_implementation_internal = NAME
            self._set(module, "_latent_santa", PatchedLayer(adapter, control, module.config))
            self._set(module, "config", config)
            for name, value in adapter.replaces.items():
                self._set(module, name, value)
        base = control.base
        self._set(base, "forward", control.graphs)
        self._hooks = [
            base.register_forward_pre_hook(control.before, with_kwargs=True),
            base.register_forward_hook(control.after, with_kwargs=True),
        ]
        if model is not base and model.get_output_embeddings() is not None:
            self._hooks += [
                model.register_forward_pre_hook(control.asked, with_kwargs=True),
                model.register_forward_hook(control.answered, always_call=True),
            ]
        stay = experts_stay(model) if control.graphs.mode != "off" else {}
        for name, replacement in (wrapped(model, control) | stay).items():
            self._set(model, name, replacement)
        for part, name, replacement in parts:
            self._set(part, name, replacement)

    def _set(self, target: Any, name: str, value: Any) -> None:
        self._undo.append((target, name, name in target.__dict__, target.__dict__.get(name)))
        target.__dict__[name] = value

    @property
    def made(self) -> bool:
        """Whether they stand."""
        return bool(self._undo)

    def undo(self) -> None:
        """Put back what stood before, in reverse order. Calling it again does nothing."""
        global _patched_models
        if not self._undo:
            return
        for hook in self._hooks:
            hook.remove()
        for target, name, had, old in reversed(self._undo):
            if had:
                target.__dict__[name] = old
            else:
                del target.__dict__[name]
        self._undo.clear()
        _patched_models -= 1
        if _patched_models == 0:
            del ALL_ATTENTION_FUNCTIONS[NAME]
