"""What the evaluation's tests share: settings, a fast real tokenizer, a random checkpoint, answers without a model."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, DeepseekV2Config, DeepseekV2ForCausalLM

from latent_santa.config import SantaConfig
from latent_santa.eval.run.generation import Answer, Batch
from latent_santa.eval.tiny.load import MODEL_DIRECTORY

DENSE = SantaConfig(method="dense")

OPTIONS = (
    "--data builtin --tasks niah_single_1,fwe --length 256 --n 3 --budgets 16,32 --estimators pooled "
    "--parents contiguous --floor 0"
).split()


def santapp(budget: int, parents: str, estimator: str, representatives: int = 4) -> SantaConfig:
    """SANTA++ with P = 16."""
    return SantaConfig(budget=budget, parents=parents, representatives=representatives, estimator=estimator)


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


class FakeGenerator:
    """Answers without a model: it notes what it is told, and gives the text and counts that the test wants."""

    def __init__(self, sparse_calls: int = 1, text: str = "nothing", fails: Callable[[int], Exception | None] = None):
        self.sparse_calls, self.text, self.fails = sparse_calls, text, fails
        self.access = {"numerator": 0, "row_read": 0, "denominator": 0}
        self.asked: list[tuple[SantaConfig, Batch]] = []

    def answers(self, condition: SantaConfig, batch: Batch) -> list[Answer]:
        self.asked.append((condition, batch))
        error = self.fails and self.fails(len(self.asked))
        if error:
            raise error
        cap = batch.max_new_tokens
        return [Answer(self.text, cap, True, self.sparse_calls, 0, dict(self.access)) for _ in batch.names]


def results(directory: Path) -> dict[str, list[dict]]:
    """Results of each file without what differs between runs of equal settings."""
    found = {}
    for path in sorted((directory / "results").iterdir()):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.name] = [{name: value for name, value in line.items() if name != "seconds"} for line in lines]
    return found


def finished_run(directory: Path, model: str) -> Path:
    """A run of the command that nothing disturbed."""
    from latent_santa.eval.cli import main

    assert main(["ruler", "--model", model, *OPTIONS, "--out", str(directory)]) == 0
    return directory
