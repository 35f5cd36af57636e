"""Log-probabilities of given continuations under sampled attention."""

from __future__ import annotations

import torch
from torch import Tensor

from .prefilled import Prefilled

IGNORED = -100


@torch.no_grad()
def score(prompt: Prefilled, continuation: Tensor) -> Tensor:
    """Feed the continuation token by token and note what each was given.

    Args:
        prompt: the prefilled prompts, ``(B, N)``.
        continuation: ``(B, T)`` int64, padded on the right by -100.

    Returns:
        ``(B, T)`` float32 natural logarithms; 0 where the continuation is padding.
    """
    if not isinstance(continuation, Tensor) or continuation.is_floating_point():
        got = f"a tensor of {continuation.dtype}" if isinstance(continuation, Tensor) else type(continuation).__name__
        raise TypeError(f"continuation is {got}: give token ids, (B, T) int64")
    if continuation.dim() != 2 or continuation.shape[0] != prompt.input_ids.shape[0]:
        raise ValueError(
            f"continuation has shape {tuple(continuation.shape)}, but {prompt.input_ids.shape[0]} prompts need "
            f"({prompt.input_ids.shape[0]}, T): pad the shorter ones on the right by {IGNORED}"
        )
    real = continuation != IGNORED
    if not continuation.shape[1]:
        return torch.zeros(continuation.shape, dtype=torch.float32, device=continuation.device)
    vocabulary = prompt.vocabulary
    wrong = continuation[real & ((continuation < 0) | (continuation >= vocabulary))]
    if wrong.numel():
        raise ValueError(
            f"continuation holds {int(wrong[0])}: token ids go from 0 to {vocabulary - 1}, and {IGNORED} is padding"
        )
    tokens = continuation.masked_fill(~real, 0)
    cache, fed = prompt.held_back(), prompt.input_ids[:, -1:]
    found = []
    for place in range(tokens.shape[1]):
        logits = prompt.step(fed, cache, prompt.input_ids.shape[1] + place)
        fed = tokens[:, place : place + 1].to(logits.device)
        found.append(logits.float().log_softmax(-1).gather(1, fed)[:, 0])
    return torch.stack(found, 1).masked_fill(~real.to(found[0].device), 0.0)
