"""LongBench v2 (Table 3): its questions and its prompt from files that the user has, long texts cut in the middle.

None of the benchmark's text is part of this package. Its questions are `data.json` of the hub's THUDM/LongBench-v2, its
prompt is `prompts/0shot.txt` of the repository THUDM/LongBench.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latent_santa.eval.errors import EvalError
from latent_santa.eval.sources.samples import Sample, make_sample

from . import jsonl
from .request import Loaded, Request, choose

if TYPE_CHECKING:
    from latent_santa.eval.run.render import Renderer

DATA, TEMPLATE = "data.json", Path("prompts") / "0shot.txt"
FIELDS = {
    "$DOC$": "context",
    "$Q$": "question",
    "$C_A$": "choice_A",
    "$C_B$": "choice_B",
    "$C_C$": "choice_C",
    "$C_D$": "choice_D",
}
# Asks for what the paper's own sentence asks for (Appendix C.3), in other words.
SUFFIX = (
    "Think it over in at most three short sentences. One option is right, and only one. Close with a line of this "
    "form: 'Final Answer: [X]', in which X is A, B, C or D."
)
ATTEMPTS = 8
ANSWERS = (
    "Table 3 implies four answers per prompt (its scores are multiples of 1/2012, its interval is that of 4 x 503)"
)


def read(path: Path) -> tuple[list[dict[str, Any]], str]:
    """The records of `data.json` and the file's SHA-256. Raises EvalError naming what is wrong."""
    file = path / DATA if path.is_dir() else path
    if not file.is_file():
        raise EvalError(
            f"--data {path}: no {DATA} there; download it from huggingface.co/datasets/THUDM/LongBench-v2, and give "
            "the file or its folder"
        )
    content = jsonl.text(file)
    try:
        records = json.loads(content)
    except ValueError as error:
        raise EvalError(f"{file} is not JSON ({error})") from error
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records) or not records:
        raise EvalError(f"{file}: expected a list of questions, each an object")
    for number, record in enumerate(records):
        if missing := [name for name in FIELDS.values() if not isinstance(record.get(name), str)]:
            raise EvalError(f"{file}: record {number} has no text {', '.join(missing)}")
        if record.get("answer") not in ("A", "B", "C", "D"):
            raise EvalError(f"{file}: record {number} has the answer {record.get('answer')!r}, not A, B, C or D")
    return records, hashlib.sha256(content.encode()).hexdigest()


def read_template(template: Path | None, data: Path) -> str:
    """The prompt's template: the file that was given, or `prompts/0shot.txt` beside the data. Raises EvalError."""
    file = template or (data if data.is_dir() else data.parent) / TEMPLATE
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvalError(
            f"the prompt of LongBench v2 is not part of this package, and {file} cannot be read; give --template FILE: "
            f"{TEMPLATE} of github.com/THUDM/LongBench, or a text of your own with {', '.join(FIELDS)}"
        ) from error
    if missing := [name for name in FIELDS if name not in text]:
        raise EvalError(f"--template {file} lacks {', '.join(missing)}, where the question's parts go")
    return text


def fill(template: str, record: dict[str, Any]) -> str:
    """The template with a record's parts in their places."""
    return re.sub("|".join(map(re.escape, FIELDS)), lambda found: record[FIELDS[found[0]]].strip(), template)


def cut(text: str, renderer: Renderer, budget: int) -> str:
    """The text, or its first and last tokens, so many of each that the rendered prompt has at most `budget` tokens.

    Half of the tokens come from either end, as in the repository; the cut text may be tokenised otherwise than its
    parts were, so it is cut again by what it has too much. Raises EvalError if that does not end.
    """
    excess = renderer.count(text, "") - budget
    if excess <= 0:
        return text
    ids = renderer.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    kept = len(ids)
    for _ in range(ATTEMPTS):
        kept -= excess
        half = kept // 2
        if half < 1:
            break
        shorter = renderer.tokenizer.decode(ids[:half] + ids[-half:], skip_special_tokens=True)
        excess = renderer.count(shorter, "") - budget
        if excess <= 0:
            return shorter
    raise EvalError(f"--length leaves {budget} tokens for a prompt, which a question of LongBench v2 cannot be cut to")


def load(request: Request, renderer: Renderer, advance: Callable[[str], None]) -> Loaded:
    """The request's questions, at most n of them. Raises EvalError."""
    path, more = Path(request.data.partition(":")[2]), request.more
    template = read_template(Path(more["template"]) if more["template"] else None, path)
    suffix = jsonl.text(Path(more["suffix"])) if more["suffix"] else SUFFIX
    records, digest = read(path)
    (task,) = request.tasks
    samples: list[Sample] = []
    shortened = 0
    for number in choose(len(records), min(request.n, len(records)), task, request.seed, request.select):
        whole = f"{fill(template, records[number])}\n\n{suffix.strip()}"
        text = cut(whole, renderer, request.length - more["max_new_tokens"])
        shortened += text != whole
        samples.append(
            make_sample(
                task,
                number,
                text,
                [records[number]["answer"]],
                metric="letter",
                max_new_tokens=more["max_new_tokens"],
                source="longbench",
            )
        )
        advance(task)
    origin = {
        "data": "longbench",
        "files_sha256": {task: digest},
        "template_sha256": hashlib.sha256(template.encode()).hexdigest(),
        "suffix": suffix.strip(),
        "shortened": shortened,
    }
    return Loaded(samples, origin, [f"{ANSWERS}; this run gives one, greedily"])
