"""Running frozen prompts through every condition: one result per prompt, failures recorded, nonsense stopped early."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any, Protocol

from latent_santa.config import SantaConfig
from latent_santa.eval.errors import EvalError
from latent_santa.eval.run import scoring
from latent_santa.eval.run.conditions import label, running_order, slug
from latent_santa.eval.run.generation import Answer, Batch, first_line, free_memory
from latent_santa.eval.run.processes import Processes
from latent_santa.eval.run.progress import Progress
from latent_santa.eval.run.render import Renderer, ids_sha256
from latent_santa.eval.run.store import Prompt, Store
from latent_santa.eval.sources.tasks import SINGLE_NEEDLES
from latent_santa.methods import METHODS

FLOOR_AFTER = 5
FAILURES_AT_FIRST = 3


class Generates(Protocol):
    """What the runner needs of a model."""

    def answers(self, condition: SantaConfig, batch: Batch) -> list[Answer]: ...


@dataclass
class Runner:
    """Everything a run needs.

    floor       least dense score in percent on single needles, 0 to go on regardless
    batch_size  most prompts of one task that are generated together
    """

    store: Store
    generator: Generates
    renderer: Renderer
    floor: float
    progress: Progress
    processes: Processes
    batch_size: int = 1

    def run(self, conditions: Sequence[SantaConfig]) -> int:
        """Run what is missing, batch by batch: all conditions answer one batch before the next is prefilled.

        Returns the number of results that failed. Raises EvalError when going on would measure nothing: dense attention
        below the floor, a "sparse" method without a sparse call, or failures from the start.
        """
        prompts = self.processes.own(self.store.prompts())
        tallies = [_Tally(condition, prompts, self.store) for condition in running_order(conditions)]
        self.progress.stage("answers", len(tallies) * len(prompts), sum(len(tally.tried) for tally in tallies))
        dense = [tally for tally in tallies if tally.condition.method == "dense"]
        for tally in dense:
            self._judge(tally)  # a run that was stopped by the floor stops there again
        if self.floor:  # before anything else, so that a wrong template costs little
            self._run(_first_needles(prompts), dense)
        self._run(prompts, tallies)
        self.progress.end_stage()
        return sum(tally.failed.total() for tally in tallies)

    def _run(self, prompts: list[Prompt], tallies: list[_Tally]) -> None:
        for batch in batches(prompts, self.batch_size):
            for tally in tallies:
                missing = [prompt for prompt in batch if prompt.sample.id not in tally.tried]
                for part, results in self._results(tally.condition, missing):
                    self._note(tally, part, results)

    def _note(self, tally: _Tally, batch: list[Prompt], results: list[dict[str, Any]]) -> None:
        """Store results, add them up, and stop where they show that something is wrong."""
        shown = label(tally.condition)
        for result in results if self.processes.writes else ():
            self.store.append(slug(tally.condition), result)
        for prompt, result in zip(batch, results, strict=True):
            tally.add(prompt, result)
            if "error" in result:
                self._say(f"{shown}, {prompt.sample.id}: {result['error']}", "red")
                if tally.failed.total() == FAILURES_AT_FIRST and not tally.scores:
                    raise EvalError(
                        f"{shown}: the first {FAILURES_AT_FIRST} prompts all failed, the last with {result['error']}"
                    )
            elif METHODS[tally.condition.method].sampled and not result["sparse_calls"]:
                raise EvalError(
                    f"{shown}, {result['id']}: no call of this generation was sparse, so it would be dense attention "
                    "under another name; is the model patched, and does it use its cache?"
                )
            self._judge(tally)
            self.progress.step(f"{shown}, {tally.shown(prompt.sample.task)}")

    def _say(self, text: str, style: str) -> None:
        self.progress.console.print(text, style=style, markup=False)

    def _results(
        self, condition: SantaConfig, batch: list[Prompt]
    ) -> Iterator[tuple[list[Prompt], list[dict[str, Any]]]]:
        """Prompts and their results. An exception becomes a result's `error`.

        A batch of several that fails, as one short of memory does, is generated again one by one.
        """
        if not batch:
            return
        results, error = self._generate(condition, batch)
        if error is None:
            yield batch, results
        elif len(batch) == 1:
            yield batch, [self._base(condition, batch[0]) | {"error": error}]
        else:
            names = f"{len(batch)} prompts from {batch[0].sample.id} on"
            self._say(f"{label(condition)}, {names}: {error}; now one by one", "yellow")
            for prompt in batch:
                results, error = self._generate(condition, [prompt])
                yield [prompt], results if error is None else [self._base(condition, prompt) | {"error": error}]

    def _base(self, condition: SantaConfig, prompt: Prompt) -> dict[str, Any]:
        return {
            "id": prompt.sample.id,
            "condition": slug(condition),
            "run": self.store.manifest()["key"],
            "text_sha256": prompt.sample.text_sha256,
        }

    def _ids(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids, from its frozen text. Raises EvalError if they are not those that were frozen."""
        ids = self.renderer.ids(self.renderer.frozen(prompt), prompt.sample.chat)
        if ids_sha256(ids) != prompt.ids_sha256:
            raise EvalError(f"{prompt.sample.id}: the tokenizer makes other ids of this prompt than when it was frozen")
        return ids

    def _generate(self, condition: SantaConfig, batch: list[Prompt]) -> tuple[list[dict[str, Any]], str | None]:
        """Generate and score the prompts of one batch: their results, or none and what went wrong.

        A result's `seconds` are the batch's time divided by `batch`, the number of prompts in it.
        """
        asked = Batch(
            tuple(prompt.sample.id for prompt in batch),
            [self._ids(prompt) for prompt in batch],
            batch[0].sample.max_new_tokens,
            batch[0].sample.stop,
        )
        start, failure = time.perf_counter(), None
        try:
            answers = self.generator.answers(condition, asked)
        except Exception as error:  # out of memory has several types, by device; the rest of the run goes on
            failure = first_line(error)
        if failure is not None and self.processes.together:
            raise EvalError(
                f"{label(condition)}, {batch[0].sample.id}: {failure}. Processes that hold one model together cannot "
                "go on behind a failure: what has an answer is kept, and --resume goes on from there"
            )
        if failure is not None:  # outside of the handler, whose traceback holds the failed call's tensors
            free_memory()
            return [], failure
        seconds = round((time.perf_counter() - start) / len(batch), 3)
        return [
            self._base(condition, prompt)
            | {
                "output": answer.text,
                "score": scoring.score(
                    answer.text,
                    prompt.sample.references,
                    prompt.sample.metric,
                    scoring.opening(self.renderer.frozen(prompt), prompt.sample.answer_prefix),
                ),
                "n_prompt": len(ids),
                "n_new": answer.n_new,
                "hit_cap": answer.hit_cap,
                "sparse_calls": answer.sparse_calls,
                "dense_calls": answer.dense_calls,
                "access": answer.access,
                "batch": len(batch),
                "seconds": seconds,
            }
            for prompt, ids, answer in zip(batch, asked.ids, answers, strict=True)
        ], None

    def _judge(self, tally: _Tally) -> None:
        """Stop where dense attention scores below the floor on the first single needles.

        A task is judged once enough of its prompts have scores, or once all of them were tried.
        """
        if tally.condition.method != "dense":
            return
        for task in SINGLE_NEEDLES & tally.expected.keys():
            scores, outputs = tally.scores.get(task, []), tally.outputs[task]
            complete = len(scores) + tally.failed[task] >= tally.expected[task]
            scores = scores[:FLOOR_AFTER]
            if not scores or (len(scores) < FLOOR_AFTER and not complete):
                continue
            mean = 100 * sum(scores) / len(scores)
            if mean < self.floor:
                shown = "\n".join(f"  {text!r}, expected {wanted!r}" for text, wanted in outputs[:3])
                raise EvalError(
                    f"dense attention scores {mean:.0f} % on the first {len(scores)} prompts of {task}, below the "
                    f"floor of {self.floor:.0f} %. Something is wrong with model, template or prompts, and sparse "
                    f"scores would mean nothing. Its answers:\n{shown}\nUse --floor 0 to go on regardless."
                )


