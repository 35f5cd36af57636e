"""Where HELMET's files lie below the user's copy, and reading them: large ones line by line, only what is chosen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from latent_santa.eval.errors import EvalError

Record = dict[str, Any]

LENGTHS = (8192, 16384, 32768, 65536, 131072)
# documents, or pairs of JSON KV, in HELMET's file for each of these lengths
DOCUMENTS = dict(zip(LENGTHS, (50, 105, 220, 440, 1000), strict=True))
RANKED = dict(zip(LENGTHS, (50, 130, 285, 600, 1000), strict=True))
PAIRS = dict(zip(LENGTHS, (105, 220, 440, 900, 1800), strict=True))
# HELMET's loaders take these data sets from the hub; here they are files of the same columns
HUB = {
    "trec_coarse": ("trec", "CogComp/trec", ("train", "test")),
    "trec_fine": ("trec", "CogComp/trec", ("train", "test")),
    "nlu": ("nlu_evaluation_data", "xingkunliuxtracta/nlu_evaluation_data", ("train",)),
    "banking77": ("banking77", "PolyAI/banking77", ("train", "test")),
    "clinc150": ("clinc_oos", "clinc_oos (plus)", ("train", "validation")),
}
BOOKS = {"infbench_qa": "longbook_qa_eng.jsonl", "infbench_mc": "longbook_choice_eng.jsonl"}


def needed(task: str, length: int) -> list[str]:
    """Names of a task's files below `data/`, questions first; a name without an ending is .parquet or .jsonl."""
    k = DOCUMENTS[length]
    if task in ("nq", "triviaqa", "hotpotqa"):
        depths = 3 if task == "hotpotqa" else 6
        return [
            f"kilt/{task}-dev-multikilt_1000_k{k}_dep{depths}.jsonl",
            f"kilt/{task}-train-multikilt_1000_k3_dep{depths}.jsonl",
        ]
    if task == "popqa":
        return [f"kilt/popqa_test_1000_k{k}_dep6.jsonl", "kilt/popqa_test_1000_k3_dep6.jsonl"]
    if task == "msmarco":
        return [f"msmarco/test_reranking_data_k{n}_dep3.jsonl" for n in (RANKED[length], 10)]
    if task == "json_kv":
        return [f"json_kv/test_k{PAIRS[length]}_dep6.jsonl"]
    if task in BOOKS:
        return [f"infbench/{BOOKS[task]}"]
    folder, _, splits = HUB[task]
    return [f"icl/{folder}/{split}" for split in reversed(splits)]


def find(directory: Path, tasks: Sequence[str], length: int) -> dict[str, list[Path]]:
    """Every task's files. Raises EvalError that names all that are missing, and where they come from."""
    if length not in LENGTHS:
        raise EvalError(f"--length {length}: HELMET's files have the lengths {', '.join(map(str, LENGTHS))}")
    found: dict[str, list[Path]] = {}
    missing: list[str] = []
    for task in tasks:
        for name in needed(task, length):
            names = [name] if name.endswith(".jsonl") else [f"{name}.parquet", f"{name}.jsonl"]
            there = [path for path in (directory / "data" / one for one in names) if path.is_file()]
            found.setdefault(task, []).extend(there[:1])
            if not there:
                missing.append(f"{' or '.join(f'data/{one}' for one in names)} ({_origin(task)})")
    if missing:
        listed = "".join(f"\n  {line}" for line in dict.fromkeys(missing))
        raise EvalError(f"--data {directory} lacks:{listed}")
    return found


def _origin(task: str) -> str:
    if task in HUB:
        return f"columns and label numbers of the hub's {HUB[task][1]}"
    if task in BOOKS:
        return "of the hub's xinrongzhang2022/InfiniteBench"
    return "of HELMET's data.tar.gz"


class Lines:
    """The records of a JSON Lines file, those that `keep` holds for. Reading it once notes where they are."""

    def __init__(self, path: Path, keep: Callable[[Record], bool] | None = None) -> None:
        self.path = path
        self._starts: list[int] = []
        digest, start = hashlib.sha256(), 0
        with path.open("rb") as file:
            for line in file:
                digest.update(line)
                if line.strip() and (keep is None or keep(self._record(line, start))):
                    self._starts.append(start)
                start += len(line)
        self.sha256 = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._starts)

    def take(self, numbers: Sequence[int]) -> Iterator[Record]:
        """The records of these numbers."""
        with self.path.open("rb") as file:
            for number in numbers:
                file.seek(self._starts[number])
                yield self._record(file.readline(), self._starts[number])

    def all(self) -> list[Record]:
        """Every record."""
        return list(self.take(range(len(self))))

    def _record(self, line: bytes, start: int) -> Record:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise EvalError(f"{self.path}, byte {start}: not JSON ({error})") from error
        if not isinstance(record, dict):
            raise EvalError(f"{self.path}, byte {start}: expected a JSON object, got {type(record).__name__}")
        return record


def table(path: Path) -> tuple[list[Record], str]:
    """All records of a .parquet or .jsonl file, and its SHA-256."""
    if path.suffix == ".jsonl":
        lines = Lines(path)
        return lines.all(), lines.sha256
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise EvalError(f"{path} needs the package pyarrow: pip install 'latent-santa[helmet]'") from error
    return parquet.read_table(path).to_pylist(), hashlib.sha256(path.read_bytes()).hexdigest()
