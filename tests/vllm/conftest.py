"""Tests of the plugin in vLLM's own engine: ``make test-vllm``, which makes an environment with vLLM's CPU wheel."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
ENGINE = Path(__file__).with_name("engine.py")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's checkpoint with an output layer of its own: vLLM's DeepSeek-V2 has no tied one."""
    from safetensors.torch import load_file, save_file

    from latent_santa.eval.tiny.load import MODEL_DIRECTORY

    folder = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(MODEL_DIRECTORY, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Retrieval tasks of the embedded model as token ids, cut in front to lengths at the edges of blocks and chunks."""
    from transformers import AutoTokenizer

    from latent_santa.eval.tiny import samples
    from latent_santa.eval.tiny.load import MODEL_DIRECTORY

    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    found = []
    for sample, length in zip(samples("multivalue", 4, 512, tokenizer), (449, 257, 400, 333), strict=True):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": sample.input}], tokenize=False, add_generation_prompt=True
        )
        found.append(tokenizer(text, add_special_tokens=False).input_ids[-length:])
    return found


@pytest.fixture(scope="session")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Run :mod:`tests.vllm.engine` on the checkpoint; its answer, or a failure with the end of its log."""

    def run(batches: list[Any], settings: dict[str, str], record: bool = False, **options: Any) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("engine")
        spec = {
            "environment": settings,
            "options": {"model": str(checkpoint), "max_model_len": 1024, "max_num_seqs": 4, **options},
            "batches": batches,
            "record": record,
        }
        (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(ENGINE), str(folder / "spec.json"), str(folder / "answer.json")],
            capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        answer: dict[str, Any] = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
        return answer | {"log": done.stdout + done.stderr}

    return run
