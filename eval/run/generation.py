"""Greedy generation of answers to a batch of prompts, and the noise keys of prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Answer:
    """Newly generated text, its number of tokens (the end token included), and whether the cap stopped it.

    `late` is how many steps the batch went on after this answer had ended.
    """

    text: str
    n_new: int
    hit_cap: bool
    late: int = 0


def sequence_key(seed: int, sample_id: str) -> int:
    """Noise key of a prompt, below 2**63: from the base seed and the prompt's id, so the same for all budgets."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{sample_id}".encode()).digest()[:8], "big") >> 1


def end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends an answer, by the model's generation settings and by the tokenizer."""
    ids = model.generation_config.eos_token_id
    found = set(ids if isinstance(ids, list) else [ids]) | {tokenizer.eos_token_id}
    return sorted(i for i in found if i is not None)


def make_greedy(model: Any, tokenizer: Any) -> None:
    """Replace the model's generation settings by plain greedy ones.

    A checkpoint's own settings are merged into every call of `generate`: Qwen2.5's repetition penalty would act on
    greedy decoding too.
    """
    from transformers import GenerationConfig

    ends = end_ids(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (ends[0] if ends else None)
    model.generation_config = GenerationConfig(
        do_sample=False, num_beams=1, use_cache=True, eos_token_id=ends or None, pad_token_id=pad
    )


@torch.inference_mode()
def generate(model: Any, tokenizer: Any, prompts: Sequence[list[int]], max_new_tokens: int) -> list[Answer]:
    """Greedy answers to token ids of one or more prompts, generated together; call `make_greedy` once before.

    Shorter prompts are padded on the left. Only new ids up to an answer's end are decoded.
    """
    device = model.get_input_embeddings().weight.device
    longest = max(map(len, prompts))
    pad = model.generation_config.pad_token_id or 0
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    output = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens)
    ends = model.generation_config.eos_token_id or []
    answers = []
    for row in output[:, longest:].tolist():
        new = row[: next((i for i, token in enumerate(row, 1) if token in ends), len(row))]
        hit_cap = len(new) >= max_new_tokens and (not new or new[-1] not in ends)
        text = tokenizer.decode(new, skip_special_tokens=True)
        answers.append(Answer(text, len(new), hit_cap, len(row) - len(new)))
    return answers
