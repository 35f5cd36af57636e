"""One evaluation from options to tables: check, freeze or resume, load, run, merge, report."""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from latent_santa.config import SantaConfig
from latent_santa.eval.errors import EvalError
from latent_santa.eval.report import tables
from latent_santa.eval.report.paper_tables import MEAN
from latent_santa.eval.report.summary import data_statement, exit_code, write_reports
from latent_santa.eval.run import freeze, models
from latent_santa.eval.run.conditions import Condition, checked_config, expand
from latent_santa.eval.run.processes import Processes, join
from latent_santa.eval.run.progress import Progress
from latent_santa.eval.run.render import Renderer
from latent_santa.eval.run.runner import Runner
from latent_santa.eval.run.store import Prompt, Store, check_writable
from latent_santa.eval.sources import Request, family
from latent_santa.eval.sources.tasks import resolve_tasks

CPU_PREFILL_BYTES = 2 << 30


@dataclass
class Evaluation:
    """A checked plan: nothing slow has happened yet, and nothing was written."""

    args: argparse.Namespace
    spec: models.ModelSpec
    tokenizer: Any
    renderer: Renderer
    request: Request
    conditions: tuple[Condition, ...]
    limit: int | None
    settings: dict[str, Any]
    console: Console

    @classmethod
    def prepare(cls, args: argparse.Namespace, console: Console | None = None) -> Evaluation:
        """Check all options, loading no more than configuration and tokenizer. Raises EvalError."""
        spec = models.ModelSpec(
            args.model, args.revision, args.dtype, args.quant, args.device, args.device_map, args.offline
        )
        tasks = resolve_tasks(args.tasks, family(args.data, spec.tiny))
        conditions = expand(args.methods, args.budgets, args.estimators, args.parents, args.teams, args.centroid_sizes)
        if not args.dry_run:
            spec.check()
        base_config(args, spec)
        config = models.load_config(spec)
        models.check_supported(spec, config)
        tokenizer = models.load_tokenizer(spec)
        renderer = Renderer(tokenizer, args.answer_prefix, args.chat_template)
        limit = args.context_limit or models.context_limit(config)
        if limit is not None and args.length > limit:
            raise EvalError(
                f"--length {args.length} exceeds the model's limit of {limit} positions; use a shorter length, or "
                "--context-limit if the model is known to take more"
            )
        request = Request(
            args.data,
            tasks,
            args.n,
            args.length,
            args.data_seed,
            args.select,
            args.haystack,
            args.hub_revision,
            args.offline,
        )
        settings = {
            "model": spec.name,
            "revision": spec.revision,
            "weights": models.identity(spec, config),
            "dtype": spec.resolved_dtype(),
            "quant": spec.quant,
            "device": spec.resolved_device().partition(":")[0],
            "device_map": spec.device_map,
            "data": args.data,
            "hub_revision": args.hub_revision if args.data == "hub" else None,
            "haystack": args.haystack if args.data == "builtin" else None,
            "tasks": list(tasks),
            "n": args.n,
            "length": args.length,
            "select": args.select,
            "data_seed": args.data_seed,
            "seed": args.seed,
            "kmeans_seed": args.kmeans_seed,
            "kmeans_engine": args.kmeans_engine,
            "noise": args.noise,
            "routing_dtype": args.routing_dtype,
            "backend": args.backend,
            "batch_size": args.batch_size,
            "first_token": "replay",
            "context_limit": limit,
            **renderer.fingerprint(),
        }
        console = console or Console(stderr=True)
        return cls(args, spec, tokenizer, renderer, request, conditions, limit, settings, console)

    def prompts(self, quiet: bool = False) -> tuple[list[Prompt], dict[str, Any], list[str]]:
        """Build the prompts, with progress."""
        with Progress(self.console, quiet) as progress:
            progress.stage("building prompts", len(self.request.tasks) * self.request.n)
            made = freeze.make_prompts(self.request, self.renderer, self.spec.tiny, self.limit, progress.step)
            progress.end_stage()
        return made

    def _check_directory(self, store: Store) -> None:
        """Raises EvalError if the directory holds a run that cannot be gone on with."""
        if not store.frozen:
            return
        if not self.args.resume:
            raise EvalError(f"{store.directory} holds a run: --resume goes on with it, another --out starts a new one")
        try:
            notes = freeze.check_resume(store, self.settings, self.conditions)
        except EvalError:
            if store.has_results:
                raise
            # nothing was measured under the settings that are no longer wanted
            store.thaw()
            notes = ["the run had no results yet and begins anew, with the settings given now"]
        for note in notes:
            self.console.print(f"note: {note}", markup=False, highlight=False)

    def run(self) -> int:
        """Freeze or resume, generate what is missing, write and show the tables.

        Returns `summary.exit_code`.
        """
        processes = join()
        store = Store(Path(processes.share(str(self.args.out))), processes.rank, processes.world)
        if processes.world > 1 and self.args.device_map:
            raise EvalError("--device-map spreads one model over all GPUs; start it as one process, without a launcher")
        if processes.first:
            check_writable(store.directory)
            self._check_directory(store)
            store.sweep()
            if store.frozen:
                freeze.extend(store, self.conditions)
            else:
                prompts, origin, warnings = self.prompts()
                freeze.new_run(store, self.settings, self.conditions, prompts, origin, warnings)
            for condition in self.conditions:
                store.merge(condition.slug)
            self._announce(store)
        processes.wait()
        if not processes.first:
            self._check_frozen(store)
        with Progress(self.console, quiet=not processes.first) as progress:
            self._generate(store, progress, processes)
        processes.wait()
        code = 0
        if processes.first:
            for condition in self.conditions:
                store.merge(condition.slug)
            summary, notes = write_reports(store, self.args.plot)
            show(summary, store.directory, notes)
            code = exit_code(summary)
        processes.close()
        return code

    def _check_frozen(self, store: Store) -> None:
        freeze.check_resume(store, self.settings, self.conditions)

    def _announce(self, store: Store) -> None:
        def say(text: str, style: str | None = None) -> None:
            self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

        if self.args.quick:
            say(
                f"A quick first look with {' '.join(self.args.quick)}: few prompts, so wide intervals. Any of these "
                "options can be given."
            )
        manifest = store.manifest()
        say(f"Run in {store.directory}: {data_statement(manifest)}.")
        first = store.prompts()[0].sample
        tail = self.renderer.text(first.input, first.answer_prefix)[-120:]
        say(f"The first prompt ends in {tail!r}")
        for warning in manifest["warnings"]:
            say(f"warning: {warning}", style="yellow")

    def _generate(self, store: Store, progress: Progress, processes: Processes) -> None:
        wanted = {prompt.sample.id for prompt in store.prompts()[processes.rank :: processes.world]}
        if all(_complete(store, condition, wanted) for condition in self.conditions):
            return
        from latent_santa import patch
        from latent_santa.patches.prefill_store import PrefillStore
        from latent_santa.patches.team_store import TeamStore

        if processes.first and (note := self.spec.sharing(processes.local_world)):
            self.console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
        loaded = models.load(self.spec, self.tokenizer, processes.local_rank)
        if self.spec.quant != "none" and processes.first:
            counts = "{quantised_layers} of {linear_layers}".format_map(loaded.facts)
            self.console.print(f"{self.spec.quant}: {counts} linear layers are quantised", highlight=False)
        try:
            handle = patch(loaded.model, base_config(self.args, self.spec))
        except NotImplementedError as error:
            raise EvalError(f"--model {self.spec.name}: {error}") from error
        handle.team_store = TeamStore()
        if limit := prefill_bytes(self.args.keep_prefills, self.spec, processes):
            handle.prefill_store = PrefillStore(limit)
        with handle:
            runner = Runner(
                store,
                loaded.model,
                handle,
                self.renderer,
                self.args.seed,
                self.args.floor,
                progress,
                processes,
                self.args.batch_size,
            )
            runner.run(self.conditions)


