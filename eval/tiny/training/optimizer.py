"""The training optimizer: Muon for the matrices, AdamW for embedding and norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def orthogonalise(update: Tensor) -> Tensor:
    """Five Newton-Schulz steps (quintic) on a stack (n, rows, columns): singular values brought near 1."""
    x = update.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        poly = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, poly, x, beta=3.4445)
    return (x.mT if tall else x).float()


class MuonAdamW:
    """Muon (Nesterov momentum, decoupled weight decay) on matrices of equal shape at a time, AdamW on the rest."""

    def __init__(
        self, network: nn.Module, learning_rate: float = 0.02, other_rate: float = 4e-3, weight_decay: float = 0.1
    ) -> None:
        stacks: dict[tuple[int, ...], list[Tensor]] = {}
        self.others: list[nn.Parameter] = []
        for name, weight in network.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                stacks.setdefault(tuple(weight.shape), []).append(weight)
            else:
                self.others.append(weight)
        self._stacks = list(stacks.values())
        self._momenta = [torch.zeros((len(s), *s[0].shape), device=s[0].device) for s in self._stacks]
        self.learning_rate, self.other_rate, self.weight_decay = learning_rate, other_rate, weight_decay
        cuda = self.others[0].is_cuda
        self._adam = torch.optim.AdamW(self.others, lr=other_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=cuda)

    @torch.no_grad()
    def step(self, factor: float, number: int) -> None:
        """One update with learning rates times `factor`; `number` counts steps from 0 (momentum warms up over 300)."""
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        for group in self._adam.param_groups:
            group["lr"] = self.other_rate * factor
        self._adam.step()
        momentum = min(0.95, 0.85 + 0.1 * number / 300)
        rate = self.learning_rate * factor
        for weights, buffer in zip(self._stacks, self._momenta, strict=True):
            gradient = torch.stack([w.grad for w in weights if w.grad is not None])
            buffer.mul_(momentum).add_(gradient, alpha=1 - momentum)
            update = orthogonalise(gradient.lerp_(buffer, momentum))
            stretch = max(1.0, update.shape[1] / update.shape[2]) ** 0.5
            torch._foreach_mul_(weights, 1 - rate * self.weight_decay)
            torch._foreach_add_(weights, list(update.unbind(0)), alpha=-rate * stretch)

    def state_dict(self) -> dict[str, Any]:
        """Momenta and AdamW's state."""
        return {"momenta": self._momenta, "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, for a network of the same shape."""
        for buffer, saved in zip(self._momenta, state["momenta"], strict=True):
            buffer.copy_(saved)
        self._adam.load_state_dict(state["adam"])