def batches(prompts: Sequence[Prompt], size: int) -> Iterator[list[Prompt]]:
    """At most `size` prompts at a time, each time of one task and one end of answers.

    The tasks take turns, so that a run that is stopped early has answers of each.
    """
    turns = []
    for _, alike in groupby(prompts, lambda p: (p.sample.task, p.sample.max_new_tokens, p.sample.stop)):
        task = list(alike)
        turns.append([task[start : start + size] for start in range(0, len(task), size)])
    for turn in zip_longest(*turns):
        yield from (batch for batch in turn if batch is not None)


def _first_needles(prompts: list[Prompt]) -> list[Prompt]:
    """The prompts that the floor is judged by."""
    taken: Counter[str] = Counter()
    found = []
    for prompt in prompts:
        task = prompt.sample.task
        if task in SINGLE_NEEDLES and taken[task] < FLOOR_AFTER:
            taken[task] += 1
            found.append(prompt)
    return found


class _Tally:
    """Scores, outputs and reads of one condition in this process, with those of before.

    tried  ids of prompts that have a result, or failed in this run
    """

    def __init__(self, condition: SantaConfig, prompts: list[Prompt], store: Store) -> None:
        self.condition = condition
        self.expected = Counter(prompt.sample.task for prompt in prompts)
        self.tried: set[str] = set()
        self.failed: Counter[str] = Counter()
        self.scores: dict[str, list[float]] = defaultdict(list)
        self.outputs: dict[str, list[tuple[str, tuple[str, ...]]]] = defaultdict(list)
        self.read = self.dense = 0
        before = store.results(slug(condition))
        for prompt in prompts:
            result = before.get(prompt.sample.id)
            if result is not None and "error" not in result:
                self.add(prompt, result)

    def add(self, prompt: Prompt, result: dict[str, Any]) -> None:
        task = prompt.sample.task
        self.tried.add(prompt.sample.id)
        if "error" in result:
            self.failed[task] += 1
            return
        self.scores[task].append(result["score"])
        self.outputs[task].append((result["output"], prompt.sample.references))
        self.read += result["access"].get("numerator", 0)
        self.dense += result["access"].get("denominator", 0)

    def shown(self, task: str) -> str:
        """Task, its running score, and the percent of rows read over all tasks so far."""
        scores = self.scores.get(task)
        score = f"{100 * sum(scores) / len(scores):.1f}" if scores else "-"
        rows = f", rows {100 * self.read / self.dense:.1f} %" if self.dense else ""
        return f"{task} score {score}{rows}"
