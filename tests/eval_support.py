"""What the evaluation's tests share: a fast real tokenizer, a random checkpoint, a handle without a method."""

from __future__ import annotations

import shutil
import socket
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, DeepseekV2Config, DeepseekV2ForCausalLM

from latent_santa.eval.tiny.load import MODEL_DIRECTORY

# Tensors of these models are tiny: more threads only wait for each other.
torch.set_num_threads(1)


@cache
def tokenizer() -> Any:
    """The embedded model's tokenizer: byte-level, 4096 tokens, with a chat template."""
    return AutoTokenizer.from_pretrained(MODEL_DIRECTORY, local_files_only=True)


def save_random_model(directory: Path) -> Path:
    """A checkpoint of two random MLA layers with the embedded model's tokenizer; its answers are noise."""
    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        first_k_dense_replace=2,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_shared_experts=1,
        moe_intermediate_size=8,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.5,
    )
    DeepseekV2ForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL_DIRECTORY / name, directory / name)
    return directory


def block_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every attempt to reach another machine fail, also a name look-up."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"network access: {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


class FakeLedger:
    """Totals as a ledger gives them, set by the test."""

    def __init__(self) -> None:
        self.counts = {"numerator": 0, "row_read": 0, "denominator": 0}
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1

    def sequence_totals(self, calls: list[int]) -> list[dict[str, int]]:
        return [dict(self.counts) for _ in calls]


class FakeHandle:
    """A handle around an unpatched model: it notes what it is told, and counts calls as the test wants."""

    def __init__(self, sparse_a_prompt: int = 1) -> None:
        self.access = FakeLedger()
        self.sequence_keys: list[int] | None = None
        self.configured: list[dict[str, Any]] = []
        self.keys: list[int] = []
        self._per_prompt = sparse_a_prompt
        self._reads = 0

    def configure(self, **overrides: Any) -> None:
        self.configured.append(overrides)

    @property
    def sparse_calls(self) -> int:
        # Read once before and once after each prompt.
        self._reads += 1
        if self._reads % 2:
            self.keys += self.sequence_keys or []
        return self._per_prompt * (self._reads // 2)

    @property
    def dense_calls(self) -> int:
        return 0
