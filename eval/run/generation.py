"""Greedy generation of answers to a batch of prompts, under one configuration after another."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from latent_santa.config import SantaConfig

if TYPE_CHECKING:
    from latent_santa.patches import SantaHandle
    from latent_santa.patches.prefilled import Prefilled


@dataclass(frozen=True)
class Batch:
    """Prompts that are generated together.

    names           what tells one prompt from another, and its noise from another's
    ids             token ids of each
    max_new_tokens  cap on each answer
    stop            texts that end an answer where one token is the whole of one
    """

    names: tuple[str, ...]
    ids: list[list[int]]
    max_new_tokens: int
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What one prompt's generation gave and cost, as if it had been alone.

    text          newly generated text, without the end token
    n_new         its tokens, the end token included
    hit_cap       whether the cap stopped it
    sparse_calls  calls of the model that sampled, up to this answer's own end; the first is Appendix F's replay
    dense_calls   calls that attended densely, the prefill aside
    access        the ledger's totals of these calls
    """

    text: str
    n_new: int
    hit_cap: bool
    sparse_calls: int
    dense_calls: int
    access: dict[str, Any]


class Generator:
    """Answers of a patched model, and the prefill of the batch that was asked for last.

    Configurations that answer one batch after another share its prefill; those of one grouping also share its teams.
    """

    def __init__(self, santa: SantaHandle, tokenizer: Any, seed: int) -> None:
        self.santa, self.tokenizer, self.seed = santa, tokenizer, seed
        self._names: tuple[str, ...] = ()
        self._prefilled: Prefilled | None = None
        make_greedy(santa.model, tokenizer)

    def answers(self, condition: SantaConfig, batch: Batch) -> list[Answer]:
        """Greedy answers under these settings. All fields are set: nothing is left of those before.

        Raises whatever the model raises; the prefill is then dropped.
        """
        self.santa.configure(condition)
        try:
            return self._answers(batch)
        except Exception:
            self._names, self._prefilled = (), None
            raise

    @torch.inference_mode()
    def _answers(self, batch: Batch) -> list[Answer]:
        santa, settings = self.santa, self.santa.model.generation_config
        device = santa.model.get_input_embeddings().weight.device
        longest, pad = max(map(len, batch.ids)), settings.pad_token_id or 0
        ids = torch.tensor([[pad] * (longest - len(own)) + own for own in batch.ids], device=device)
        mask = torch.tensor([[0] * (longest - len(own)) + [1] * len(own) for own in batch.ids], device=device)
        santa.sequence_keys = [sequence_key(self.seed, name) for name in batch.names]
        if self._prefilled is None or self._names != batch.names:
            self._prefilled = None  # its memory first
            self._names, self._prefilled = batch.names, santa.prefill(ids, mask)
        santa.reset()
        ends = [*(settings.eos_token_id or []), *stop_ids(self.tokenizer, batch.stop)]
        output = self._prefilled.generate(max_new_tokens=batch.max_new_tokens, eos_token_id=ends or None)
        sparse, dense = santa.sparse_calls, santa.dense_calls
        new = [_until_end(row, ends) for row in output[:, longest:].tolist()]
        late = [output.shape[1] - longest - len(own) for own in new]  # steps after an answer's end, not its own
        calls = [(max(0, sparse - steps), max(0, dense - steps)) for steps in late]
        access = santa.access.sequence_totals([sum(own) for own in calls])
        return [
            Answer(
                self.tokenizer.decode(own, skip_special_tokens=True),
                len(own),
                len(own) >= batch.max_new_tokens and own[-1] not in ends,
                *counts,
                totals,
            )
            for own, counts, totals in zip(new, calls, access, strict=True)
        ]


def _until_end(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    stop = next((place for place, token in enumerate(tokens, 1) if token in ends), len(tokens))
    return list(tokens[:stop])


def stop_ids(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Ids of the tokens that are one of these texts. A text that no single token is, is left out."""
    found = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if ids and tokenizer.decode(ids[-1:]) == text:
            found.append(ids[-1])
    return found


def first_line(error: Exception) -> str:
    """Type and first line of an exception's text."""
    return f"{type(error).__name__}: {error}".split("\n")[0]


def free_memory() -> None:
    """Give back what failed calls left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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
