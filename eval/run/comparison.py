"""Dense and sampled decoding of one prompt side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from latent_santa.config import SantaConfig
from latent_santa.eval.run.conditions import name, swept

if TYPE_CHECKING:
    from latent_santa.patches import SantaHandle
    from latent_santa.patches.prefilled import Prefilled


@dataclass
class Outcome:
    """What one condition did with the prompt.

    Attributes:
        answer: newly generated text.
        tokens: new token ids.
        rows: the ledger's totals, in rows and percent.
        agreement: share of leading tokens equal to dense ones, in percent of the longer answer.
        error: mean relative attention error against dense on the same cache (shadow mode); None for dense.
        full: whether every sparse call selected every team, which is dense attention.
        seconds: of decoding without shadow mode; prefill and grouping are left out.
        peak_bytes: GPU memory at its highest in that generation; None on a CPU.
    """

    name: str
    budget: int | None
    teams_per_head: int | None
    answer: str
    tokens: list[int]
    rows: dict[str, Any]
    agreement: float
    error: float | None
    full: bool
    seconds: float
    peak_bytes: int | None

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


def common_start(tokens: Sequence[int], dense: Sequence[int]) -> int:
    """Number of tokens before two answers first differ."""
    pairs = enumerate(zip(tokens, dense, strict=False))
    return next((place for place, (ours, theirs) in pairs if ours != theirs), min(len(tokens), len(dense)))


def agreement(tokens: Sequence[int], dense: Sequence[int]) -> float:
    """Length of the common beginning of two answers, in percent of the longer one."""
    return 100.0 * common_start(tokens, dense) / max(len(tokens), len(dense), 1)


@torch.inference_mode()
def run_condition(
    santa: SantaHandle,
    tokenizer: Any,
    prompt: Prefilled,
    condition: SantaConfig,
    max_new_tokens: int,
    dense: Outcome | None,
    shadow: bool = True,
) -> Outcome:
    """Generate greedily under one condition: once for time, and once in shadow mode for the attention error.

    The two runs draw the same noise, so they give the same answer.

    Args:
        santa: handle of the patched model.
        prompt: one prompt, prefilled by the handle.
        dense: the dense outcome to compare with, None for the dense run itself.
        shadow: False leaves the attention error out.
    """
    device, n = prompt.input_ids.device, prompt.input_ids.shape[1]
    santa.configure(condition)
    prompt.rewound()  # the rows are grouped outside the time

    def generate() -> list[int]:
        return prompt.generate(max_new_tokens=max_new_tokens)[0, n:].tolist()

    santa.reset()
    santa.shadow = False
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    tokens = generate()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    rows = santa.access.as_dict()["totals"]
    full = santa.sparse_calls > 0 and santa.full_calls == santa.sparse_calls
    error = None
    if condition.method != "dense" and shadow:
        santa.shadow = True
        generate()
        santa.shadow = False
        error = santa.shadow_errors().mean().item()
    return Outcome(
        name=name(condition),
        budget=swept(condition)["budget"],
        teams_per_head=condition.teams_per_head if "budget" in condition.used() else None,
        answer=tokenizer.decode(tokens, skip_special_tokens=True),
        tokens=tokens,
        rows=rows,
        agreement=100.0 if dense is None else agreement(tokens, dense.tokens),
        error=error,
        full=full,
        seconds=seconds,
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )
