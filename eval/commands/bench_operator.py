"""``latent-santa bench operator``: one decoding step of one layer, sampled and dense, in the same run (Appendix E)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latent_santa.eval.commands import options
from latent_santa.eval.commands.config_file import add_config_option
from latent_santa.eval.errors import EvalError

if TYPE_CHECKING:
    from latent_santa.eval.bench.measure import Setting
    from latent_santa.eval.bench.timing import DeviceClock, Rounds
    from latent_santa.eval.bench.workload import Size, Workload


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "operator",
        help="one layer's decoding step: the Triton operator beside dense kernels, paired and with a cold L2 cache",
        description=(
            "Time one decoding step of one layer under Appendix E's protocol: paired rounds in alternating order, L2 "
            "evicted before every timed call, medians of round medians, a bootstrap interval for each ratio. Dense "
            "methods: SDPA flash and cuDNN (GQA), absorbed products and softmax (MLA), this package's own kernel, and "
            "FlashAttention-3, FlashMLA and FlashInfer where fa3_fwd, flash_mla and flashinfer can be imported. "
            "Workloads are synthetic unless --workload is given."
        ),
        formatter_class=options.Help,
    )
    numbers, words = options.values(options.positive, "128,256"), options.values(str, "a,b")
    add = parser.add_argument_group("workload").add_argument
    add("--layout", default="mla", choices=("mla", "gqa"))
    add("--heads", type=int, default=16, help="query heads in all")
    add("--groups", type=int, default=4, help="KV heads (GQA)")
    add("--head-dim", type=int, default=128, help="head dimension (GQA); MLA has 512 + 64")
    add("--context", type=numbers, default="32768", help="cached rows, several separated by commas")
    add("--batch", type=numbers, default="1", help="sequences, several separated by commas")
    add("--goals", action="store_true", help="all workloads with a goal, instead of the sizes above")
    add("--paper", action="store_true", help="Appendix E's protocol: K=31, GQA, SDPA flash, no graphs; minutes long")
    add("--workload", type=options.path, metavar="FILE", help="a workload that `bench capture` saved")
    add("--query-dtype", default="model", choices=("model", "float32"), help="float32 feeds two parts")
    add_sampling_options(parser)
    add = parser.add_argument_group("protocol").add_argument
    add("--modes", type=words, default="graph,stream", help="of graph (CUDA graphs) and stream (launched one by one)")
    add("--rounds", type=int, help="paired rounds: 20")
    add("--observations", type=int, help="timed calls per method and round: 100, with --paper 1,000")
    add("--warmup", type=int, help="untimed calls per method before each round: 20, with --paper 300")
    add("--evict", type=int, help="MiB read and written before every timed call: 256, with --paper 512")
    add("--no-stages", action="store_true", help="leave the single launches' times out")
    parser.add_argument("--seed", type=int, default=0, help="seed of synthetic rows and of the noise")
    parser.add_argument("--out", type=options.path, metavar="DIR", help="write operator.json, .md and .png there")
    parser.add_argument(
        "--table",
        type=options.path,
        nargs="+",
        metavar="FILE",
        help="measure nothing: print the short table of earlier runs' operator.json",
    )
    add_config_option(parser)
    parser.set_defaults(run=run)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`sampled_settings` reads, and those of synthetic workloads' teams."""
    numbers, words = options.values(options.positive, "128,256"), options.values(str, "a,b")
    add = parser.add_argument_group("method").add_argument
    add("--budgets", type=numbers, default="128", help="S, nominal budgets; K = S / (P / R) teams per head")
    add("--pooled-budgets", type=numbers, help="S of the pooled estimator, where it differs from --budgets")
    add("--estimators", type=words, default="per_head,pooled", help="of per_head, pooled")
    add("--noise", type=words, default="independent", help="of independent, shared")
    add("--routing", type=words, default="one_stage", help="of one_stage, two_stage")
    add("--parents-per-head", type=numbers, default="64", help="K1 of two stages; K of --budgets is then K2")
    add("--parent-summary", default="mean", choices=("mean", "isotropic", "diagonal"), help="of synthetic workloads")
    add("--routing-dtypes", type=words, default="model", help="of model, int8, int4")
    add("--parent-size", type=int, default=16, help="P of synthetic workloads")
    add("--representatives", type=int, default=4, help="R of synthetic workloads")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write it after every workload; sizes are checked before any is made."""
    from latent_santa.eval.bench.workload import load
    from latent_santa.eval.run.store import check_writable

    if args.table:
        return _table(args.table)
    rounds = _rounds(args)
    settings = sampled_settings(args)
    _one_of("--modes", args.modes, ("graph", "stream"))
    sizes = _sizes(args)
    if args.out:
        check_writable(args.out)
    if args.workload:
        load(args.workload, "cpu")  # what is wrong with the file is said before anything is timed
    import torch

    from latent_santa.kernels import unavailable

    device = torch.device("cuda")
    reason = "there is no CUDA device" if not torch.cuda.is_available() else unavailable(device)
    if reason is not None:
        raise EvalError(
            f"bench operator times CUDA kernels, and {reason}: run it on a machine with an NVIDIA GPU; `latent-santa "
            "bench decode --device cpu` times whole models in PyTorch anywhere"
        )
    _check_memory(sizes, rounds.evict, "cuda")
    from latent_santa.eval.bench import report
    from latent_santa.eval.bench.facts import facts
    from latent_santa.eval.bench.measure import measure
    from latent_santa.eval.bench.timing import DeviceClock, copy_bandwidth

    if args.paper:
        return _paper(args, DeviceClock(rounds, device))
    bandwidth = copy_bandwidth(device)
    found = facts("cuda", copy_bandwidth=bandwidth, protocol=vars(rounds))
    clock = DeviceClock(rounds, device)
    records: list[dict[str, Any]] = []
    for size in sizes:
        workload = _workload(args, size)
        records.append(measure(workload, settings, clock, tuple(args.modes), bandwidth, not args.no_stages))
        print(f"{report.workload_name(records[-1]['workload'])} measured", flush=True)
        del workload
        torch.cuda.empty_cache()
        if args.out:
            _write(args.out, found, records)
    print(report.markdown(found, records))
    return 0


def _table(files: list[Path]) -> int:
    """Print the short table of the runs that earlier commands wrote."""
    from latent_santa.eval.bench import report

    records = []
    for file in files:
        try:
            records += json.loads(file.read_text())["results"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EvalError(f"--table {file} holds no run of bench operator ({type(error).__name__})") from error
    print(report.short(records), end="")
    return 0


def _rounds(args: argparse.Namespace) -> Rounds:
    """The protocol's numbers where none are given, checked."""
    from latent_santa.eval.bench.paper_protocol import ROUNDS
    from latent_santa.eval.bench.timing import Rounds

    for name, value in vars(ROUNDS if args.paper else Rounds()).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    options.at_least(args, rounds=1, observations=1, warmup=0, evict=0, seed=0)
    return Rounds(args.rounds, args.observations, args.warmup, args.evict)


