"""Reading a Qwen2 checkpoint and writing it as DeepSeek-V2, file by file."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from latent_santa.eval.convert.layer import (
    CONTENT_PAIRS,
    LANE,
    PROJECTIONS,
    Shapes,
    difference,
    latent_attention,
    shapes_of,
    target_config,
)
from latent_santa.eval.errors import EvalError

MOST_DIFFERENCE = 1e-3
SHARD_BYTES = 2 << 30
INDEX = "model.safetensors.index.json"
COPIED = ("generation_config.json", "LICENSE")


def source_config(directory: Path) -> Any:
    """The configuration of a checkpoint that can be re-expressed.

    Raises:
        EvalError: the directory holds no Qwen2 checkpoint, or one with a part that DeepSeek-V2 does not have.
    """
    from transformers import AutoConfig

    if not (directory / "config.json").is_file():
        raise EvalError(f"{directory} has no config.json: give the directory of a Qwen2 checkpoint")
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # unreadable files and unknown types have no common base
        raise EvalError(f"{directory}: cannot read its configuration: {error}") from error
    if config.model_type != "qwen2":
        raise EvalError(f"{directory} is a {config.model_type} checkpoint: only Qwen2 can be re-expressed")
    if (config.architectures or ["Qwen2ForCausalLM"]) != ["Qwen2ForCausalLM"]:
        raise EvalError(f"{directory} is a {config.architectures[0]}: only Qwen2ForCausalLM can be re-expressed")
    if "sliding_attention" in config.layer_types:
        raise EvalError(f"{directory} has layers with a sliding window, which DeepSeek-V2 does not have")
    rope = config.rope_parameters["rope_type"]
    if rope != "default":
        raise EvalError(f"{directory} has rotary embeddings of type {rope!r}: only 'default' can be re-expressed")
    if getattr(config, "quantization_config", None) is not None:
        raise EvalError(f"{directory} is quantised: give the checkpoint that it was made from")
    if config.hidden_size % config.num_attention_heads:
        raise EvalError(
            f"{directory}: DeepSeek-V2 needs a hidden size that is a multiple of the heads, and {config.hidden_size} "
            f"is none of {config.num_attention_heads}"
        )
    return config


def source_tokenizer(directory: Path) -> Any:
    """The checkpoint's tokenizer, or None if it has none.

    Raises:
        EvalError: it has files of one that cannot be read.
    """
    from transformers import AutoTokenizer

    if not any(directory.glob("tokenizer*")):
        return None
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # as above
        raise EvalError(f"{directory}: cannot read its tokenizer: {error}") from error


class Checkpoint:
    """Tensors of a directory of safetensors files, each read when it is asked for."""

    def __init__(self, directory: Path, files: ExitStack) -> None:
        """Open the files; `files` closes them.

        Raises:
            EvalError: there are none, or one is missing or damaged.
        """
        index = directory / INDEX
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            names = sorted(path.name for path in directory.glob("*.safetensors"))
        if not names:
            raise EvalError(f"{directory} has no safetensors files; load it and save it with save_pretrained first")
        self.directory = directory
        self.where: dict[str, Any] = {}
        for name in names:
            try:
                file = files.enter_context(safe_open(directory / name, framework="pt"))
            except Exception as error:  # a missing file and a damaged one have no common base
                raise EvalError(f"{directory / name} cannot be read: {error}") from error
            self.where |= dict.fromkeys(file.keys(), file)

    def __call__(self, name: str) -> Tensor:
        return self.where[name].get_tensor(name)

    def attention(self, layer: str) -> dict[str, Tensor]:
        """Weights of a layer's attention by name below `layer`."""
        return {name: self(layer + name) for name in PROJECTIONS}


def _layer(name: str) -> str | None:
    """What a name of a weight of an attention layer begins with, up to and with `self_attn.`; None for other names."""
    before, found, _ = name.partition("self_attn.")
    return before + found if found else None


