"""Every table and figure of the paper, with the command that makes it here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from latent_santa.eval.report.paper_tables import DEEPSEEK, QWEN, TABLES, Table
from latent_santa.eval.sources.tasks import HELMET, OFFICIAL

MODELS = {QWEN: f"Qwen/{QWEN}", DEEPSEEK: f"deepseek-ai/{DEEPSEEK}"}
# one layer's operator as in Appendix E: layer 14, K = 31, FP16, no CUDA graphs
CAPTURE = (
    f"latent-santa bench capture --model {MODELS[QWEN]} --dtype float16 --length 32768 --layer 14 --out workload.pt"
)
OPERATOR = (
    "latent-santa bench operator --workload workload.pt --budgets 124 --estimators per_head --modes stream "
    "--rounds 20 --observations 1000 --warmup 300 --evict 512 --out runs/operator"
)
PROFILE = "latent-santa bench profile --workload workload.pt --budget 124 --ncu"
NOTES = {"12": "Table 4's run, by task", "3": "you write Appendix C.3's instruction into C3.txt"}


@dataclass(frozen=True)
class Item:
    """A table or figure: its number, what it shows, and the commands that make it (none where nothing is measured)."""

    number: str
    shows: str
    commands: tuple[str, ...]
    note: str = ""


def run_command(table: Table) -> str:
    """The run of a table of scores, under every condition of the paper that an option decides."""
    model = MODELS[table.model]
    centroids, latent = table.number == "6", table.model == DEEPSEEK
    kind = {"RULER": "ruler", "HELMET": "helmet", "LongBench v2": "longbench"}[table.benchmark]
    words = [f"latent-santa {kind} --model {model}"]
    words.append({"ruler": "--data hub", "helmet": "--data HELMET", "longbench": "--data LONGBENCH"}[kind])
    if kind == "longbench":
        words.append("--suffix C3.txt")
    else:
        whole = set(table.tasks) in (set(OFFICIAL), set(HELMET))
        words.append(f"--tasks {'all' if whole else 'mla3' if latent else 'rag'} --n {table.n}")
    words.append(f"--length {table.length} --budgets {','.join(map(str, table.budgets))} --estimators per_head")
    methods = "dense,santa++" if latent else "dense,santa++,centroid" if centroids else "dense,santa,santa++"
    words.append(f"--methods {methods} --parents {'kmeans' if latent or centroids else 'kmeans,contiguous'}")
    if centroids:
        words.append("--centroid-sizes 4,16")
    words.append("--kmeans-engine sklearn --regroup-after 0")
    if latent:
        words.append("--quant int8 --dtype bfloat16 --no-math-sdpa")
    folder = "table4" if table.number == "12" else f"table{table.number}"  # Table 12 is Table 4's run by task
    return " ".join([*words, f"--out runs/{folder} --resume"])


def _diagnose(kind: str, options: str) -> str:
    return f"latent-santa diagnose {kind} --model {MODELS[QWEN]} --data hub {options}"


def items() -> list[Item]:
    """All of them, tables first, each kind in the paper's order."""
    runs = {
        table.number: Item(table.number, _shows(table), (run_command(table),), NOTES.get(table.number, ""))
        for table in TABLES
    }
    rest = [
        Item(
            "1",
            "how far routing is from dense attention: KL in nats, three tasks at 8K",
            (_diagnose("kl", "--length 8192 --tasks cwe,niah_single_1,qa_1 --n 20 --kmeans-engine sklearn"),),
        ),
        Item("5", "latency of one layer's operator beside Flash", (CAPTURE, OPERATOR), "the paper's: RTX 5090 Laptop"),
        Item(
            "7",
            "attention mass in the best windows of 16 tokens, 8K and 32K",
            tuple(
                _diagnose("windows", f"--length {n} --tasks cwe,niah_multivalue --n 10 --out runs/windows-{n}")
                for n in (8192, 32768)
            ),
        ),
        Item("13", "latency of the operator's single launches", (CAPTURE, OPERATOR), "part of Table 5's output"),
        Item("14", "counters of the operator's kernels", (CAPTURE, PROFILE), "without --ncu: what the compiler knows"),
        Item(
            "Figure 1", "the method as a drawing", (), "nothing is measured; latent_santa/naive.py is it in plain loops"
        ),
        Item(
            "Figures 2, 3",
            "a mean key's score against a group's mass",
            (_diagnose("jensen", "--length 8192 --tasks mla3 --n 10 --kmeans-engine sklearn"),),
            "the paper's are constructed logits; beside them this has the prompts' real groups",
        ),
        Item(
            "Figure 4",
            "distance of keys to their group's mean, 13 tasks at 8K",
            (_diagnose("distances", "--length 8192 --tasks all --n 100 --kmeans-engine sklearn"),),
        ),
        Item(
            "Figure 5",
            "parents from keys or from probe queries, four tasks at 8K",
            (
                _diagnose(
                    "probes", "--length 8192 --tasks cwe,niah_multikey_3,qa_1,qa_2 --n 50 --kmeans-engine sklearn"
                )
                + " --budgets 128,256,512",
            ),
        ),
    ]
    found = runs | {item.number: item for item in rest}
    return sorted(found.values(), key=lambda item: (item.number.startswith("F"), _first(item.number)))


def _first(number: str) -> int:
    """The first number of a table or figure: 15 of 15-18."""
    return int(number.removeprefix("Figures").removeprefix("Figure").replace(",", "-").partition("-")[0])


def _shows(table: Table) -> str:
    tasks = "all 13 tasks" if len(table.tasks) == 13 else "RAG" if table.benchmark == "HELMET" else ""
    if table.model == DEEPSEEK:
        tasks = "three tasks on a shared latent cache (MLA)"
    if table.number == "6":
        tasks += ", teams beside mean keys"
    return ", ".join(part for part in (f"{table.benchmark} at {table.length // 1024}K", tasks) if part)


def folded(command: str, width: int = 80, indent: str = "  ") -> str:
    """A command on lines of at most `width` characters, broken so that a shell still takes it whole."""
    lines, line = [], indent
    for part in re.split(r" (?=--)", command):  # an option stays with its value
        if line.strip() and len(line) + 1 + len(part) + 2 > width:
            lines.append(line + " \\")
            line = indent + "  "
        line += part if not line.strip() else f" {part}"
    return "\n".join([*lines, line])
