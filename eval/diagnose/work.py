"""The loop that all diagnostics have in common: every prompt is prefilled and decoded densely once, then measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from rich.console import Console

import latent_santa
from latent_santa.config import SantaConfig
from latent_santa.eval.errors import EvalError
from latent_santa.eval.report.tables import markdown_table
from latent_santa.eval.run.generation import make_greedy, sequence_key
from latent_santa.eval.run.models import ModelSpec, load
from latent_santa.eval.run.progress import Progress

from .folder import Folder
from .prompts import DiagnosticPrompt

if TYPE_CHECKING:
    from latent_santa.patches import SantaHandle
    from latent_santa.patches.recorded import Recorded


# header and lines, all texts
Table = tuple[Sequence[str], Sequence[Sequence[str]]]
# by key, then by task: a result per prompt
Results = dict[str, dict[str, list[dict[str, Any]]]]


class Diagnostic(Protocol):
    """One kind of measurement on recorded prompts.

    Attributes:
        name: of its files.
        title: of its page.
        notes: how to read it.
        keys: what is measured on each prompt, one result each; in the order that shares most work.
        least_rows: fewest rows of a prompt that it can look at.
    """

    name: str
    title: str
    notes: Sequence[str]
    keys: Sequence[str]
    least_rows: int

    def measure(self, santa: SantaHandle, recorded: Recorded, key: str) -> dict[str, Any]:
        """One result, as plain numbers."""

    def summary(self, results: Results, settings: dict[str, Any]) -> dict[str, Any]:
        """What tables and pictures show, ready for JSON."""

    def tables(self, summary: dict[str, Any]) -> dict[str, Table]:
        """The tables by heading; the first one, which needs none, is also shown on the screen."""

    def pictures(self, summary: dict[str, Any]) -> dict[str, bytes]:
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
    with patched(spec, tokenizer, base) as santa, Progress(console) as bar, torch.inference_mode():
        device = santa.model.get_input_embeddings().weight.device
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


def patched(spec: ModelSpec, tokenizer: Any, base: SantaConfig) -> SantaHandle:
    """The model, loaded, greedy and patched. Raises EvalError for one that cannot be."""
    model = load(spec, tokenizer).model
    make_greedy(model, tokenizer)
    try:
        return latent_santa.patch(model, base)
    except NotImplementedError as error:
        raise EvalError(f"--model {spec.name}: {error}") from error


def summarise(diagnostic: Diagnostic, folder: Folder, prompts: Sequence[DiagnosticPrompt]) -> dict[str, Any]:
    """The summary of these prompts' results, with the run's settings; all of them are in the folder."""
    done, results = folder.results(), Results()
    for key in diagnostic.keys:
        for prompt in prompts:
            results.setdefault(key, {}).setdefault(prompt.task, []).append(done[prompt.name, key])
    counts = {task: len(own) for task, own in next(iter(results.values())).items()}
    manifest = folder.manifest
    return {**manifest, "prompts_per_task": counts, **diagnostic.summary(results, manifest["settings"])}


def markdown(diagnostic: Diagnostic, summary: dict[str, Any]) -> str:
    """The page: prompts, tables and notes."""
    settings = summary["settings"]
    prompts = ", ".join(f"{count} of {task}" for task, count in summary["prompts_per_task"].items())
    length = f" at {settings['length']} tokens" if "length" in settings else ""
    parts = [f"# {diagnostic.title}: {settings['model']}\n\nPrompts: {prompts}; {settings['data']}{length}.\n"]
    for heading, (header, lines) in diagnostic.tables(summary).items():
        parts.append((f"\n## {heading}\n" if heading else "") + "\n" + markdown_table(header, lines))
    return "".join([*parts, "\n## Notes\n\n", *(f"- {note}\n" for note in diagnostic.notes)])
