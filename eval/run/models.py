"""Loading a model and its tokenizer: a hub id, a local path, or the embedded tiny model."""

from __future__ import annotations

import hashlib
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latent_santa.eval.errors import EvalError

TINY = "builtin:tiny"
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTS = ("none", "int8")
DEVICES = ("cpu", "cuda", "mps", "xpu")
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")

# Appendix F keeps these in bfloat16: sampled attention reads the weight of kv_b_proj itself.
UNQUANTISED = ("kv_b_proj", "lm_head")


@dataclass(frozen=True)
class ModelSpec:
    """What is asked for. `device` "auto" is a GPU if there is one; `device_map` "auto" spreads one model over all."""

    name: str
    revision: str | None = None
    dtype: str = "auto"
    quant: str = "none"
    device: str = "auto"
    device_map: str | None = None
    offline: bool = False

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
        if self.tiny and self.revision:
            raise EvalError(f"--revision {self.revision}: the tiny model comes with this package and has no revisions")
        if self.device_map and self.tiny:
            raise EvalError("--device-map is for large models; the tiny model fits on one device")
        if self.device_map and self.device_map not in DEVICE_MAPS:
            raise EvalError(f"--device-map {self.device_map}: supported are {', '.join(DEVICE_MAPS)}")
        path = Path(self.name)
        looks_local = self.name.startswith((".", "/", "~")) or self.name.count("/") != 1
        if not self.tiny and looks_local and not path.expanduser().is_dir():
            raise EvalError(
                f"--model {self.name}: no such directory; give a hub id (OWNER/NAME), a directory, or builtin:tiny"
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
    """A model in evaluation mode with its tokenizer, and how many of its linear layers are quantised."""

    model: Any
    tokenizer: Any
    facts: dict[str, Any] = field(default_factory=dict)


def load_tokenizer(spec: ModelSpec) -> Any:
    """Only the tokenizer. Raises EvalError if it cannot be had."""
    from transformers import AutoTokenizer

    where, keywords = spec.source()
    try:
        return AutoTokenizer.from_pretrained(where, **keywords)
    except Exception as error:  # missing files, no network and bad files have no common base
        raise EvalError(_cannot("the tokenizer", spec, error)) from error


def load_config(spec: ModelSpec) -> Any:
    """Only the configuration. Raises EvalError if it cannot be had."""
    from transformers import AutoConfig

    where, keywords = spec.source()
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


def context_limit(config: Any) -> int | None:
    """Positions that the model was made for, if its configuration says so."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "max_position_embeddings", None)


def load(spec: ModelSpec, tokenizer: Any, local_rank: int = 0) -> Loaded:
    """The model, dense and unpatched. With int8, every linear layer but kv_b_proj and lm_head is quantised."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    where, keywords = spec.source()
    device = spec.resolved_device(local_rank)
    dtype = getattr(torch, spec.resolved_dtype())
    if device.startswith("cuda:"):
        # Kernels are launched on the current device, whatever their tensors' device is.
        torch.cuda.set_device(device)
    if spec.quant == "int8":
        from transformers import BitsAndBytesConfig

        # It says at every multiplication that bfloat16 inputs are cast.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        keywords["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=list(UNQUANTISED))
        keywords["device_map"] = spec.device_map or {"": device}
    elif spec.device_map:
        keywords["device_map"] = spec.device_map
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **keywords)
    except Exception as error:
        raise EvalError(_cannot("the model", spec, error)) from error
    if "device_map" not in keywords:
        model = model.to(device)
    model.eval()
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    quantised = [name for name, module in linear.items() if type(module) is not torch.nn.Linear]
    wrong = [name for name in quantised if name.endswith(UNQUANTISED)]
    if wrong:
        raise EvalError(
            f"{wrong[0]} is quantised, but {' and '.join(UNQUANTISED)} must keep their precision (Appendix F); use a "
            "checkpoint that is not quantised itself, with --quant int8"
        )
    if spec.quant == "int8" and not quantised:
        raise EvalError("--quant int8 quantised no layer of this model; use --quant none")
    return Loaded(model, tokenizer, {"linear_layers": len(linear), "quantised_layers": len(quantised)})
