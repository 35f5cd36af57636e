"""One evaluation from options to tables: check, freeze or resume, load, run, merge, report."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from latent_santa.config import SantaConfig
from latent_santa.eval.commands import options
from latent_santa.eval.commands.run_options import FIRST_LOOK
from latent_santa.eval.errors import EvalError
from latent_santa.eval.report import screen, tables
from latent_santa.eval.report.summary import data_statement, exit_code, write_reports
from latent_santa.eval.run import freeze, models, sizes
from latent_santa.eval.run.conditions import slug
from latent_santa.eval.run.locks import run_lock
from latent_santa.eval.run.processes import Processes, join, started
from latent_santa.eval.run.progress import Progress
from latent_santa.eval.run.render import Renderer
from latent_santa.eval.run.runner import Runner
from latent_santa.eval.run.store import Prompt, Store, check_writable
from latent_santa.eval.sources import Request, family
from latent_santa.eval.sources.tasks import resolve_tasks
from latent_santa.patches.limits import context_limit


@dataclass
class Evaluation:
    """A checked plan: nothing slow has happened yet, and nothing was written.

    config         what all settings share
    limit          positions of the model, None where its configuration does not say
    settings       everything that decides results; a resumed run must have the same
    batch_size     most prompts generated together
    floor          least dense score in percent on single needles
    """

    spec: models.ModelSpec
    tokenizer: Any
    renderer: Renderer
    request: Request
    config: SantaConfig
    conditions: tuple[SantaConfig, ...]
    limit: int | None
    settings: dict[str, Any]
    batch_size: int
    floor: float
    plot: bool
    console: Console

    def prompts(self, quiet: bool = False) -> tuple[list[Prompt], dict[str, Any], list[str]]:
        """Build the prompts, with progress."""
        with Progress(self.console, quiet) as progress:
            progress.stage("building prompts", len(self.request.tasks) * self.request.n)
            made = freeze.make_prompts(self.request, self.renderer, self.spec.tiny, self.limit, progress.step)
            progress.end_stage()
        return made

    def run(self, out: Path, resume: bool = False, quick: list[str] | None = None) -> int:
        """Freeze or resume, generate what is missing, write and show the tables.

        out     directory of the run
        quick   options that were filled in for a first look, for the greeting

        Returns `summary.exit_code`. Raises EvalError.
        """
        processes = join(self.spec.tensor_parallel)
        store = Store(Path(processes.share(str(out))), *processes.places)
        if processes.world > 1 and self.spec.device_map:
            raise EvalError(
                "--device-map spreads one model over all GPUs, layer by layer; start it as one process, without a "
                "launcher. --tensor-parallel spreads its heads over the processes of a launcher"
            )
        if processes.first:
            check_writable(store.directory)
        with run_lock(store.directory, processes.first) as unlocked, _kept(store, processes.first):
            if processes.first:
                if unlocked:
                    self._say(f"note: {unlocked}")
                self._begin(store, resume)
                self._announce(store, quick or [])
            processes.wait()
            if not processes.first:
                freeze.check_resume(store, self.settings, self.conditions)
            with Progress(self.console, quiet=not processes.first) as progress:
                self._generate(store, progress, processes)
            processes.wait()
            code = self._report(store) if processes.first else 0
        processes.close()
        return code

    def _say(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _begin(self, store: Store, resume: bool) -> None:
        """Freeze a new run, or see that the one in the directory can go on."""
        self._check_directory(store, resume)
        store.sweep()
        if store.frozen:
            freeze.extend(store, self.conditions)
        else:
            prompts, origin, warnings = self.prompts()
            freeze.new_run(store, self.settings, self.conditions, prompts, origin, warnings)
        for condition in self.conditions:
            store.merge(slug(condition))

    def _check_directory(self, store: Store, resume: bool) -> None:
        """Raises EvalError if the directory holds a run that cannot go on."""
        if not store.frozen:
            return
        store.complete_manifest()
        if not resume:
            raise EvalError(f"{store.directory} holds a run: --resume continues it, another --out starts a new one")
        try:
            notes = freeze.check_resume(store, self.settings, self.conditions)
        except EvalError:
            if store.has_results:
                raise
            # nothing was measured under the settings that are no longer wanted
            store.thaw()
            notes = ["the run had no results yet and begins again, with the settings given now"]
        for note in notes:
            self._say(f"note: {note}")

    def _announce(self, store: Store, quick: list[str]) -> None:
        if quick:
            self._say(
                f"A quick first look, {FIRST_LOOK} that nobody else uses: {' '.join(quick)}. Few prompts, so wide "
                "intervals; any of these options can be given."
            )
        manifest = store.manifest()
        self._say(f"Run in {store.directory}: {data_statement(manifest)}.")
        first = store.prompts()[0]
        tail = self.renderer.frozen(first)[-120:]
        self._say(f"The first prompt ends in {tail!r}")
        for warning in [*manifest["warnings"], *store.damaged()]:
            self._say(f"warning: {warning}", "yellow")

    def _generate(self, store: Store, progress: Progress, processes: Processes) -> None:
        wanted = {prompt.sample.id for prompt in processes.own(store.prompts())}
        if all(_complete(store, condition, wanted) for condition in self.conditions):
            return
        from latent_santa import patch
        from latent_santa.eval.run.generation import Generator

        if processes.first and (note := self.spec.sharing(processes.local_world)):
            self._say(f"note: {note}")
        loaded = models.load(self.spec, self.tokenizer, processes.local_rank)
        if processes.first and store.manifest().get("loaded") != loaded.facts:
            store.write_manifest(store.manifest() | {"loaded": loaded.facts})
        if self.spec.quant != "none" and processes.first:
            share = 100 * loaded.facts["int8_parameters"] / loaded.facts["parameters"]
            self._say(f"{self.spec.quant}: {share:.1f} % of the parameters are in 8 bits")
        try:
            handle = patch(loaded.model, self.config)
        except NotImplementedError as error:
            raise EvalError(f"--model {self.spec.name}: {error}") from error
        with handle:
            generator = Generator(handle, self.tokenizer, self.config.seed)
            runner = Runner(store, generator, self.renderer, self.floor, progress, processes, self.batch_size)
            runner.run(self.conditions)

    def _report(self, store: Store) -> int:
        for condition in self.conditions:
            store.merge(slug(condition))
        summary, notes = write_reports(store, self.plot)
        screen.show(store, summary, notes, tables.output_console())
        return exit_code(summary)


def prepare(args: argparse.Namespace, console: Console | None = None) -> Evaluation:
    """Check all options of a run, loading no more than configuration and tokenizer. Raises EvalError."""
    spec = options.model_spec(args, check=not args.dry_run)  # the plan of another machine can be looked at here
    tasks = resolve_tasks(args.tasks, family(args.data, spec.tiny))
    base = options.base_config(args, spec)
    conditions = options.conditions(args, base)
    config = models.load_config(spec)
    models.check_supported(spec, config)
    limit = args.context_limit or context_limit(config)
    if limit is not None and args.length > limit:
        raise EvalError(
            f"--length {args.length} exceeds the model's limit of {limit} positions; use a shorter length, or "
            "--context-limit if the model is known to take more"
        )
    if not args.dry_run:
        asked = f"--length {args.length} with --batch-size {args.batch_size}"
        sizes.check_cache(config, args.length * args.batch_size, spec, asked)
    sizes.check_prompts(args.out or Path("out"), args.n * len(tasks), args.length)
    tokenizer = models.load_tokenizer(spec)
    renderer = options.renderer(args, tokenizer)
    request = Request(
        data=args.data,
        tasks=tasks,
        n=args.n,
        length=args.length,
        seed=args.data_seed,
        select=args.select,
        haystack=args.haystack,
        hub_revision=args.hub_revision,
        offline=args.offline,
        more=args.more,
    )
    settings = {
        **_model_settings(spec, config),
        **_prompt_settings(request),
        **{name: getattr(base, name) for name in (*options.SHARED, "first_token")},
        "noise": ",".join(dict.fromkeys((*args.noise, *(one.noise for one in conditions if one.noise != base.noise)))),
        **renderer.fingerprint(),
        "batch_size": args.batch_size,
        "context_limit": limit,
    }
    return Evaluation(
        spec,
        tokenizer,
        renderer,
        request,
        base,
        conditions,
        limit,
        settings,
        args.batch_size,
        args.floor,
        args.plot,
        console or Console(stderr=True),
    )


def _model_settings(spec: models.ModelSpec, config: Any) -> dict[str, Any]:
    return {
        "model": spec.name,
        "revision": spec.revision,
        "weights": models.identity(spec, config),
        "dtype": spec.resolved_dtype(),
        "quant": spec.quant,
        "device": spec.resolved_device().partition(":")[0],
        "device_map": spec.device_map,
        "tensor_parallel": started() if spec.tensor_parallel else 1,
        "math_sdpa": spec.math_sdpa,
    }


def _prompt_settings(request: Request) -> dict[str, Any]:
    found = asdict(request) | {"tasks": list(request.tasks), "data_seed": request.seed}
    del found["seed"], found["offline"], found["start"]
    found |= found.pop("more")
    found["hub_revision"] = request.hub_revision if request.data == "hub" else None
    found["haystack"] = request.haystack if request.data == "builtin" else None
    return found


@contextmanager
def _kept(store: Store, first: bool) -> Iterator[None]:
    """Say what is kept, and how to go on, when the user or the disk stops the run."""
    try:
        yield
    except (KeyboardInterrupt, OSError) as error:
        if not store.frozen or not first:
            raise
        told = (
            f"every result up to here is kept in {store.directory}; the same command with --out {store.directory} "
            "--resume continues it"
        )
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(told) from error
        raise EvalError(f"{error.filename or store.directory}: {error.strerror or error}; {told}") from error


def _complete(store: Store, condition: SantaConfig, wanted: set[str]) -> bool:
    good = {sample_id for sample_id, result in store.results(slug(condition)).items() if "error" not in result}
    return wanted <= good
