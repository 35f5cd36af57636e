"""Long generations: how much of the cache they read, and whether the model still finds what they wrote.

A prompt is cut. Its beginning is prefilled and grouped; the rest is given token by token, as if the model had written
it, each token a decoding call of its own under the setting. So the rows come from sampled attention, and most of what
is asked for lies among them. What follows is the model's own greedy answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from latent_santa.config import SantaConfig
from latent_santa.eval.run.conditions import label
from latent_santa.eval.run.generation import sequence_key
from latent_santa.eval.run.models import ModelSpec
from latent_santa.eval.run.progress import Progress

from .folder import Folder
from .intervals import over_prompts, shown
from .pictures import new_figure, png
from .work import Results, Table, patched

if TYPE_CHECKING:
    from latent_santa.patches import SantaHandle

    from .prompts import DiagnosticPrompt

STRETCH = 16  # calls whose reads are kept as one number
DENSE = "dense"
HEADER = ("Setting", "regroup after", "KV (%)", "last (%)", "exact", "score", "minus dense")
NOTES = (
    "KV: rows read of the rows that dense decoding reads, by all calls from the cut on, Equation 13 (GQA) or 14 (MLA), "
    "routing included; last: by the last calls before the answer; logical access, not time.",
    "Exact: generated rows in no team, the most that were seen after every 16th call.",
    "Score: the task's own where it has one, else the share of dense decoding's answer that is given again; in "
    "percent, with 95 % intervals over prompts. Minus dense: on the same prompts, in points.",
)


def measure(
    diagnostic: Generation,
    folder: Folder,
    spec: ModelSpec,
    tokenizer: Any,
    base: SantaConfig,
    prompts: Sequence[DiagnosticPrompt],
    most_new_tokens: int,
    console: Console,
    batch: int,
) -> None:
    """Measure what the folder does not hold yet, ``batch`` prompts at a time."""
    prompts = [replace(one, most_new_tokens=min(one.most_new_tokens, most_new_tokens)) for one in prompts]
    done = folder.results()
    longest = max(len(prompt.ids) for prompt in prompts)
    jobs = []
    for key in diagnostic.keys:
        left = [prompt for prompt in prompts if (prompt.name, key) not in done]
        jobs += [(key, left[start : start + batch]) for start in range(0, len(left), batch)]
    if not jobs:
        return
    with patched(spec, tokenizer, base) as santa, Progress(console) as bar, torch.inference_mode():
        bar.stage(diagnostic.name, len(jobs), 0)
        for key, some in jobs:
            for prompt, found in zip(some, diagnostic.measure(santa, some, key, longest), strict=True):
                score = None if prompt.scored is None else prompt.scored(found["answer"])
                folder.append({"prompt": prompt.name, "key": key, "task": prompt.task, "score": score, **found})
            bar.step(f"{len(some)} prompts, {key}")
        bar.end_stage()


class Generation:
    """The diagnostic: dense decoding of the whole prompt, and a key per setting and ``regroup_after``.

    Args:
        conditions: the settings.
        regroup: values of ``regroup_after`` that each is measured under.
        first: tokens that are prefilled.
    """

    name = "generation"
    title = "Long generations"
    notes = NOTES

    def __init__(self, conditions: Sequence[SantaConfig], regroup: Sequence[Any], first: int) -> None:
        settings = [one.with_overrides(regroup_after=after) for one in conditions for after in regroup]
        self._conditions = {f"{label(one)} regroup {one.regroup_after}": one for one in settings}
        self._first = first
        self.least_rows = first + 1
        self.keys = [DENSE, *self._conditions]

    def measure(
        self, santa: SantaHandle, prompts: Sequence[DiagnosticPrompt], key: str, longest: int
    ) -> list[dict[str, Any]]:
        """Each prompt's answer, and for a setting what every ``STRETCH`` calls read; the prompts go in one batch.

        They are padded to ``longest`` tokens, the most of any prompt of the run, so that the cut does not depend on the
        batch that a prompt is in.
        """
        device = santa.model.get_input_embeddings().weight.device
        ids = torch.tensor([[0] * (longest - len(prompt.ids)) + prompt.ids for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(prompt.ids)) + [1] * len(prompt.ids) for prompt in prompts])
        # dense decoding of the rows would compute what one prefill computes
        first = longest if key == DENSE else self._first
        santa.configure(method="dense") if key == DENSE else santa.configure(self._conditions[key])
        santa.sequence_keys = [sequence_key(santa.config.seed, prompt.name) for prompt in prompts]
        prefilled = santa.prefill(ids[:, :first], None if mask.all() else mask[:, :first].to(device))
        cache, fed = prefilled.held_back(), ids[:, first - 1 : first]
        answers, read, exact = [], [], 0
        santa.reset()
        for rows in range(first, longest + max(prompt.most_new_tokens for prompt in prompts)):
            logits = prefilled.step(fed, cache, rows)
            if rows < longest:
                fed = ids[:, rows : rows + 1]
            else:
                fed = logits.argmax(-1, keepdim=True)
                answers.append(fed[:, 0].tolist())
            if rows < longest and ((rows - first) % STRETCH == STRETCH - 1 or rows == longest - 1):
                read.append([[one["numerator"], one["denominator"]] for one in santa.access.sequence_totals()])
                exact = max(exact, *(layer.open_rows for layer in cache.layers))
                santa.reset()
        return [
            {
                "answer": [answer[place] for answer in answers[: prompt.most_new_tokens]],
                "read": [stretch[place] for stretch in read],
                "exact": exact,
            }
            for place, prompt in enumerate(prompts)
        ]

    def summary(self, results: Results, settings: dict[str, Any]) -> dict[str, Any]:
        """Every setting's reads and scores."""
        lines = [self._line(key, tasks, results[DENSE], settings["seed"]) for key, tasks in results.items()]
        return {"first": self._first, "stretch": STRETCH, "lines": lines}

    def _line(
        self, key: str, tasks: dict[str, list[dict[str, Any]]], dense: dict[str, list[dict[str, Any]]], seed: int
    ) -> dict[str, Any]:
        scores = {
            task: [_score(one, same) for one, same in zip(own, dense[task], strict=True)] for task, own in tasks.items()
        }
        differences = {
            task: [a - _score(same, same) for a, same in zip(scores[task], dense[task], strict=True)] for task in tasks
        }
        line: dict[str, Any] = {"name": key, "score": over_prompts(scores, seed)}
        if key == DENSE:
            return line
        config, prompts = self._conditions[key], [one for own in tasks.values() for one in own]
        shortest = min(len(one["read"]) for one in prompts)
        curve = [[sum(one["read"][i][side] for one in prompts) for side in (0, 1)] for i in range(shortest)]
        return line | {
            "setting": label(config),
            "regroup_after": config.regroup_after,
            "config": config.used(),
            "kv": 100 * sum(read for read, _ in curve) / sum(whole for _, whole in curve),
            "curve": [100 * read / whole for read, whole in curve],
            "exact": max(one["exact"] for one in prompts),
            "minus_dense": over_prompts(differences, seed),
        }

    def tables(self, summary: dict[str, Any]) -> dict[str, Table]:
        """Reads and scores."""
        return {"": (HEADER, list(map(cells, summary["lines"])))}

    def pictures(self, summary: dict[str, Any]) -> dict[str, bytes]:
        """Rows read against rows held."""
        figure = new_figure(8.5, 4.5)
        axes = figure.add_subplot(xlabel="rows held", ylabel="rows read by a call (% of dense decoding)")
        for line in summary["lines"]:
            if "curve" in line:
                at = [summary["first"] + STRETCH * (place + 0.5) for place in range(len(line["curve"]))]
                axes.plot(at, line["curve"], label=line["name"], linewidth=1)
        axes.set_ylim(0)
        axes.set_title(
            f"{summary['settings']['model']}: {summary['first']} tokens prefilled, then generated", fontsize=9
        )
        axes.grid(alpha=0.3)
        figure.legend(loc="outside lower center", fontsize=7)
        return {".png": png(figure)}


def _score(result: dict[str, Any], dense: dict[str, Any]) -> float:
    """The task's score, or the share of dense decoding's tokens that are given again."""
    if result.get("score") is not None:
        return float(result["score"])
    return fmean(float(a == b) for a, b in zip(result["answer"], dense["answer"], strict=True))


def cells(line: dict[str, Any]) -> list[str]:
    """A setting's texts under `HEADER`."""
    score = shown(line["score"], 1, 100)
    if "curve" not in line:
        return [line["name"], "-", "100.0", "100.0", "-", score, "-"]
    numbers = (f"{line['kv']:.1f}", f"{line['curve'][-1]:.1f}", str(line["exact"]))
    after = "never" if line["regroup_after"] == 0 else str(line["regroup_after"])
    return [line["setting"], after, *numbers, score, shown(line["minus_dense"], 1, 100)]
