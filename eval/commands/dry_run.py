"""`ruler --dry-run`: what a run would do, and how long it would take where that is cheap to know."""

from __future__ import annotations

import time
from collections import defaultdict

from rich.text import Text

from latent_santa.eval.commands.evaluate import Evaluation
from latent_santa.eval.report import tables
from latent_santa.eval.report.summary import data_statement
from latent_santa.eval.run import models, sizes
from latent_santa.eval.run.generation import Batch, Generator
from latent_santa.eval.run.store import Prompt


def dry_run(evaluation: Evaluation) -> int:
    """Show the prompts' lengths, the work that they make, and an estimate of its time. Writes nothing."""
    prompts, origin, warnings = evaluation.prompts()
    console = tables.output_console()
    lengths: dict[str, list[int]] = defaultdict(list)
    caps: dict[str, int] = {}
    for prompt in prompts:
        lengths[prompt.sample.task].append(prompt.n_tokens)
        caps[prompt.sample.task] = prompt.sample.max_new_tokens
    console.print(Text(f"prompts: {data_statement({'origin': origin, 'settings': evaluation.settings})}"))
    header = ("task", "prompts", "least\ntokens", "median", "most", "new tokens\nat most", "filled\n(%)")
    table = tables.plain_table("", header)
    for task, found in lengths.items():
        found.sort()
        filled = 100 * (sum(found) / len(found) + caps[task]) / evaluation.request.length
        middle = found[len(found) // 2]
        table.add_row(task, *map(str, (len(found), found[0], middle, found[-1], caps[task])), f"{filled:.1f}")
    console.print(table)
    for line in _work(evaluation, prompts):
        console.print(Text(line))
    for warning in warnings:
        console.print(Text(f"warning: {warning}"), style="yellow")
    return 0


def _work(evaluation: Evaluation, prompts: list[Prompt]) -> list[str]:
    """Tokens, rows and time of the run, in words."""
    count = len(evaluation.conditions)
    tokens, new = sum(p.n_tokens for p in prompts), sum(p.sample.max_new_tokens for p in prompts)
    rows = max(p.n_tokens + p.sample.max_new_tokens for p in prompts) * evaluation.batch_size
    size = sizes.cache_bytes(models.load_config(evaluation.spec), rows, evaluation.spec.resolved_dtype())
    told = [
        f"{count} settings x {len(prompts)} prompts: {tokens:,} prompt tokens to prefill, once for all settings, and "
        f"at most {count * new:,} to generate; limit of the model: {evaluation.limit} positions",
        f"rows in the cache at once: at most {rows:,} per layer"
        + (f", {size / (1 << 20):,.0f} MiB over all layers" if size else ""),
    ]
    if not evaluation.spec.tiny:
        return [*told, "time: not known before the model is loaded; the run itself shows how far it is"]
    prefill, token = _seconds(evaluation, prompts[0])
    minutes = (len(prompts) * prefill + count * new * token) / 60
    measured = f"{prefill:.2f} s of prefill and {1000 * token:.1f} ms per new token"
    return [*told, f"time: about {minutes:.1f} minutes, from {measured}, measured on one prompt"]


def _seconds(evaluation: Evaluation, prompt: Prompt) -> tuple[float, float]:
    """Seconds of one prompt's prefill, and of a new token under the last setting."""
    from latent_santa import patch

    model = models.load(evaluation.spec, evaluation.tokenizer).model
    ids = evaluation.renderer.ids(evaluation.renderer.frozen(prompt), prompt.sample.chat)
    batch = Batch((prompt.sample.id,), [ids], prompt.sample.max_new_tokens, prompt.sample.stop)
    with patch(model, evaluation.config) as santa:
        generator = Generator(santa, evaluation.tokenizer, evaluation.config.seed)
        marks, condition = [time.perf_counter()], evaluation.conditions[-1]
        for _ in range(2):  # the second time its prefill is there
            (answer,) = generator.answers(condition, batch)
            marks.append(time.perf_counter())
    first, again = marks[1] - marks[0], marks[2] - marks[1]
    return max(0.0, first - again), again / answer.n_new