def _paper(args: argparse.Namespace, clock: DeviceClock) -> int:
    """Appendix E's protocol; the table is written beside its numbers."""
    import torch

    from latent_santa.eval.bench import paper_protocol
    from latent_santa.eval.bench.facts import facts
    from latent_santa.eval.bench.workload import load, synthetic, with_query

    workload = load(args.workload, "cuda") if args.workload else None
    if workload is None:
        workload = synthetic(paper_protocol.SIZE, dtype=torch.float16, seed=args.seed)
    elif workload.layout != "gqa":
        raise EvalError(f"--paper --workload {args.workload}: Appendix E is about GQA, and this workload is MLA")
    workload = with_query(workload, workload.step.rows.values.dtype)
    record = paper_protocol.measure(workload, clock)
    found = facts("cuda", protocol=vars(clock.rounds))
    text = paper_protocol.markdown(found, record)
    print(text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "paper.json").write_text(json.dumps({"facts": found, "result": record}, indent=1) + "\n")
        (args.out / "paper.md").write_text(text)
    return 0


def _one_of(option: str, given: list[str], allowed: tuple[str, ...]) -> None:
    unknown = [name for name in given if name not in allowed]
    if unknown:
        raise EvalError(f"{option} {','.join(given)}: {unknown[0]!r} is not one of {', '.join(allowed)}")


