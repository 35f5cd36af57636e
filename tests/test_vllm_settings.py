"""The vLLM plugin's settings and refusals; the engine itself is tested by ``make test-vllm``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from latent_santa.patches.vllm.settings import check_engine, read


def test_environment_and_additional_configuration() -> None:
    environment = {"LATENT_SANTA_BUDGET": "64", "LATENT_SANTA_DENSE_BELOW": "4096", "HOME": "/"}
    found = read(environment, {"latent_santa": {"estimator": "pooled", "budget": 256}, "other": 1})
    assert (found.config.budget, found.config.estimator, found.dense_below) == (256, "pooled", 4096)
    assert found.config.parents == "contiguous" and found.config.teams_per_head == 64
    assert "S=256 (K=64 teams per head), pooled" in found.line()


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"BUDGET": "many"}, r"budget='many': must be an int"),
        ({"BUDGET": "\u00b2"}, "budget='\u00b2': must be an int"),
        ({"BUDGET": "0"}, "budget=0: must be at least 1"),
        ({"BUDGET": "64", "budget": "128"}, "LATENT_SANTA_budget is in the environment twice"),
        ({"BUDGETS": "1"}, r"unknown setting budgets: vLLM's plugin has budget, .*LATENT_SANTA_NAME"),
        ({"ESTIMATOR": "mean"}, "estimator='mean': must be one of 'per_head', 'pooled'"),
        ({"ROUTING": "three_stage"}, "routing='three_stage': must be one of 'one_stage', 'two_stage'"),
        ({"PARENTS_PER_HEAD": "0"}, "parents_per_head=0: must be at least 1"),
        ({"DENSE_BELOW": "-1"}, "dense_below='-1': must be a non-negative int"),
        ({"LOG_SECONDS": "often"}, "log_seconds='often': must be a non-negative float"),
        ({"LOG_SECONDS": "nan"}, "log_seconds='nan': must be a non-negative float"),
    ],
)
def test_wrong_settings_are_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read({f"LATENT_SANTA_{name}": value for name, value in environment.items()})


def test_two_stages() -> None:
    found = read({"LATENT_SANTA_ROUTING": "two_stage", "LATENT_SANTA_PARENTS_PER_HEAD": "32"})
    assert found.parents == 32 and "two stages K1=32" in found.line()
    assert read({}).parents is None and "one stage" in read({}).line()


def test_additional_configuration_must_hold_names() -> None:
    with pytest.raises(ValueError, match="must hold settings by name, not a list"):
        read({}, {"latent_santa": [1]})


@pytest.mark.parametrize(
    "given", [{"dense_below": 1.5}, {"dense_below": True}, {"log_seconds": float("inf")}, {"ledger": 5}]
)
def test_a_value_of_another_type_is_refused_and_not_rounded(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(given))}=.*must be"):
        read({}, {"latent_santa": given})


def test_a_ledger_that_cannot_be_written_is_refused_before_the_engine_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file" / "rows.json"):
        with pytest.raises(ValueError, match="no file can be written there"):
            check_engine(engine(), read({"LATENT_SANTA_LEDGER": str(place)}))
    check_engine(engine(), read({"LATENT_SANTA_LEDGER": str(tmp_path / "new" / "rows.json")}))


def engine(**changes: Any) -> Any:
    """The parts of vLLM's configuration that are looked at."""
    parts: dict[str, Any] = {
        "model_config": {"model": "m", "use_mla": True},
        "cache_config": {"cache_dtype": "auto"},
        "parallel_config": {
            "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "enable_dbo": False,
            "tensor_parallel_size": 1,
        },
        "kv_transfer_config": None,
    }  # fmt: skip
    for name, value in changes.items():
        owner = next((part for part in parts.values() if isinstance(part, dict) and name in part), parts)
        owner[name] = value
    return SimpleNamespace(**{k: SimpleNamespace(**v) if isinstance(v, dict) else v for k, v in parts.items()})


@pytest.mark.parametrize(
    "changes, settings, block_size, message",
    [
        ({"use_mla": False}, {}, 16, r"model m: it has no latent cache \(MLA\)"),
        ({"cache_dtype": "fp8"}, {}, 16, "kv_cache_dtype=fp8: .*fp8 rows are not read yet"),
        ({"kv_transfer_config": object()}, {}, 16, "kv_transfer_config"),
        ({"decode_context_parallel_size": 2}, {}, 16, "decode_context_parallel_size"),
        ({"prefill_context_parallel_size": 2}, {}, 16, "prefill_context_parallel_size"),
        ({"enable_dbo": True}, {}, 16, "enable_dbo"),
        ({}, {}, 24, "block_size=24: must be a multiple of P = parent_size = 16"),
        ({}, {}, 512, "block_size=512"),
        ({"tensor_parallel_size": 2}, {"LATENT_SANTA_ESTIMATOR": "pooled"}, 16, 'estimator="pooled" with tensor'),
    ],
)
def test_refusals_name_what_was_asked(changes: Any, settings: dict[str, str], block_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_engine(engine(**changes), read(settings), block_size)


def test_what_is_supported_passes() -> None:
    for block_size in (None, 16, 64, 128):
        check_engine(engine(tensor_parallel_size=2, cache_dtype="bfloat16"), read({}), block_size)
