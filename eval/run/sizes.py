"""Whether what is asked for can fit at all, from the configuration and what is free, before anything slow."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from latent_santa.eval.errors import EvalError
from latent_santa.eval.run.models import ModelSpec

BYTES_PER_TOKEN = 2  # of prompt text; English has about four
BYTES_PER_ID = 40  # a number of Python and its place in a list
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def cache_bytes(config: Any, rows: int, dtype: str) -> int | None:
    """Bytes of `rows` cached rows over all layers; None if the configuration does not say what a row is."""
    text = config.get_text_config(decoder=True)
    latent = getattr(text, "kv_lora_rank", None)
    if latent:
        width = latent + text.qk_rope_head_dim
    else:
        heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
        dim = getattr(text, "head_dim", None)
        if heads is None or not (dim or getattr(text, "hidden_size", None)):
            return None
        width = 2 * heads * (dim or text.hidden_size // text.num_attention_heads)
    return rows * text.num_hidden_layers * width * ITEM_BYTES[dtype]


def free_bytes(device: str) -> int | None:
    """Memory that a new cache may take on a device; None where the system does not tell."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)[0]
    table = Path("/proc/meminfo")
    if not device.startswith("cpu") or not table.is_file():
        return None
    sizes = dict(line.split(":") for line in table.read_text().splitlines())
    return int(sizes["MemAvailable"].split()[0]) << 10 if "MemAvailable" in sizes else None


def check_cache(config: Any, rows: int, spec: ModelSpec, options: str) -> None:
    """Raises EvalError if a cache of `rows` rows alone is more than the memory that is free; names the `options`.

    A model that is spread over several devices is not checked.
    """
    if spec.device_map or spec.tensor_parallel:
        return
    device = spec.resolved_device()
    check_memory(cache_bytes(config, rows, spec.resolved_dtype()), device, f"{options}: a cache of {rows:,} rows takes")


def check_memory(needed: int | None, device: str, taker: str) -> None:
    """Raises EvalError if a device has fewer than the `needed` bytes free; the message begins with the `taker`."""
    free = free_bytes(device)
    if needed is not None and free is not None and needed > free:
        raise EvalError(f"{taker} {_gib(needed)} and {device} has {_gib(free)} free; ask for less")


def check_positions(limit: int | None, rows: int, options: str, name: str) -> None:
    """Raises EvalError if more rows than the model's positions are asked for; names the `options`."""
    if limit is not None and rows > limit:
        raise EvalError(
            f"{options}: {rows:,} positions are more than the {limit:,} that {name} was made for; ask for less"
        )


def check_prompts(directory: Path, prompts: int, length: int) -> None:
    """Raises EvalError if the prompts that a new run would freeze are more than the disk or the memory has left."""
    if os.path.exists(directory / "manifest.json"):  # Path.exists raises for a name too long
        return
    there = next(path for path in (directory, *directory.absolute().parents) if os.path.isdir(path))
    needed, free = prompts * length * BYTES_PER_TOKEN, shutil.disk_usage(there).free
    taker = f"--n and --length: {prompts:,} prompts of {length:,} tokens take about"
    if needed > free:
        raise EvalError(
            f"{taker} {_gib(needed)} on the disk, and {there} has {_gib(free)} left; ask for less, or give another "
            "--out"
        )
    check_memory(needed, "cpu", taker)


def check_ids(prompts: int, length: int) -> None:
    """Raises EvalError if the token ids of so many prompts are more than the memory has left."""
    taker = f"--n and --length: the ids of {prompts:,} prompts of {length:,} tokens take about"
    check_memory(prompts * length * BYTES_PER_ID, "cpu", taker)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):,.1f} GiB" if size >= 1 << 28 else f"{size / (1 << 20):,.1f} MiB"