def prefill_bytes(gib: float | None, spec: models.ModelSpec, processes: Processes) -> int:
    """Most bytes of prefills to keep: what was asked for, or of a GPU a quarter of what the model left free."""
    import torch

    if gib is not None:
        return int(gib * (1 << 30))
    device = spec.resolved_device(processes.local_rank)
    if not device.startswith("cuda"):
        return CPU_PREFILL_BYTES
    sharers = sum(spec.resolved_device(rank) == device for rank in range(processes.local_world))
    return torch.cuda.mem_get_info(device)[0] // (4 * sharers)


def _complete(store: Store, condition: Condition, wanted: set[str]) -> bool:
    good = {sample_id for sample_id, result in store.results(condition.slug).items() if "error" not in result}
    return wanted <= good


def dry_run(evaluation: Evaluation) -> int:
    """Show what would be run: prompt lengths and the work they make. Writes nothing."""
    prompts, origin, warnings = evaluation.prompts()
    console = tables.output_console()
    lengths: dict[str, list[int]] = defaultdict(list)
    caps: dict[str, int] = {}
    for prompt in prompts:
        lengths[prompt.sample.task].append(prompt.n_tokens)
        caps[prompt.sample.task] = prompt.sample.max_new_tokens
    table = tables.plain_table(
        f"prompts: {data_statement({'origin': origin})}",
        ("task", "prompts", "least tokens", "median", "most", "new tokens at most", "filled (%)"),
    )
    for task, found in lengths.items():
        found.sort()
        filled = 100 * (sum(found) / len(found) + caps[task]) / evaluation.request.length
        middle = found[len(found) // 2]
        table.add_row(task, *map(str, (len(found), found[0], middle, found[-1], caps[task])), f"{filled:.1f}")
    console.print(table)
    total = sum(prompt.n_tokens for prompt in prompts)
    console.print(
        f"{len(evaluation.conditions)} settings x {len(prompts)} prompts, {total * len(evaluation.conditions):,} "
        f"prompt tokens to prefill at most; limit of the model: {evaluation.limit} positions",
        highlight=False,
    )
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    return 0


def show(summary: dict[str, Any], directory: Path, notes: list[str]) -> None:
    """Print the mean's table, or the only task's, and where the rest is."""
    console = tables.output_console()
    column = MEAN if len(summary["tasks"]) > 1 else summary["tasks"][0]
    console.print(tables.terminal(summary, column))
    console.print(f"Prompts: {summary['data']}.", markup=False, highlight=False)
    for note in [*tables.notes(summary), *notes]:
        console.print(f"- {note}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"All tables: {directory / 'table.md'}; report {directory} rebuilds them.", markup=False, highlight=False
    )


def base_config(args: argparse.Namespace, spec: models.ModelSpec) -> SantaConfig:
    """What all conditions of a run share. Raises EvalError."""
    names = ("seed", "kmeans_seed", "kmeans_engine", "noise", "routing_dtype", "backend")
    return checked_config(spec.resolved_device(), method="dense", **{name: getattr(args, name) for name in names})
