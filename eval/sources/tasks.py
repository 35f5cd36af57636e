"""Names of the tasks, their metric and their cap, for every family of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from latent_santa.eval.errors import EvalError
from latent_santa.eval.sources.samples import Metric

Family = Literal["official", "builtin", "tiny", "helmet", "longbench"]


@dataclass(frozen=True)
class Task:
    """What the benchmark fixes for one task: its metric (`scoring.score`) and its cap on new tokens."""

    metric: Metric
    max_new_tokens: int


_NEEDLES = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
)

OFFICIAL: dict[str, Task] = {name: Task("all", 128) for name in _NEEDLES} | {
    "vt": Task("all", 30),
    "cwe": Task("all", 120),
    "fwe": Task("all", 50),
    "qa_1": Task("any", 32),
    "qa_2": Task("any", 32),
}

# The builtin source has synthetic fact documents in the place of SQuAD and HotpotQA, and says so by their names.
BUILTIN: dict[str, Task] = {name: task for name, task in OFFICIAL.items() if not name.startswith("qa_")} | {
    "facts_1": OFFICIAL["qa_1"],
    "facts_2": OFFICIAL["qa_2"],
}

# HELMET's recall task in this project's own wording; it is none of RULER's, so "all" leaves it out.
BUILTIN_MORE = {"json_kv": Task("substring", 100)}

# The 13 tasks of HELMET that the paper ran, in the order of its Tables 9 and 10.
HELMET: dict[str, Task] = {
    "nq": Task("substring", 20),
    "triviaqa": Task("substring", 20),
    "popqa": Task("substring", 20),
    "hotpotqa": Task("substring", 20),
    "msmarco": Task("ndcg_10", 200),
    "trec_coarse": Task("exact", 20),
    "trec_fine": Task("exact", 20),
    "nlu": Task("exact", 20),
    "banking77": Task("exact", 20),
    "clinc150": Task("exact", 20),
    "infbench_qa": Task("rouge_l", 10),
    "infbench_mc": Task("option", 10),
    "json_kv": Task("substring", 100),
}
RAG = ("nq", "triviaqa", "popqa", "hotpotqa")
LONGBENCH = ("longbench_v2",)

TINY = ("single", "multikey", "multivalue", "multiquery", "vt", "fwe", "facts")
TINY_HARD = tuple(f"{name}_hard" for name in TINY)

SINGLE_NEEDLES = frozenset({"niah_single_1", "niah_single_2", "niah_single_3", "single"})

_NAMES: dict[Family, tuple[str, ...]] = {
    "official": tuple(OFFICIAL),
    "builtin": tuple(BUILTIN),
    "tiny": TINY,
    "helmet": tuple(HELMET),
    "longbench": LONGBENCH,
}
_MORE: dict[Family, tuple[str, ...]] = {"builtin": tuple(BUILTIN_MORE), "tiny": TINY_HARD}

_ALIASES: dict[Family, dict[str, str]] = {
    "builtin": {"qa_1": "facts_1", "qa_2": "facts_2"},
    "tiny": {
        "niah_single_1": "single",
        "niah_multikey_1": "multikey",
        "niah_multivalue": "multivalue",
        "niah_multiquery": "multiquery",
        "qa_1": "facts",
    },
}

_MLA3: dict[str, tuple[str, ...]] = {"mla3": ("niah_multivalue", "fwe", "qa_1")}
_GROUPS: dict[Family, dict[str, tuple[str, ...]]] = {
    "official": _MLA3,
    "builtin": _MLA3,
    "tiny": _MLA3 | {"hard": TINY_HARD},
    "helmet": {"rag": RAG, "icl": ("trec_coarse", "trec_fine", "nlu", "banking77", "clinc150")},
}


def resolve_tasks(spec: str, family: Family) -> tuple[str, ...]:
    """Task names for `all`, a group of the family or a comma-separated list; an official name stands for its analogue.

    The tiny model has harder variants as well, `hard` for all of them; `all` is the plain ones.
    Raises EvalError for an unknown, empty or repeated name, listing the names of the family.
    """
    groups = _GROUPS.get(family, {}) | {"all": _NAMES[family]}
    known = _NAMES[family] + _MORE.get(family, ())
    wanted: list[str] = []
    for word in (part.strip() for part in spec.split(",")):
        wanted += groups.get(word, (word,))
    names = tuple(_ALIASES.get(family, {}).get(name, name) for name in wanted)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise EvalError(
            f"unknown task {', '.join(map(repr, unknown))} for {family} prompts; "
            f"choose from {', '.join(known)}, or the groups {', '.join(groups)}"
        )
    if len(set(names)) != len(names):
        raise EvalError(f"a task is named twice in {spec!r}")
    return names


def mean_label(tasks: tuple[str, ...]) -> str:
    """What an equal-weight mean over `tasks` may be called; only all 13 official tasks make "all 13 tasks"."""
    if set(tasks) == set(HELMET):
        return "all 13 HELMET tasks of the paper"
    if set(tasks) == set(RAG):
        return "HELMET RAG, mean of 4 tasks"
    if set(tasks) == set(OFFICIAL):
        return "all 13 tasks"
    if set(tasks) == set(BUILTIN):
        return "all 13 builtin tasks"
    return tasks[0] if len(tasks) == 1 else f"mean of {len(tasks)} tasks"
