"""Loading the embedded model from inside the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODEL_DIRECTORY = Path(__file__).parent / "model"


def load_tiny(dtype: Any = "float32", device: str = "cpu") -> tuple[Any, Any]:
    """The embedded model in evaluation mode and its tokenizer, through transformers; nothing is fetched.

    dtype   torch dtype or its name; the stored weights are bfloat16
    device  where the model goes

    Returns (DeepseekV2ForCausalLM, fast tokenizer). Raises FileNotFoundError when the package was installed without
    the model's files.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    needed = ("config.json", "model.safetensors", "tokenizer.json")
    missing = [name for name in needed if not (MODEL_DIRECTORY / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{MODEL_DIRECTORY} lacks {', '.join(missing)}: install the package with its data")
    chosen = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIRECTORY, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL_DIRECTORY, dtype=chosen, local_files_only=True)
    return model.to(device).eval(), tokenizer
