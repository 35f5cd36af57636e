"""The plugin's settings: from the environment and vLLM's additional configuration, checked by SantaConfig's rules."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from latent_santa.config import SantaConfig
from latent_santa.vllm_plugin import PREFIX

KEY = "latent_santa"
# vLLM's internals move monthly: these versions have been run, each on its kind of device
VERSIONS = {"cuda": "0.26.0", "cpu": "0.32.0"}
METHOD = ("budget", "estimator", "noise", "routing", "parents_per_head", "seed", "parent_size", "representatives")


@dataclass(frozen=True)
class Settings:
    """What the backend does.

    Attributes:
        config: budget, estimator, noise, routing, K1, seed, P and R, with contiguous parents.
        dense_below: requests with fewer rows attend to all of them.
        ledger: where the row counts go as JSON, one file per rank; empty for none.
        log_seconds: how often a line of the row counts goes into vLLM's log while it decodes; 0 for never.
    """

    config: SantaConfig
    dense_below: int = 0
    ledger: str = ""
    log_seconds: float = 10.0

    @property
    def parents(self) -> int | None:
        """K1 of two stages, or None for one."""
        return self.config.parents_per_head if self.config.routing == "two_stage" else None

    def line(self) -> str:
        """One line for the log."""
        c, stages = self.config, "one stage" if self.parents is None else f"two stages K1={self.parents}"
        return (
            f"SANTA++ S={c.budget} (K={c.teams_per_head} teams per head), {c.estimator}, contiguous {c.parent_size}/"
            f"{c.representatives}, {stages}, {c.noise} noise, seed {c.seed}, below {self.dense_below} rows dense"
        )


def read(environment: Mapping[str, str] = os.environ, additional: Any = None) -> Settings:
    """The settings: ``LATENT_SANTA_BUDGET=128`` and so on, overridden by ``{"latent_santa": {"budget": 128}}``.

    Raises:
        ValueError: a name is unknown or there twice, or a value breaks a rule; the message names both.
    """
    own = [field.name for field in fields(Settings) if field.name != "config"]
    given: dict[str, Any] = {}
    for name in sorted(name for name in environment if name.startswith(PREFIX)):
        if (setting := name.removeprefix(PREFIX).lower()) in given:
            raise ValueError(f"{name} is in the environment twice, in upper and in lower case: keep one")
        given[setting] = environment[name]
    more = additional.get(KEY, {}) if isinstance(additional, Mapping) else {}
    if not isinstance(more, Mapping):
        raise ValueError(f'additional_config["{KEY}"] must hold settings by name, not a {type(more).__name__}')
    given |= more
    unknown = sorted(set(given) - {*METHOD, *own})
    if unknown:
        raise ValueError(
            f"unknown setting {', '.join(unknown)}: vLLM's plugin has {', '.join((*METHOD, *own))}, each as "
            f'{PREFIX}NAME in the environment or in additional_config["{KEY}"]; parents are contiguous there, and '
            "routing reads the cache's own rows"
        )
    method = {name: _plain(name, value) for name, value in given.items() if name in METHOD}
    config = SantaConfig(parents="contiguous", first_token="dense", **method)
    rest = {name: value for name, value in given.items() if name in own}
    for name, kind in (("dense_below", int), ("log_seconds", float)):
        if name in rest:
            rest[name] = _number(name, rest[name], kind)
    if not isinstance(rest.get("ledger", ""), str):
        raise ValueError(f"ledger={rest['ledger']!r}: must be the path of a file, or empty for none")
    return Settings(config, **rest)


def _plain(name: str, value: Any) -> Any:
    """A number that came as text; what is none is left to SantaConfig, which says what is wrong."""
    whole = isinstance(getattr(SantaConfig, name), int) and isinstance(value, str)
    try:
        return int(value) if whole else value
    except ValueError:
        return value


def _number(name: str, value: Any, kind: type) -> Any:
    try:
        number = kind(value)
        good = 0 <= number < math.inf and (isinstance(value, str) or number == value) and not isinstance(value, bool)
    except (TypeError, ValueError, OverflowError):
        good = False
    if not good:
        raise ValueError(f"{name}={value!r}: must be a non-negative {kind.__name__}")
    return number


def check_version(device: str) -> None:
    """Raise ValueError unless this vLLM is the one that was run on ``device`` ("cuda" or "cpu")."""
    from vllm import __version__

    if __version__.partition("+")[0] != VERSIONS[device]:
        raise ValueError(
            f"latent_santa's plugin was run with vLLM {VERSIONS['cuda']} on CUDA and {VERSIONS['cpu']} on a CPU, and "
            f"this is {__version__} on {device}: install that version, or serve without the plugin"
        )


def check_engine(config: Any, settings: Settings, block_size: int | None = None) -> None:
    """Refuse, by name, what the backend does not do.

    Args:
        config: vLLM's VllmConfig.
        block_size: rows of a block, once vLLM has decided.

    Raises:
        ValueError: with what was asked, why it does not work, and what to do.
    """
    parallel, cache, method = config.parallel_config, config.cache_config, settings.config
    size = block_size or method.parent_size
    refused = {
        f"model {config.model_config.model}: it has no latent cache (MLA); only MLA models are sampled": not (
            config.model_config.use_mla
        ),
        f"kv_cache_dtype={cache.cache_dtype}: teams and routing read rows as they are, and fp8 rows are not read yet; "
        'use "auto"': cache.cache_dtype not in ("auto", "float16", "bfloat16", "float32"),
        "kv_transfer_config: a connector moves or offloads blocks without their team records; serve without one": (
            config.kv_transfer_config is not None
        ),
        f"block_size={size}: must be a multiple of P = parent_size = {method.parent_size}, at most 256": bool(
            size % method.parent_size or size > 256
        ),
        "decode_context_parallel_size: a request's rows must be in one process; use tensor parallelism": (
            parallel.decode_context_parallel_size > 1
        ),
        "prefill_context_parallel_size: a request's rows must be in one process; use tensor parallelism": (
            parallel.prefill_context_parallel_size > 1
        ),
        "enable_dbo: rows are counted per step, and dual batch overlap runs two at once; serve without it": (
            parallel.enable_dbo
        ),
        'estimator="pooled" with tensor_parallel_size > 1: the union of all heads would need an exchange per layer; '
        'use "per_head"': method.estimator == "pooled" and parallel.tensor_parallel_size > 1,
        f"ledger={settings.ledger}: no file can be written there; name one in a folder that this user may write to": (
            bool(settings.ledger) and not _writable(Path(settings.ledger))
        ),
    }
    for reason, holds in refused.items():
        if holds:
            raise ValueError(f"SANTA++ in vLLM refuses {reason}")


def _writable(path: Path) -> bool:
    """Whether a file may be made there; folders that lack are made with it."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    return folder.is_dir() and os.access(folder, os.W_OK) and not path.is_dir()
