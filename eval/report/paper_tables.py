"""The paper's value for a setting, and which conditions of a table a run meets, misses or cannot know.

paper_tables.csv holds the numbers, copied from the paper's text: one cell per line, with KV access, score and
half-width in percent. Its methods are dense (SDPA), santa, kmeans and contiguous (SANTA++), and centroid4 and
centroid16 (B = 4 and 16); its column "mean" is the equal-weight mean over the table's tasks. Table 6 has k-means
parents.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from latent_santa.config import SantaConfig
from latent_santa.eval.run.conditions import from_manifest, swept
from latent_santa.eval.sources.tasks import HELMET, LONGBENCH, OFFICIAL, RAG

MEAN = "mean"
DEEPSEEK, QWEN = "DeepSeek-V2-Lite-Chat", "Qwen2.5-7B-Instruct"
MLA_TASKS = ("niah_multivalue", "fwe", "qa_1")


@dataclass(frozen=True)
class Table:
    """One of the paper's tables of scores: its model, length, tasks, prompts per task, budgets and benchmark."""

    number: str
    model: str
    length: int
    tasks: tuple[str, ...]
    n: int
    budgets: tuple[int, ...]
    benchmark: str = "RULER"


@dataclass(frozen=True)
class Value:
    """A cell: KV access, score and half-width in percent, and the table that it stands in."""

    access: float
    score: float
    half: float
    table: str


_ALL = tuple(OFFICIAL)
_TO_4096 = (128, 256, 512, 1024, 2048, 4096)
_TO_512, _TO_1024, _TO_2048 = _TO_4096[:3], _TO_4096[:4], _TO_4096[:5]
SOURCES = {"RULER": ("hub", "jsonl"), "HELMET": ("helmet",), "LongBench v2": ("longbench",)}
TABLES = (
    Table("4", QWEN, 32768, _ALL, 500, _TO_4096),
    Table("11", QWEN, 8192, _ALL, 500, _TO_1024),
    Table("6", QWEN, 8192, _ALL, 100, _TO_512),
    Table("12", QWEN, 32768, _ALL, 500, _TO_4096),
    Table("2", QWEN, 32768, RAG, 500, _TO_2048, "HELMET"),
    Table("8", QWEN, 8192, RAG, 500, _TO_2048, "HELMET"),
    Table("9", QWEN, 8192, tuple(HELMET), 500, _TO_512, "HELMET"),
    Table("10", QWEN, 32768, tuple(HELMET), 500, _TO_512, "HELMET"),
    Table("3", QWEN, 32768, LONGBENCH, 503, _TO_1024, "LongBench v2"),
    Table("15-18", DEEPSEEK, 8192, MLA_TASKS, 50, _TO_1024),
)


@cache
def numbers(table: Table) -> dict[tuple[str, int | None, str], Value]:
    """(method key, S, column) to the table's value."""
    with (Path(__file__).parent / "paper_tables.csv").open(newline="", encoding="utf-8") as file:
        return {
            (cell["method"], int(cell["S"]) if cell["S"] else None, cell["column"]): Value(
                float(cell["access"]), float(cell["score"]), float(cell["half"]), table.number
            )
            for cell in csv.DictReader(file)
            if cell["table"] == table.number
        }


def method_key(condition: SantaConfig) -> str | None:
    """The condition's method in paper_tables.csv; None for settings that the paper did not run."""
    if condition.method in ("dense", "santa"):
        return condition.method
    if condition.method == "centroid":
        return f"centroid{condition.parent_size}" if condition.parents == "kmeans" else None
    names = ("method", "parent_size", "representatives", "estimator", "noise", "routing")
    settings = tuple(getattr(condition, name) for name in names)
    return condition.parents if settings == ("santa++", 16, 4, "per_head", "independent", "one_stage") else None


def same_model(name: str, model: str) -> bool:
    """Whether a model id or path ends in the paper's model."""
    return name.rstrip("/").rpartition("/")[2].lower() == model.lower()


