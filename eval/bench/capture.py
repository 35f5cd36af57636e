"""A real workload for the operator benchmark: one layer's decoding step in a patched model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import latent_santa
from latent_santa.backends import BACKENDS, TorchBackend
from latent_santa.eval.bench.workload import Workload
from latent_santa.eval.errors import EvalError
from latent_santa.step import DecodeStep, Output, Sampling


@contextmanager
def recording(layer: int, found: list[DecodeStep]) -> Iterator[None]:
    """While active, the PyTorch backend leaves the last sampled step of ``layer`` in ``found``."""

    class Recording(TorchBackend):
        def sampled_attention(self, step: DecodeStep, sampling: Sampling) -> Output:
            if step.draw.layer == layer:
                found[:] = [step]
            return super().sampled_attention(step, sampling)

    original = BACKENDS["torch"]
    BACKENDS["torch"] = Recording
    try:
        yield
    finally:
        BACKENDS["torch"] = original


def capture(model: Any, ids: list[int], layer: int | None, steps: int, source: str, **settings: Any) -> Workload:
    """Prefill ``ids``, decode ``steps`` tokens and keep one layer's last step.

    Args:
        layer: None for the middle one.
        source: what the workload is from; the layer is added.
        settings: fields of :class:`SantaConfig`.

    Raises:
        EvalError: the layer does not exist, or its attention never was sparse.
    """
    found: list[DecodeStep] = []
    # the step's own rows and records: none reserved for rows that may follow
    settings = {**settings, "backend": "torch", "regroup_after": 0}
    with latent_santa.patch(model, graphs="off", **settings) as santa:
        layer = santa.layers // 2 if layer is None else layer
        if not 0 <= layer < santa.layers:
            raise EvalError(f"--layer {layer}: the model has layers 0 to {santa.layers - 1}")
        prompt = torch.tensor([ids], device=model.device)
        with recording(layer, found), torch.inference_mode():
            model.generate(prompt, max_new_tokens=steps, min_new_tokens=steps, do_sample=False)
    if not found:
        raise EvalError(f"layer {layer} decoded densely: the prompt of {len(ids)} tokens was too short for sampling")
    return Workload(found[0], f"{source} layer {layer}")
