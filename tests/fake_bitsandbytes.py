"""The part of bitsandbytes that LLM.int8 loading uses, with its contract, for machines that do not have it.

Weights are quantised row by row as they leave the CPU's memory, to the CPU too; inputs stay in the caller's dtype.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor


class Int8Params(torch.nn.Parameter):
    scale: Tensor

    def __new__(cls, data: Tensor, requires_grad: bool, has_fp16_weights: bool) -> Int8Params:
        assert not has_fp16_weights
        return torch.Tensor._make_subclass(cls, data, requires_grad)

    def __init__(self, data: Tensor, requires_grad: bool, has_fp16_weights: bool) -> None:
        pass

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.dtype == torch.int8:
            return self
        data = self.data.float()
        scale = data.abs().amax(1, keepdim=True).clamp_min(1e-20) / 127
        packed = Int8Params((data / scale).round().to(torch.int8), False, False)
        packed.scale = scale
        return packed


class Linear8bitLt(torch.nn.Linear):
    def __init__(
        self, inputs: int, outputs: int, bias: bool, has_fp16_weights: bool, threshold: float, device: str
    ) -> None:
        super().__init__(inputs, outputs, bias, device)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return torch.nn.functional.linear(x, (weight.data * weight.scale).to(x.dtype), self.bias)


bitsandbytes: Any = types.ModuleType("bitsandbytes")
bitsandbytes.nn = types.SimpleNamespace(Int8Params=Int8Params, Linear8bitLt=Linear8bitLt)