def lookup(settings: dict[str, Any], tasks: tuple[str, ...], condition: SantaConfig, column: str) -> Value | None:
    """The paper's value of a condition in a column (a task, or "mean" over exactly the table's tasks), if it has one.

    Only for official data, the paper's model, its length, noise, routing keys and exact suffix. The number of prompts
    may differ: a smaller run is still the same quantity, with a wider interval.
    """
    key = method_key(condition)
    if key == "santa" and "draws" not in settings:
        return None  # a run from before "santa" drew with replacement
    if key is None:
        return None
    if settings.get("routing_dtype", "model") != "model" or settings.get("noise", "independent") != "independent":
        return None
    if settings.get("regroup_after", 0) != 0 and key in ("kmeans", "contiguous"):
        return None
    for table in TABLES:
        if not same_model(settings["model"], table.model) or settings["length"] != table.length:
            continue
        if settings.get("data") not in SOURCES[table.benchmark]:
            continue
        if table.tasks == (column,):
            column = MEAN
        if column == MEAN and set(tasks) != set(table.tasks):
            continue
        value = numbers(table).get((key, swept(condition)["budget"], column))
        if value is not None:
            return value
    return None


def of_length(tokens: int, length: int) -> bool:
    """Whether prompts of at most so many tokens can be meant for a length: tokenizers differ, but not by half."""
    return 2 * tokens >= length


_NAMES = {"kmeans": "SANTA++ k-means", "contiguous": "SANTA++ contiguous", "santa": "SANTA", "dense": "dense"}


def _names(keys: set[str]) -> str:
    """Methods of a table in words."""
    return ", ".join(sorted(_NAMES.get(key, key.replace("centroid", "centroid B=")) for key in keys)) or "none"


HOLDS, MISSED, UNKNOWN = "holds", "does not hold", "unknown"


@dataclass(frozen=True)
class Check:
    """One condition of a table: what the paper did, what the run did, and whether they agree."""

    what: str
    paper: str
    run: str
    verdict: str


def _kmeans_engine(settings: dict[str, Any]) -> str:
    """The engine that a run's k-means had: "auto" is PyTorch's where the rows are on a GPU."""
    engine = settings.get("kmeans_engine", "auto")
    if engine != "auto":
        return engine
    return "sklearn" if settings.get("device") == "cpu" else "torch"


def _weights(manifest: dict[str, Any] | None) -> tuple[str, bool]:
    """A run's weights in words, and whether they are LLM.int8 as the paper's are, experts included."""
    if manifest is None:
        return "-", False
    settings, loaded = manifest["settings"], manifest.get("loaded")
    if settings.get("quant", "none") == "none":
        return f"{settings.get('dtype', '-')}, not quantised", False
    if loaded is None:
        return f"{settings['quant']}, of a share of the parameters that the run does not tell", False
    share = 100 * loaded["int8_parameters"] / loaded["parameters"]
    whole = loaded["int8_parameters"] == loaded["int8_meant"] > 0
    missed = "" if whole else f", of {100 * loaded['int8_meant'] / loaded['parameters']:.1f} %"
    return f"{settings['quant']}, {share:.1f} % of the parameters{missed}", whole


