"""The prompts of a diagnostic: builtin, official or the user's own, known to fit before a model is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latent_santa.eval.errors import EvalError
from latent_santa.eval.run import scoring, sizes
from latent_santa.eval.run.models import ModelSpec
from latent_santa.eval.run.render import Renderer
from latent_santa.eval.run.store import Prompt
from latent_santa.eval.sources import Request, load_samples
from latent_santa.eval.sources.samples import Sample
from latent_santa.patches.limits import context_limit

OWN = "own prompts"


@dataclass(frozen=True)
class DiagnosticPrompt:
    """One prompt: its name, such as "fwe/000001", its task (or `OWN`), its token ids and its cap on new tokens.

    ``scored`` gives an answer's token ids their score in [0, 1]; None where nothing is known to be right.
    """

    name: str
    task: str
    ids: list[int]
    most_new_tokens: int
    scored: Callable[[list[int]], float] | None = field(default=None, compare=False)

    @property
    def digest(self) -> str:
        """Hash of the token ids."""
        return hashlib.sha256(json.dumps(self.ids).encode()).hexdigest()


def from_files(files: Sequence[tuple[Path, str]], renderer: Renderer, calls: int) -> list[DiagnosticPrompt]:
    """Prompts of the user's own, each file's text as the user's turn."""
    names = [path.name for path, _ in files]
    if len(set(names)) != len(names):
        raise EvalError(f"--prompt-file: two files have one name ({', '.join(sorted(names))}): rename one")
    return [DiagnosticPrompt(path.name, OWN, renderer.encode(text, ""), calls) for path, text in files]


def from_source(request: Request, renderer: Renderer, tiny: bool, limit: int | None) -> list[DiagnosticPrompt]:
    """Prompts of tasks. Raises EvalError for those that do not fit."""
    found = []
    for sample in load_samples(request, renderer, tiny).samples:
        prompt = renderer.prompt(sample, limit)  # refuses what does not fit
        ids = renderer.encode(sample.input, sample.answer_prefix)
        scored = _scorer(sample, prompt, renderer)
        found.append(DiagnosticPrompt(sample.id, sample.task, ids, sample.max_new_tokens, scored))
    return found


def _scorer(sample: Sample, prompt: Prompt, renderer: Renderer) -> Callable[[list[int]], float]:
    opened = scoring.opening(renderer.frozen(prompt), sample.answer_prefix)

    def scored(answer: list[int]) -> float:
        text = renderer.tokenizer.decode(answer, skip_special_tokens=True)
        return scoring.score(text, sample.references, sample.metric, opened)

    return scored


def check_room(prompts: Sequence[DiagnosticPrompt], calls: int, least_rows: int, config: Any, spec: ModelSpec) -> None:
    """See that every prompt has enough rows, and with what is generated behind it fits the model and the memory.

    A recording keeps a copy of the cache beside the prefill's. Raises EvalError.
    """
    for prompt in prompts:
        if len(prompt.ids) < least_rows:
            raise EvalError(f"{prompt.name} has {len(prompt.ids):,} tokens, and at least {least_rows:,} are needed")
        asked = f"{prompt.name} with {len(prompt.ids):,} tokens and --calls {calls}"
        rows = len(prompt.ids) + calls
        sizes.check_positions(context_limit(config), rows, asked, spec.name)
        sizes.check_cache(config, 2 * rows, spec, f"{asked}, kept twice")
