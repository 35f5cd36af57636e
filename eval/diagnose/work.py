"""The loop that all diagnostics have in common: every prompt is prefilled and decoded densely once, then measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from rich.console import Console

import latent_santa
from latent_santa.config import SantaConfig
from latent_santa.eval.errors import EvalError
from latent_santa.eval.run.generation import make_greedy, sequence_key
from latent_santa.eval.run.models import ModelSpec, load
from latent_santa.eval.run.progress import Progress

from .folder import Folder
from .prompts import DiagnosticPrompt

if TYPE_CHECKING:
    from latent_santa.patches import SantaHandle
    from latent_santa.patches.recorded import Recorded


class Diagnostic(Protocol):
    """One kind of measurement on recorded prompts.

    Attributes:
        name: of its files.
        keys: what is measured on each prompt, one result each; in the order that shares most work.
    """

    name: str
    keys: Sequence[str]

    def measure(self, santa: SantaHandle, recorded: Recorded, key: str) -> dict[str, Any]:
        """One result, as plain numbers."""

    def summary(self, results: dict[str, dict[str, list[dict[str, Any]]]], manifest: dict[str, Any]) -> dict[str, Any]:
        """What the tables and pictures show, ready for JSON; ``results`` by key and task, a list of prompts each."""

    def markdown(self, summary: dict[str, Any]) -> str:
        """The tables as Markdown."""

    def pictures(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Pictures, by the end of their file names, such as ".png"."""


def measure(
    diagnostic: Diagnostic,
    folder: Folder,
    spec: ModelSpec,
    tokenizer: Any,
    base: SantaConfig,
    prompts: Sequence[DiagnosticPrompt],
    calls: int,
    console: Console,
) -> None:
    """Measure what the folder does not hold yet, prompt by prompt.

    calls: most dense calls that are recorded behind a prompt; its own cap on new tokens may be less.
    """
    done = folder.results()
    waiting = {p.name: [key for key in diagnostic.keys if (p.name, key) not in done] for p in prompts}
    total = len(prompts) * len(diagnostic.keys)
    left = sum(map(len, waiting.values()))
    if not left:
        return
    model = load(spec, tokenizer).model
    make_greedy(model, tokenizer)
    device = model.get_input_embeddings().weight.device
    try:
        handle = latent_santa.patch(model, base)
    except NotImplementedError as error:
        raise EvalError(f"--model {spec.name}: {error}") from error
    with handle as santa, Progress(console) as bar, torch.inference_mode():
        bar.stage(diagnostic.name, total, total - left)
        for prompt in prompts:
            if not waiting[prompt.name]:
                continue
            santa.sequence_keys = [sequence_key(base.seed, prompt.name)]
            ids = torch.tensor([prompt.ids], device=device)
            recorded = santa.prefill(ids).record(min(calls, prompt.most_new_tokens))
            tokens = recorded.tokens[0].tolist()
            for key in diagnostic.keys:
                earlier = done.get((prompt.name, key))
                if earlier is not None and earlier["tokens"] == tokens:
                    continue  # another machine may round to other tokens: their results do not stand side by side
                found = {"prompt": prompt.name, "key": key, "task": prompt.task, "tokens": tokens}
                folder.append(found | diagnostic.measure(santa, recorded, key))
                bar.step(f"{prompt.name} {key}")
        bar.end_stage()


def gathered(
    diagnostic: Diagnostic, folder: Folder, prompts: Sequence[DiagnosticPrompt]
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The results of these prompts: by key, then by task, prompts in order."""
    done = folder.results()
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for key in diagnostic.keys:
        for prompt in prompts:
            found.setdefault(key, {}).setdefault(prompt.task, []).append(done[prompt.name, key])
    return found