def checks(table: Table, manifest: dict[str, Any] | None) -> list[Check]:
    """The conditions of a table against a run's manifest, or against nothing (every verdict is then unknown)."""
    settings: dict[str, Any] = dict(manifest["settings"]) if manifest else {}
    origin: dict[str, Any] = manifest["origin"] if manifest else {}
    conditions = from_manifest(manifest, "manifest") if manifest else []
    found: list[Check] = []

    def add(what: str, paper: str, run: Any, agrees: Callable[[], bool]) -> None:
        if not manifest:
            found.append(Check(what, paper, "-", UNKNOWN))
        else:
            found.append(Check(what, paper, str(run), HOLDS if agrees() else MISSED))

    get = settings.get
    latent = table.model == DEEPSEEK
    add("model", table.model, get("model"), lambda: same_model(settings["model"], table.model))
    add("data", table.benchmark, origin.get("data"), lambda: origin["data"] in SOURCES[table.benchmark])
    most = origin.get("most_tokens")
    add(
        "length",
        str(table.length),
        f"{get('length')}" + (f", longest prompt {most}" if most else ""),
        lambda: settings["length"] == table.length and of_length(most or table.length, table.length),
    )
    add("tasks", " ".join(table.tasks), " ".join(get("tasks", ())), lambda: set(table.tasks) <= set(settings["tasks"]))
    add("prompts per task", str(table.n), get("n"), lambda: settings["n"] == table.n)
    wanted, had = {key for key, _, _ in numbers(table)}, {method_key(condition) for condition in conditions}
    add("methods", _names(wanted), _names(wanted & had), lambda: wanted <= had)
    ran = sorted({c.budget for c in conditions if method_key(c) in ("kmeans", "contiguous")})
    add(
        "budgets, with P=16, R=4, per head",
        " ".join(map(str, table.budgets)),
        " ".join(map(str, ran)),
        lambda: set(table.budgets) <= set(ran),
    )
    dense = any(condition.method == "dense" for condition in conditions)
    add(
        "dense baseline", "SDPA, same adapter" if latent else "SDPA", "same adapter" if dense else "none", lambda: dense
    )
    add("noise", "independent for each head", get("noise"), lambda: settings["noise"] == "independent")
    routing = settings.get("routing_dtype", "model")
    add("routing keys", "as in the cache", routing, lambda: routing == "model")
    regrouped = settings.get("regroup_after", 0)
    shown = "none" if regrouped == 0 else f"--regroup-after {regrouped}"
    add("teams of generated rows", "none, an exact suffix", shown, lambda: regrouped == 0)
    first = "the last prompt token again, through sparse attention"
    add("first token", first, get("first_token"), lambda: settings["first_token"] == "replay")
    engine = _kmeans_engine(settings)
    add("k-means engine", "scikit-learn's MiniBatchKMeans", engine, lambda: engine == "sklearn")
    add("k-means seed", "0", get("kmeans_seed"), lambda: settings["kmeans_seed"] == 0)
    exact = any(condition.exact_first or condition.exact_last for condition in conditions)
    add("rows in no team", "none of the prompt", "some" if exact else "none", lambda: not exact)
    seeds = f"{get('seed', '-')}, {get('data_seed', '-')}"
    weights, quantised = _weights(manifest)
    if latent:
        add("weights", "LLM.int8 except kv_b_proj and lm_head", weights, lambda: quantised)
        add("precision of the cache", "bfloat16", get("dtype"), lambda: settings["dtype"] == "bfloat16")
        math = get("math_sdpa", True)
        add("SDPA's math backend", "disabled", "enabled" if math else "disabled", lambda: not math)
        add("seeds: sampling, data", "0, 42", seeds, lambda: seeds == "0, 42")
        caps = ", ".join(str(OFFICIAL[task].max_new_tokens) for task in table.tasks)
        add("decoding", "greedy, at most 128, 50, 32 tokens", f"greedy, {caps}", lambda: caps == "128, 50, 32")
    else:
        found.append(Check("weights", "not stated", weights, UNKNOWN))
        found.append(Check("seeds: sampling, data", "not stated", seeds, UNKNOWN))
    found.append(Check("answer prefix", "not stated", str(get("answer_prefix", "-")), UNKNOWN))
    found.append(
        Check(
            "which prompts were selected",
            "seed 42, rule not stated" if latent else "not stated",
            str(get("select", "-")),
            UNKNOWN,
        )
    )
    found.append(Check(f"{table.benchmark} commit", "not stated", str(origin.get("revision", "-")), UNKNOWN))
    if table.benchmark == "RULER":
        found.append(Check("tokenizer that sized the data", "not stated", "-", UNKNOWN))
    if table.benchmark == "HELMET":
        found.append(Check("chat template", "not stated", str(get("chat", "-")), UNKNOWN))
        found.append(Check("examples before the question", "not stated", str(get("shots", "-")), UNKNOWN))
    if table.tasks == tuple(HELMET):
        add("± of the mean", "mean of the tasks' ± (by its numbers)", "bootstrap, tasks as strata", lambda: False)
    if table.benchmark == "LongBench v2":
        own = "this project's" if not get("suffix") else f"of {get('suffix')}"
        add("words behind the prompt", "Appendix C.3", own, lambda: bool(settings.get("suffix")))
        template = bool(settings.get("chat_template_sha256"))
        add("opening", "Qwen's preamble", "chat template" if template else "none", lambda: template)
        add("answers per prompt", "4, by the scores' steps (1/2012) and the interval", "1, greedy", lambda: False)
    return found
