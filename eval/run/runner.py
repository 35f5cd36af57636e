"""Running frozen prompts through every condition: one result a prompt, failures recorded, nonsense stopped early."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from latent_santa.eval.errors import EvalError
from latent_santa.eval.run import generation, scoring
from latent_santa.eval.run.conditions import Condition, running_order
from latent_santa.eval.run.processes import Processes
from latent_santa.eval.run.progress import Progress
from latent_santa.eval.run.render import Renderer, ids_sha256
from latent_santa.eval.run.store import Prompt, Store
from latent_santa.eval.sources.tasks import SINGLE_NEEDLES

FLOOR_AFTER = 5
FAILURES_AT_FIRST = 3


class Ledger(Protocol):
    """What the runner needs of the access ledger."""

    def reset(self) -> None: ...

    def sequence_totals(self, calls: Sequence[int]) -> list[dict[str, int]]: ...


class Handle(Protocol):
    """What the runner needs of a patched model's handle."""

    sequence_keys: list[int] | None

    def configure(self, **overrides: Any) -> Any: ...

    @property
    def access(self) -> Ledger: ...

    @property
    def sparse_calls(self) -> int: ...

    @property
    def dense_calls(self) -> int: ...


@dataclass
class Runner:
    """Everything a run needs.

    floor       least dense score in percent on single needles, 0 to go on regardless
    batch_size  most prompts of one task that are generated together
    """

    store: Store
    model: Any
    handle: Handle
    renderer: Renderer
    seed: int
    floor: float
    progress: Progress
    processes: Processes
    batch_size: int = 1

    def run(self, conditions: tuple[Condition, ...]) -> int:
        """Run what is missing of every condition, grouping by grouping; returns the number of prompts that failed.

        Raises EvalError when going on would measure nothing: dense attention below the floor, a "sparse" method
        without a sparse call, or failures from the start.
        """
        generation.make_greedy(self.model, self.renderer.tokenizer)
        prompts = self.store.prompts()[self.processes.rank :: self.processes.world]
        failed = 0
        for condition in running_order(conditions):
            failed += self._run_condition(condition, prompts)
        return failed

    def _run_condition(self, condition: Condition, prompts: list[Prompt]) -> int:
        before = self.store.results(condition.slug)
        done = {sample_id: result for sample_id, result in before.items() if "error" not in result}
        own = [prompt for prompt in prompts if prompt.sample.id in done]
        label = condition.name + (f" S={condition.budget}" if condition.budget else "")
        self.progress.stage(label, len(prompts), len(own))
        self.handle.configure(**condition.overrides())
        running = _Running(Counter(prompt.sample.task for prompt in prompts))
        for prompt in own:
            running.add(prompt, done[prompt.sample.id])
        self._judge(condition, running)  # a run that was stopped by the floor stops there again
        failures = 0
        missing = [prompt for prompt in prompts if prompt.sample.id not in done]
        for batch, results in self._answers(condition, label, missing):
            for result in results:
                self.store.append(condition.slug, result)
            for prompt, result in zip(batch, results, strict=True):
                if "error" in result:
                    failures += 1
                    running.failed[prompt.sample.task] += 1
                    self._say(f"{label}, {prompt.sample.id}: {result['error']}", "red")
                    if failures == FAILURES_AT_FIRST and not running.scores:
                        raise EvalError(
                            f"{label}: the first {failures} prompts all failed, the last with {result['error']}"
                        )
                else:
                    running.add(prompt, result)
                    if condition.method != "dense" and not result["sparse_calls"]:
                        raise EvalError(
                            f"{label}, {result['id']}: no call of this generation was sparse, so it would be dense "
                            "attention under another name; is the model patched, and does it use its cache?"
                        )
                self._judge(condition, running)
                self.progress.step(running.note(prompt.sample.task))
        self.progress.end_stage()
        return failures

    def _say(self, text: str, style: str) -> None:
        self.progress.console.print(text, style=style, markup=False)

    def _answers(
        self, condition: Condition, label: str, missing: list[Prompt]
    ) -> Iterator[tuple[list[Prompt], list[dict[str, Any]]]]:
        """Prompts and their results, batch by batch. An exception becomes a result's `error`.

        A batch of several that fails, as for want of memory, is generated again one by one.
        """
        for batch in batches(missing, self.batch_size):
            results, error = self._generate(condition, batch)
            if error is None:
                yield batch, results
                continue
            if len(batch) == 1:
                yield batch, [self._base(condition, batch[0]) | {"error": error}]
                continue
            self._say(f"{label}, {len(batch)} prompts from {batch[0].sample.id} on: {error}; now one by one", "yellow")
            for prompt in batch:
                results, error = self._generate(condition, [prompt])
                yield [prompt], results if error is None else [self._base(condition, prompt) | {"error": error}]

    def _base(self, condition: Condition, prompt: Prompt) -> dict[str, Any]:
        return {
            "id": prompt.sample.id,
            "condition": condition.slug,
            "run": self.store.manifest()["key"],
            "text_sha256": prompt.sample.text_sha256,
        }

    def _ids(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids. Raises EvalError if they are not those that were frozen."""
        ids = self.renderer.encode(prompt.sample.input, prompt.sample.answer_prefix)
        if ids_sha256(ids) != prompt.ids_sha256:
            raise EvalError(f"{prompt.sample.id}: the tokenizer makes other ids of this prompt than when it was frozen")
        return ids

    def _generate(self, condition: Condition, batch: list[Prompt]) -> tuple[list[dict[str, Any]], str | None]:
        """Generate and score the prompts of one batch: their results, or none and what went wrong.

        A result counts tokens, calls and rows of its own prompt, as alone; its `seconds` are the batch's time divided
        by `batch`, the number of prompts in it.
        """
        prompts = [self._ids(prompt) for prompt in batch]
        names = [prompt.sample.id for prompt in batch]
        handle = self.handle
        handle.access.reset()
        handle.sequence_keys = [generation.sequence_key(self.seed, name) for name in names]
        sparse, dense = handle.sparse_calls, handle.dense_calls
        start, failure = time.perf_counter(), None
        try:
            answers = generation.generate(self.model, self.renderer.tokenizer, prompts, batch[0].sample.max_new_tokens)
        except Exception as error:  # out of memory has several types, by device; the rest of the run goes on
            failure = f"{type(error).__name__}: {error}".split("\n")[0]
        if failure is not None:  # outside of the handler, whose traceback holds the failed call's tensors
            _free_memory()
            return [], failure
        sparse, dense = handle.sparse_calls - sparse, handle.dense_calls - dense
        # a step of the batch is a call; those after a sequence's own end are not its own
        calls = [(max(0, sparse - answer.late), max(0, dense - answer.late)) for answer in answers]
        access = handle.access.sequence_totals([sum(own) for own in calls])
        seconds = round((time.perf_counter() - start) / len(batch), 3)
        return [
            self._base(condition, prompt)
            | {
                "output": answer.text,
                "score": scoring.score(answer.text, prompt.sample.references, prompt.sample.metric),
                "n_prompt": len(ids),
                "n_new": answer.n_new,
                "hit_cap": answer.hit_cap,
                "sparse_calls": own[0],
                "dense_calls": own[1],
                "access": totals,
                "batch": len(batch),
                "seconds": seconds,
            }
            for prompt, ids, answer, own, totals in zip(batch, prompts, answers, calls, access, strict=True)
        ], None

    def _judge(self, condition: Condition, running: _Running) -> None:
        """Stop where dense attention scores below the floor on the first single needles.

        A task is judged once enough of its prompts have scores, or once its prompts are through.
        """
        if condition.method != "dense":
            return
        for task in SINGLE_NEEDLES & running.expected.keys():
            scores, outputs = running.scores.get(task, []), running.outputs[task]
            through = len(scores) + running.failed[task] >= running.expected[task]
            scores = scores[:FLOOR_AFTER]
            if not scores or (len(scores) < FLOOR_AFTER and not through):
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
    """At most `size` prompts at a time, in order, each time of one task and one cap on new tokens."""
    for _, alike in groupby(prompts, lambda prompt: (prompt.sample.task, prompt.sample.max_new_tokens)):
        task = list(alike)
        for start in range(0, len(task), size):
            yield task[start : start + size]


class _Running:
    """Scores, outputs and reads so far, of one condition in this process."""

    def __init__(self, expected: Counter[str]) -> None:
        self.expected = expected
        self.failed: Counter[str] = Counter()
        self.scores: dict[str, list[float]] = defaultdict(list)
        self.outputs: dict[str, list[tuple[str, tuple[str, ...]]]] = defaultdict(list)
        self.read = self.dense = 0

    def add(self, prompt: Prompt, result: dict[str, Any]) -> None:
        self.scores[prompt.sample.task].append(result["score"])
        self.outputs[prompt.sample.task].append((result["output"], prompt.sample.references))
        self.read += result["access"].get("numerator", 0)
        self.dense += result["access"].get("denominator", 0)

    def note(self, task: str) -> str:
        """Task, its running score, and the percent of rows read over all tasks so far."""
        scores = self.scores.get(task)
        score = f"{100 * sum(scores) / len(scores):.1f}" if scores else "-"
        rows = f", rows {100 * self.read / self.dense:.1f} %" if self.dense else ""
        return f"{task} score {score}{rows}"


def _free_memory() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