def _shards(sizes: dict[str, int]) -> list[list[str]]:
    """Names in files of at most `SHARD_BYTES`, in order; a larger tensor has a file of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write(out: Path, sizes: dict[str, int], source: Checkpoint, s: Shapes, step: Callable[[], None]) -> None:
    """Write the target's weights, `sizes` bytes by name, and an index where they take several files."""
    shards = _shards(sizes)
    place: dict[str, str] = {}
    made: tuple[str | None, dict[str, Tensor]] = (None, {})
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name in names:
            layer = _layer(name)
            if layer is None:
                tensors[name] = source(name)
            else:
                if made[0] != layer:
                    made = layer, latent_attention(source.attention(layer), s)
                tensors[name] = made[1].pop(name.removeprefix(layer))
            place[name] = file
            step()
        save_file(tensors, out / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": place}
        (out / INDEX).write_text(json.dumps(index, indent=1) + "\n")


@dataclass(frozen=True)
class Converted:
    """What `convert` wrote.

    shapes    sizes of the attention layers
    bytes     size of the weights
    error     `difference` of the first layer
    left_out  names of the source's tensors that have no place in the target
    """

    shapes: Shapes
    bytes: int
    error: float
    left_out: list[str]


def convert(
    directory: Path,
    out: Path,
    stage: Callable[[str, int], None],
    step: Callable[[], None],
    content_pairs: int = CONTENT_PAIRS,
) -> Converted:
    """Write the re-expression of the checkpoint in `directory` to `out`, with its tokenizer and generation config.

    It takes the memory of one output file (2 GiB) and two layers. `out` appears once it is complete.

    Args:
        stage, step: told of the progress, tensor by tensor.
        content_pairs: rotary pairs per head that also score through the latent.

    Raises:
        EvalError: the source cannot be re-expressed, `out` exists, or the disk has too little room.
    """
    from transformers import DeepseekV2ForCausalLM

    if out.exists():
        raise EvalError(f"{out} exists: give a path that does not")
    parent = out.resolve().parent
    if not parent.is_dir():
        raise EvalError(f"{parent} is no directory: make it first")
    config, tokenizer = source_config(directory), source_tokenizer(directory)
    s = shapes_of(config, content_pairs)
    target = target_config(config, s)
    with ExitStack() as files:
        source = Checkpoint(directory, files)
        with torch.device("meta"):
            weights = DeepseekV2ForCausalLM(target).state_dict()
        if config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        layers = {layer for name in weights if (layer := _layer(name))}
        wanted = {name for name in weights if not _layer(name)} | {
            layer + name for layer in layers for name in PROJECTIONS
        }
        if missing := sorted(wanted - source.where.keys()):
            raise EvalError(f"{directory} lacks {len(missing)} weights, {missing[0]} first: it is incomplete")
        dtype = source("model.norm.weight").dtype
        if dtype not in LANE:
            raise EvalError(f"{directory} has {dtype} weights: bfloat16, float16 and float32 can be re-expressed")
        sizes = {name: weight.numel() * dtype.itemsize for name, weight in weights.items()}
        total = sum(sizes.values())
        free = shutil.disk_usage(parent).free
        if free < total:
            raise EvalError(f"{out} needs {total / 1e9:.1f} GB, and {parent} has {free / 1e9:.1f} GB free")
        apart = difference(source.attention(min(layers)), s, config, target)
        if not apart <= MOST_DIFFERENCE:
            raise EvalError(
                f"{directory}: its first layer re-expressed differs by {apart:.1e} of the largest output, more than "
                f"{MOST_DIFFERENCE:.0e}; its weights may be damaged, or too large for float16"
            )
        unfinished = Path(tempfile.mkdtemp(dir=parent, prefix=f".{out.name}.", suffix=".unfinished"))
        try:
            stage("weights", len(sizes))
            _write(unfinished, sizes, source, s, step)
            target.dtype = dtype
            target.save_pretrained(unfinished)
            for name in COPIED:
                if (directory / name).is_file():
                    shutil.copyfile(directory / name, unfinished / name)
            # saved, not copied: the files of a Qwen2 tokenizer mean something else beside a DeepSeek-V2 configuration
            if tokenizer is not None:
                tokenizer.save_pretrained(unfinished)
            unfinished.chmod(0o755)
            unfinished.rename(out)
        except OSError as error:
            raise EvalError(f"{out} cannot be written: {error.strerror}") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return Converted(s, total, apart, sorted(source.where.keys() - wanted))
