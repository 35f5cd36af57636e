"""Samples of the data set that kvpress publishes on the Hugging Face hub, read with `datasets` at a fixed revision."""

from __future__ import annotations

from typing import Any

from latent_santa.eval.errors import EvalError

REPOSITORY = "simonjegou/ruler"
LENGTHS = (4096, 8192, 16384)


def resolve_revision(revision: str, offline: bool) -> str:
    """The commit that `revision` names now, so that a run can be pinned to it. Offline the name itself is kept."""
    if offline:
        return revision
    from huggingface_hub import HfApi

    try:
        sha = HfApi().dataset_info(REPOSITORY, revision=revision).sha
    except Exception as error:  # the client raises many kinds, from no network to an unknown revision
        raise EvalError(
            f"--data hub: cannot look up {REPOSITORY} at revision {revision!r} ({error}); with the data in the cache "
            "use --offline, without a network use --data builtin or jsonl:DIR"
        ) from error
    return sha or revision


def load(length: int, revision: str) -> list[dict[str, Any]]:
    """All records of one length, in their order. Raises EvalError for a length the data set lacks."""
    if length not in LENGTHS:
        raise EvalError(
            f"--data hub: {REPOSITORY} has the lengths {', '.join(map(str, LENGTHS))}, not {length}; make the data "
            "with RULER and use --data jsonl:DIR"
        )
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise EvalError("--data hub needs the package datasets: pip install 'latent-santa[eval]'") from error
    try:
        data = load_dataset(REPOSITORY, data_dir=str(length), split="test", revision=revision)
    except Exception as error:  # connection, cache and format errors have no common base
        raise EvalError(f"--data hub: cannot load {REPOSITORY}, {length}, revision {revision}: {error}") from error
    return [dict(record) for record in data]
