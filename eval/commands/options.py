"""What the commands share in reading options: which model to load, and lists of integers."""

from __future__ import annotations

import argparse
from pathlib import Path

from latent_santa.eval.errors import EvalError
from latent_santa.eval.run.models import DTYPES, QUANTS, ModelSpec


def add_model_options(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add --model and what belongs to it."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=default,
        required=default is None,
        metavar="ID_OR_PATH",
        help="hub id, local directory, or builtin:tiny, the embedded MLA model",
    )
    group.add_argument("--revision", help="hub revision of the model")
    group.add_argument(
        "--dtype", default="auto", choices=DTYPES, help="weights and cache; auto: float32 on a CPU, bfloat16 on a GPU"
    )
    group.add_argument(
        "--quant",
        default="none",
        choices=QUANTS,
        help="int8: bitsandbytes LLM.int8 except kv_b_proj and lm_head, as in Appendix F",
    )
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one")
    group.add_argument("--device-map", help='"auto" spreads one model over several GPUs')
    group.add_argument("--offline", action="store_true", help="local files and the hub cache only")


def model_spec(args: argparse.Namespace) -> ModelSpec:
    """The checked specification.

    Raises:
        EvalError: options that cannot go together; nothing has been loaded yet.
    """
    spec = ModelSpec(args.model, args.revision, args.dtype, args.quant, args.device, args.device_map, args.offline)
    spec.check()
    return spec


def at_least(args: argparse.Namespace, **least: int) -> None:
    """See that numbers that were given are not too small; a name is the option's with underscores.

    Raises:
        EvalError: one is; the message names the option, the limit and the number.
    """
    for name, limit in least.items():
        given = getattr(args, name)
        if given is not None and given < limit:
            raise EvalError(f"--{name.replace('_', '-')} must be at least {limit}, got {given}")


def prompt_text(path: Path) -> str:
    """The text of a --prompt-file.

    Raises:
        EvalError: it cannot be read, or is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise EvalError(f"--prompt-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise EvalError(f"--prompt-file {path} is not UTF-8 text: {error}") from error


def integers(option: str, text: str) -> list[int]:
    """The positive integers of a list separated by commas.

    Raises:
        EvalError: something else; the message names the option.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise EvalError(f"{option} {text}: give integers separated by commas") from error
    if min(numbers) < 1:
        raise EvalError(f"{option} {text}: must be at least 1")
    return numbers
