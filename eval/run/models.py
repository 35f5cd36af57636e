"""Loading a model and its tokenizer: a hub id, a local path, or the embedded tiny model."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latent_santa.eval.errors import EvalError
from latent_santa.eval.run.processes import started
from latent_santa.eval.run.threads import use_free_cpus

TINY = "builtin:tiny"
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTS = ("none", "int8")
DEVICES = ("cpu", "cuda", "mps", "xpu")
TOKENIZER_FILES = ("tokenizer", "vocab", "spiece", "sentencepiece", "tekken")
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True)
class ModelSpec:
    """What is asked for. `device` "auto" is a GPU if there is one; `device_map` "auto" spreads one model over all.

    `tensor_parallel` spreads the heads of one model over the processes that a launcher started.
    `math_sdpa` False forbids PyTorch's dense attention on a GPU to use its math backend, as Appendix F does.
    """

    name: str
    revision: str | None = None
    dtype: str = "auto"
    quant: str = "none"
    device: str = "auto"
    device_map: str | None = None
    offline: bool = False
    math_sdpa: bool = True
    tensor_parallel: bool = False

    @property
    def tiny(self) -> bool:
        return self.name == TINY

    def resolved_device(self, local_rank: int = 0) -> str:
        """`cpu`, or the GPU of this process; more processes than GPUs take them in turn."""
        import torch

        if self.device != "auto":
            return self.device
        return f"cuda:{local_rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"

    def sharing(self, processes: int) -> str | None:
        """A note if so many processes of one machine do not have a GPU each, else None."""
        if self.tensor_parallel:
            return None
        gpus = len({self.resolved_device(local_rank) for local_rank in range(processes)})
        if gpus == processes or not self.resolved_device().startswith("cuda"):
            return None
        return (
            f"{processes} processes share {gpus} GPU{'s' if gpus > 1 else ''}: each holds a model and caches of its own"
        )

    def resolved_dtype(self) -> str:
        """The dtype that "auto" means: float32 on a CPU and for the tiny model, bfloat16 elsewhere and with int8."""
        if self.dtype != "auto":
            return self.dtype
        if self.quant == "int8":
            return "bfloat16"
        return "float32" if self.tiny or self.resolved_device().startswith("cpu") else "bfloat16"

    def check(self) -> None:
        """Raises EvalError for options that cannot go together, before anything is loaded."""
        if self.quant == "int8":
            if self.tiny:
                raise EvalError("--quant int8 is for large models; the tiny model runs with --quant none")
            try:
                import bitsandbytes  # noqa: F401
            except ImportError as error:
                raise EvalError("--quant int8 needs bitsandbytes: pip install 'latent-santa[quant]'") from error
        check_device(self.device)
        if not self.math_sdpa and not self.resolved_device().startswith("cuda"):
            raise EvalError(
                "--no-math-sdpa chooses between kernels of a GPU; give a --device that is one, or leave it out"
            )
        if self.tiny and self.revision:
            raise EvalError(f"--revision {self.revision}: the tiny model comes with this package and has no revisions")
        if self.device_map and self.tiny:
            raise EvalError("--device-map is for large models; the tiny model fits on one device")
        if self.tensor_parallel:
            self._check_tensor_parallel()
        if self.device_map and self.device_map not in DEVICE_MAPS:
            raise EvalError(f"--device-map {self.device_map}: supported are {', '.join(DEVICE_MAPS)}")
        if self.tiny:
            return
        path = Path(self.name).expanduser()
        looks_local = self.name.startswith((".", "/", "~")) or self.name.count("/") != 1
        if not self.name.strip() or (looks_local and not path.is_dir()):
            raise EvalError(
                f"--model {self.name!r}: no such directory; give a hub id (OWNER/NAME), a directory, or builtin:tiny"
            )
        if path.is_dir():
            check_directory(path)

    def _check_tensor_parallel(self) -> None:
        import torch

        if started() == 1:
            raise EvalError(
                "--tensor-parallel: one process was started, so there is nothing to spread; start one per GPU, as in "
                "torchrun --nproc-per-node 8 -m latent_santa.eval ruler --tensor-parallel ..."
            )
        for option, given in (("--device-map", self.device_map), ("--quant", self.quant != "none" and self.quant)):
            if given:
                raise EvalError(f"--tensor-parallel spreads plain weights over processes, without {option} {given}")
        if self.device != "auto":
            raise EvalError(
                f"--device {self.device}: under --tensor-parallel each process takes the GPU of its number, or the CPU "
                "where PyTorch sees no GPU; leave it out"
            )
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if torch.cuda.is_available() and here > torch.cuda.device_count():
            raise EvalError(
                f"--tensor-parallel: {here} processes were started here for {torch.cuda.device_count()} GPUs; start "
                "one per GPU"
            )

    def source(self) -> tuple[str, dict[str, Any]]:
        """First argument and keywords of every `from_pretrained` call. Code of a checkpoint is never run."""
        if self.tiny:
            from latent_santa.eval.tiny.load import MODEL_DIRECTORY

            return str(MODEL_DIRECTORY), {"local_files_only": True}
        keywords: dict[str, Any] = {"trust_remote_code": False}
        if self.revision:
            keywords["revision"] = self.revision
        if self.offline:
            keywords["local_files_only"] = True
        path = Path(self.name).expanduser()
        return str(path) if path.is_dir() else self.name, keywords


def check_directory(path: Path) -> None:
    """Raises EvalError for a directory that lacks a part of a checkpoint, naming it. No weight is read."""
    if (path / "adapter_config.json").is_file():
        return  # transformers finds the model that the adapter belongs to
    _check_config(path)
    files = {file.name for file in path.iterdir()}
    if not any(name.endswith((".safetensors", ".bin")) for name in files):
        raise EvalError(f"--model {path}: the directory has a config.json, but no weights (*.safetensors or *.bin)")
    # the first of these is what transformers reads
    names = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
    name = next((name for name in names if name in files), "")
    if not name.endswith(".index.json"):
        return
    try:
        parts = set(json.loads((path / name).read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise EvalError(f"--model {path}: {name} is no index of weights: {error!r}") from error
    if absent := sorted(parts - files):
        raise EvalError(f"--model {path}: {name} lists {len(parts)} files, and {', '.join(absent)} is not there")


def _check_config(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise EvalError(f"--model {path}: the directory has no config.json, so it holds no model")


def check_device(device: str) -> None:
    """Raises EvalError for a --device of another kind, or one that PyTorch does not see."""
    import torch

    kind = device.partition(":")[0]
    if kind not in ("auto", *DEVICES):
        raise EvalError(f"--device {device}: supported are auto and {', '.join(DEVICES)} (with a number: cuda:1)")
    there = {"cuda": torch.cuda, "mps": torch.backends.mps, "xpu": torch.xpu}.get(kind)
    if there is not None and not there.is_available():
        what = "GPU" if kind == "cuda" else "such device"
        raise EvalError(f"--device {device}: PyTorch sees no {what} here; use --device cpu or auto")


@dataclass
class Loaded:
    """A model in evaluation mode with its tokenizer, and `int8.share` of its parameters."""

    model: Any
    tokenizer: Any
    facts: dict[str, Any] = field(default_factory=dict)


def load_tokenizer(spec: ModelSpec) -> Any:
    """Only the tokenizer. Raises EvalError if it cannot be had."""
    from transformers import AutoTokenizer

    where, keywords = spec.source()
    if Path(where).is_dir() and not any(file.name.startswith(TOKENIZER_FILES) for file in Path(where).iterdir()):
        raise EvalError(f"--model {spec.name}: the directory has no tokenizer (tokenizer.json or the like)")
    try:
        return AutoTokenizer.from_pretrained(where, **keywords)
    except Exception as error:  # missing files, no network and bad files have no common base
        raise EvalError(_cannot("the tokenizer", spec, error)) from error


def load_config(spec: ModelSpec) -> Any:
    """Only the configuration. Raises EvalError if it cannot be had."""
    from transformers import AutoConfig

    where, keywords = spec.source()
    if Path(where).is_dir() and not (Path(where) / "adapter_config.json").is_file():
        _check_config(Path(where))
    try:
        return AutoConfig.from_pretrained(where, **keywords)
    except Exception as error:
        raise EvalError(_cannot("the configuration", spec, error)) from error


def _cannot(what: str, spec: ModelSpec, error: Exception) -> str:
    hint = " (--offline looks at local files and the cache only)" if spec.offline else ""
    return f"cannot load {what} of {spec.name}{hint}: {error}"


def identity(spec: ModelSpec, config: Any) -> dict[str, Any]:
    """What tells this model from another of the same name: the hub commit, or names and hashes of its files.

    Of a weight file, gigabytes long, the size and three pieces are hashed: training changes numbers everywhere.
    """
    commit = getattr(config, "_commit_hash", None)
    where, _ = spec.source()
    directory = Path(where)
    if not directory.is_dir():
        return {"commit": commit}
    files: dict[str, str] = {}
    for path in sorted(directory.iterdir()):
        if path.suffix in (".safetensors", ".bin"):
            files[path.name] = _sampled_hash(path)
        elif path.name in ("config.json", "generation_config.json"):  # the second has ids that end an answer
            files[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"files": files}


def _sampled_hash(path: Path, piece: int = 1 << 20) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for start in (0, size // 2, max(size - piece, 0)):
            file.seek(start)
            digest.update(file.read(piece))
    return digest.hexdigest()


def check_supported(spec: ModelSpec, config: Any) -> None:
    """Raises EvalError for a model that cannot be patched, from its configuration: no weight is loaded or made."""
    import torch
    from transformers import AutoModelForCausalLM

    from latent_santa.patches.families import find_adapters

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        find_adapters(model)
    except NotImplementedError as error:
        raise EvalError(f"--model {spec.name}: {error}") from error
    except Exception as error:  # a class without such a head, or a configuration that makes no model
        raise EvalError(_cannot("a causal language model", spec, error)) from error


def load(spec: ModelSpec, tokenizer: Any, local_rank: int = 0) -> Loaded:
    """The model, dense and unpatched, with every weight from its checkpoint. `quant` "int8": see `int8.quantise`.

    Raises:
        EvalError: it cannot be loaded, a weight is missing or has another shape, or int8 is asked for and impossible.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from latent_santa.eval.run import int8

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    where, keywords = spec.source()
    device = spec.resolved_device(local_rank)
    if device.startswith("cpu"):
        use_free_cpus(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    dtype = getattr(torch, spec.resolved_dtype())
    if device.startswith("cuda:"):
        # Kernels are launched on the current device, whatever their tensors' device is.
        torch.cuda.set_device(device)
    if not spec.math_sdpa:
        torch.backends.cuda.enable_math_sdp(False)
    if spec.device_map:
        keywords["device_map"] = spec.device_map
    if spec.tensor_parallel:
        from transformers.distributed.configuration_utils import DistributedConfig

        keywords["distributed_config"] = DistributedConfig(tp_size=started())
    # a shape that differs is not an error of its own then, and is reported with the missing weights
    keywords |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **keywords)
    except Exception as error:
        raise EvalError(_cannot("the model", spec, error)) from error
    check_weights(spec, info)
    if info["unexpected_keys"] and not local_rank:
        unused = _named(info["unexpected_keys"])
        print(f"note: {spec.name} has {unused} without a place in the model", file=sys.stderr)
    if spec.quant == "int8":
        if getattr(model.config, "quantization_config", None) is not None:
            raise EvalError(f"--quant int8: {spec.name} is quantised already; use --quant none")
        # bitsandbytes says at every multiplication that bfloat16 inputs are cast
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        int8.quantise(model, None if spec.device_map else torch.device(device))
    if not spec.device_map and not spec.tensor_parallel:
        model = model.to(device)
    return Loaded(model.eval(), tokenizer, int8.share(model))


def check_weights(spec: ModelSpec, info: dict[str, Any]) -> None:
    """Raises EvalError for weights that transformers made up, from its loading info: missing ones, or other shapes.

    Weights that share another one's values, and those that a class says it can do without, are not missing.
    """
    if info["missing_keys"]:
        raise EvalError(
            f"{spec.name} lacks {_named(info['missing_keys'])}; random ones would stand in for them, so that "
            "every answer would be noise"
        )
    if info["mismatched_keys"]:
        name, found, wanted = sorted(info["mismatched_keys"])[0]
        raise EvalError(
            f"{spec.name} has {_named(key for key, *_ in info['mismatched_keys'])} of other shapes than its "
            f"configuration says: {name} is {tuple(found)}, not {tuple(wanted)}"
        )
    if info.get("error_msgs"):
        raise EvalError(f"{spec.name}: its weights cannot be loaded: {info['error_msgs'][0]}")


def _named(names: Iterable[str]) -> str:
    """How many weights these are, and the names of the first three."""
    listed = sorted(names)
    more = ", ..." if len(listed) > 3 else ""
    return f"{len(listed)} weight{'s' * (len(listed) > 1)} ({', '.join(listed[:3])}{more})"