def sampled_settings(args: argparse.Namespace) -> list[Setting]:
    """Every combination of budget, estimator, noise, stages and routing representation."""
    from latent_santa.config import SantaConfig
    from latent_santa.eval.bench.measure import Setting
    from latent_santa.step import Sampling

    _one_of("--estimators", args.estimators, ("per_head", "pooled"))
    _one_of("--routing-dtypes", args.routing_dtypes, ("model", "int8", "int4"))
    _one_of("--noise", args.noise, ("independent", "shared"))
    _one_of("--routing", args.routing, ("one_stage", "two_stage"))
    stages = [None] if "one_stage" in args.routing else []
    stages += args.parents_per_head if "two_stage" in args.routing else []
    settings = []
    for estimator in args.estimators:
        other = estimator == "pooled" and args.pooled_budgets is not None
        budgets = args.pooled_budgets if other else args.budgets
        for routing in args.routing_dtypes:
            for budget in budgets:
                try:
                    config = SantaConfig(
                        budget=budget, parent_size=args.parent_size, representatives=args.representatives
                    )
                except ValueError as error:
                    raise EvalError(str(error)) from error
                settings += [
                    Setting(Sampling(config.teams_per_head, estimator, noise, parents), routing)
                    for noise in args.noise
                    for parents in stages
                ]
    return settings


def _sizes(args: argparse.Namespace) -> list[Size | None]:
    """Each synthetic workload; None stands for a file."""
    from latent_santa.eval.bench.goals import GOALS
    from latent_santa.eval.bench.paper_protocol import SIZE
    from latent_santa.eval.bench.workload import Size
    from latent_santa.kernels.support import MOST_KEY_DIMS
    from latent_santa.routing_keys import scale_group

    if args.goals and (args.workload or args.paper):
        raise EvalError("--goals times a list of sizes: give it without --workload and --paper")
    if args.paper:
        return [None if args.workload else SIZE]
    if args.workload:
        return [None]
    if args.goals:
        return [Size(goal.layout, goal.heads, goal.groups, goal.context, goal.batch) for goal in GOALS]
    groups = 1 if args.layout == "mla" else args.groups
    if groups < 1 or args.heads < 1 or args.heads % groups:
        raise EvalError(f"--heads {args.heads} must be a positive multiple of --groups {groups}")
    if args.layout == "gqa":
        if not 1 <= args.head_dim <= MOST_KEY_DIMS[0]:
            raise EvalError(f"--head-dim {args.head_dim}: the kernels take 1 to {MOST_KEY_DIMS[0]} dimensions")
        for routing in set(args.routing_dtypes) - {"model"}:
            try:
                scale_group(args.head_dim, routing)
            except ValueError as error:
                raise EvalError(f"--head-dim {args.head_dim}: {error}") from error
    return [
        Size(args.layout, args.heads, groups, context, batch, args.head_dim)
        for batch in args.batch
        for context in args.context
    ]


def _check_memory(sizes: list[Size | None], evict: int, device: str) -> None:
    """See that the largest workload's rows, twice for a dense method that lays them out again, and the buffer that
    evicts L2 are there."""
    from latent_santa.eval.run.sizes import check_memory

    largest = max((size for size in sizes if size is not None), key=lambda size: size.bytes(), default=None)
    rows = 0 if largest is None else 2 * largest.bytes()
    named = "" if largest is None else f"--context {largest.context} and --batch {largest.batch}, twice, and "
    check_memory(rows + (evict << 20), device, f"{named}--evict {evict} take")


def _workload(args: argparse.Namespace, size: Size | None) -> Workload:
    import torch

    from latent_santa.eval.bench.workload import load, synthetic, with_query

    if size is None:
        workload = load(args.workload, "cuda")
    else:
        summary = args.parent_summary if "two_stage" in args.routing else None
        workload = synthetic(size, args.parent_size, args.representatives, seed=args.seed, parent_summary=summary)
    return with_query(workload, torch.float32 if args.query_dtype == "float32" else workload.step.rows.values.dtype)


def _write(out: Path, facts: dict[str, Any], records: list[dict[str, Any]]) -> None:
    from latent_santa.eval.bench import report

    out.mkdir(parents=True, exist_ok=True)
    (out / "operator.json").write_text(json.dumps({"facts": facts, "results": records}, indent=1) + "\n")
    (out / "operator.md").write_text(report.markdown(facts, records))
    picture = report.plot(records)
    if picture:
        (out / "operator.png").write_bytes(picture)
