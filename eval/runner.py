"""Running frozen prompts through every condition: one result a prompt, failures recorded, nonsense stopped early."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any, Protocol

from latent_santa.eval import generation, scoring
from latent_santa.eval.conditions import Condition
from latent_santa.eval.errors import EvalError
from latent_santa.eval.processes import Processes
from latent_santa.eval.progress import Progress
from latent_santa.eval.render import Renderer, ids_sha256
from latent_santa.eval.sources.tasks import SINGLE_NEEDLES
from latent_santa.eval.store import Prompt, Store

FLOOR_AFTER = 5
FAILURES_AT_FIRST = 3


class Ledger(Protocol):
    """What the runner needs of the access ledger."""

    def reset(self) -> None: ...

    def totals(self) -> dict[str, int]: ...


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
    """Everything a run needs. `floor`: least dense score in percent on single needles, 0 to go on regardless."""

    store: Store
    model: Any
    handle: Handle
    renderer: Renderer
    seed: int
    floor: float
    progress: Progress
    processes: Processes

    def run(self, conditions: tuple[Condition, ...]) -> int:
        """Run what is missing of every condition, method by method; returns the number of prompts that failed.

        Raises EvalError when going on would measure nothing: dense attention below the floor, a "sparse" method
        without a sparse call, or failures from the start.
        """
        generation.make_greedy(self.model, self.renderer.tokenizer)
        prompts = self.store.prompts()[self.processes.rank :: self.processes.world]
        failed = 0
        for condition in conditions:
            failed += self._run_condition(condition, prompts)
        return failed

    def _run_condition(self, condition: Condition, prompts: list[Prompt]) -> int:
        before = self.store.results(condition.slug)
        done = {row_id: result for row_id, result in before.items() if "error" not in result}
        own = [prompt for prompt in prompts if prompt.row.id in done]
        label = condition.name + (f" S={condition.budget}" if condition.budget else "")
        self.progress.stage(label, len(prompts), len(own))
        self.handle.configure(**condition.overrides())
        running = _Running(Counter(prompt.row.task for prompt in prompts))
        for prompt in own:
            running.add(prompt, done[prompt.row.id])
        failures = 0
        for prompt in prompts:
            if prompt.row.id in done:
                continue
            result = self._answer(condition, prompt)
            self.store.append(condition.slug, result)
            if "error" in result:
                failures += 1
                self.progress.console.print(f"{label}, {prompt.row.id}: {result['error']}", style="red", markup=False)
                if failures == FAILURES_AT_FIRST and not running.scores:
                    raise EvalError(
                        f"{label}: the first {failures} prompts all failed, the last with {result['error']}"
                    )
            else:
                running.add(prompt, result)
                self._guard(condition, label, result, running)
            self.progress.step(running.note(prompt.row.task))
        self.progress.end_stage()
        return failures

    def _answer(self, condition: Condition, prompt: Prompt) -> dict[str, Any]:
        """Generate and score one prompt. An exception becomes the result's `error`."""
        row = prompt.row
        base = {
            "id": row.id,
            "condition": condition.slug,
            "run": self.store.manifest()["key"],
            "text_sha256": row.text_sha256,
        }
        ids = self.renderer.encode(row.input, row.answer_prefix)
        if ids_sha256(ids) != prompt.ids_sha256:
            raise EvalError(f"{row.id}: the tokenizer makes other ids of this prompt than when it was frozen")
        self.handle.access.reset()
        self.handle.sequence_keys = [generation.sequence_key(self.seed, row.id)]
        sparse, dense = self.handle.sparse_calls, self.handle.dense_calls
        start = time.perf_counter()
        try:
            answer = generation.generate(self.model, self.renderer.tokenizer, ids, row.max_new_tokens)
        except Exception as error:  # out of memory has several types, by device; the rest of the run goes on
            _free_memory()
            return base | {"error": f"{type(error).__name__}: {error}".split("\n")[0]}
        return base | {
            "output": answer.text,
            "score": scoring.score(answer.text, row.references, row.metric),
            "n_prompt": len(ids),
            "n_new": answer.n_new,
            "hit_cap": answer.hit_cap,
            "sparse_calls": self.handle.sparse_calls - sparse,
            "dense_calls": self.handle.dense_calls - dense,
            "access": self.handle.access.totals(),
            "seconds": round(time.perf_counter() - start, 3),
        }

    def _guard(self, condition: Condition, label: str, result: dict[str, Any], running: _Running) -> None:
        if condition.method != "dense":
            if not result["sparse_calls"]:
                raise EvalError(
                    f"{label}, {result['id']}: no call of this generation was sparse, so it would be dense attention "
                    "under another name; is the model patched, and does it use its cache?"
                )
            return
        task = result["id"].partition("/")[0]
        scores, outputs = running.scores[task], running.outputs[task]
        mean = 100 * sum(scores) / len(scores)
        if task in SINGLE_NEEDLES and len(scores) == min(FLOOR_AFTER, running.expected[task]) and mean < self.floor:
            shown = "\n".join(f"  {text!r}, expected {wanted!r}" for text, wanted in outputs[:3])
            raise EvalError(
                f"dense attention scores {mean:.0f} % on the first {len(scores)} prompts of {task}, below the floor of "
                f"{self.floor:.0f} %. Something is wrong with model, template or prompts, and sparse scores would mean "
                f"nothing. Its answers:\n{shown}\nUse --floor 0 to go on regardless."
            )


class _Running:
    """Scores, outputs and reads so far, of one condition in this process."""

    def __init__(self, expected: Counter[str]) -> None:
        self.expected = expected
        self.scores: dict[str, list[float]] = defaultdict(list)
        self.outputs: dict[str, list[tuple[str, tuple[str, ...]]]] = defaultdict(list)
        self.read = self.dense = 0

    def add(self, prompt: Prompt, result: dict[str, Any]) -> None:
        self.scores[prompt.row.task].append(result["score"])
        self.outputs[prompt.row.task].append((result["output"], prompt.row.references))
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
