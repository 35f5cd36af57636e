"""``latent-santa bench operator``: one decoding call of one layer, sampled and dense, in the same run (Appendix E)."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "operator",
        help="one layer's decoding call: the Triton operator beside dense kernels, paired and with a cold L2 cache",
        description=(
            "Time one decoding call of one layer under Appendix E's protocol: paired rounds in alternating order, L2 "
            "evicted before every timed call, medians of round medians, a bootstrap interval for each ratio. Dense "
            "methods: SDPA flash and cuDNN (GQA), absorbed products and softmax (MLA), FlashAttention-3 and FlashMLA "
            "where fa3_fwd and flash_mla can be imported. Workloads are synthetic unless --workload is given."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    load = parser.add_argument_group("workload")
    load.add_argument("--layout", default="mla", choices=("mla", "gqa"))
    load.add_argument("--heads", type=int, default=16, help="query heads in all")
    load.add_argument("--groups", type=int, default=4, help="KV heads (GQA)")
    load.add_argument("--head-dim", type=int, default=128, help="head dimension (GQA); MLA has 512 + 64")
    load.add_argument("--context", default="32768", help="cached rows, several separated by commas")
    load.add_argument("--batch", default="1", help="sequences, several separated by commas")
    load.add_argument("--goals", action="store_true", help="all workloads with a goal, in place of the sizes above")
    load.add_argument("--workload", type=Path, metavar="FILE", help="a workload that `bench capture` saved")
    load.add_argument("--query-dtype", default="model", choices=("model", "float32"), help="float32 feeds two parts")
    method = parser.add_argument_group("method")
    method.add_argument("--budget", default="128", help="S, nominal budgets; K = S / (P / R) teams a head")
    method.add_argument("--pooled-budget", help="S of the pooled estimator, where it differs from --budget")
    method.add_argument("--estimator", default="per_head,pooled", help="per_head, pooled, or both")
    method.add_argument("--noise", default="independent", choices=("independent", "shared"))
    method.add_argument("--routing-dtype", default="model", help="of model, int8, int4")
    method.add_argument("--parent-size", type=int, default=16, help="P of synthetic workloads")
    method.add_argument("--representatives", type=int, default=4, help="R of synthetic workloads")
    protocol = parser.add_argument_group("protocol")
    protocol.add_argument("--modes", default="graph,stream", help="CUDA-graph replays, stream launches, or both")
    protocol.add_argument("--rounds", type=int, default=20, help="paired rounds")
    protocol.add_argument("--observations", type=int, default=100, help="timed calls a method and round")
    protocol.add_argument("--warmup", type=int, default=20, help="untimed calls a method before each round")
    protocol.add_argument("--evict", type=int, default=256, help="MiB read and written before every timed call")
    protocol.add_argument("--no-stages", action="store_true", help="leave the single launches' times out")
    parser.add_argument("--seed", type=int, default=0, help="seed of synthetic rows and of the noise")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write operator.json, .md and .png there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write it after every workload."""
    from latent_santa.eval.bench.workload import load
    from latent_santa.eval.commands.options import at_least
    from latent_santa.eval.errors import EvalError
    from latent_santa.eval.run.store import check_writable

    settings = _settings(args)
    modes = tuple(_choices("--modes", args.modes, ("graph", "stream")))
    sizes = _sizes(args)
    at_least(args, rounds=1, observations=1, warmup=0, evict=0, seed=0)
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
    from latent_santa.eval.bench import report
    from latent_santa.eval.bench.clock import DeviceClock
    from latent_santa.eval.bench.measure import measure
    from latent_santa.eval.bench.timing import Protocol, copy_bandwidth

    protocol = Protocol(args.rounds, args.observations, args.warmup, args.evict)
    facts = _facts(protocol, copy_bandwidth(device))
    clock = DeviceClock(protocol, device)
    records: list[dict[str, Any]] = []
    for size in sizes:
        workload = _workload(args, size)
        records.append(measure(workload, settings, clock, modes, facts["copy_bandwidth"], not args.no_stages))
        print(f"{report.workload_name(records[-1]['workload'])} measured", flush=True)
        del workload
        torch.cuda.empty_cache()
        if args.out:
            _write(args.out, facts, records)
    print(report.markdown(facts, records))
    return 0


def _choices(option: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    from latent_santa.eval.errors import EvalError

    given = text.split(",")
    unknown = [name for name in given if name not in allowed]
    if unknown:
        raise EvalError(f"{option} {text}: {unknown[0]!r} is not one of {', '.join(allowed)}")
    return given


def _settings(args: argparse.Namespace) -> list[Any]:
    """Every combination of budget, estimator and routing representation."""
    from latent_santa.config import SantaConfig
    from latent_santa.eval.bench.measure import Setting
    from latent_santa.eval.commands.options import integers
    from latent_santa.eval.errors import EvalError
    from latent_santa.kernels.support import MOST_TEAMS_PER_HEAD

    settings = []
    for estimator in _choices("--estimator", args.estimator, ("per_head", "pooled")):
        for routing in _choices("--routing-dtype", args.routing_dtype, ("model", "int8", "int4")):
            other = estimator == "pooled" and args.pooled_budget is not None
            option, own = ("--pooled-budget", args.pooled_budget) if other else ("--budget", args.budget)
            for budget in integers(option, own):
                try:
                    config = SantaConfig(
                        budget=budget, parent_size=args.parent_size, representatives=args.representatives
                    )
                except ValueError as error:
                    raise EvalError(str(error)) from error
                if config.teams_per_head > MOST_TEAMS_PER_HEAD:
                    raise EvalError(
                        f"{option} {budget} samples {config.teams_per_head} teams a head: the kernels sample at most "
                        f"{MOST_TEAMS_PER_HEAD}"
                    )
                settings.append(Setting(config.teams_per_head, estimator, args.noise, routing))
    return settings


def _sizes(args: argparse.Namespace) -> list[tuple[str, int, int, int, int]]:
    """(layout, heads, groups, context, batch) of each workload; one empty size stands for a file."""
    from latent_santa.eval.bench.goals import GOALS
    from latent_santa.eval.commands.options import integers
    from latent_santa.eval.errors import EvalError
    from latent_santa.kernels.support import MOST_KEY_DIMS
    from latent_santa.routing_keys import scale_group

    if args.workload and args.goals:
        raise EvalError("--workload times one file and --goals a list of sizes: give one of them")
    if args.workload:
        return [("", 0, 0, 0, 0)]
    if args.goals:
        return [(goal.layout, goal.heads, goal.groups, goal.context, goal.batch) for goal in GOALS]
    groups = 1 if args.layout == "mla" else args.groups
    if groups < 1 or args.heads < 1 or args.heads % groups:
        raise EvalError(f"--heads {args.heads} must be a positive multiple of --groups {groups}")
    if args.layout == "gqa":
        if not 1 <= args.head_dim <= MOST_KEY_DIMS[0]:
            raise EvalError(f"--head-dim {args.head_dim}: the kernels take 1 to {MOST_KEY_DIMS[0]} dimensions")
        for routing in set(args.routing_dtype.split(",")) - {"model"}:
            try:
                scale_group(args.head_dim, routing)
            except ValueError as error:
                raise EvalError(f"--head-dim {args.head_dim}: {error}") from error
    contexts, batches = integers("--context", args.context), integers("--batch", args.batch)
    return [(args.layout, args.heads, groups, context, batch) for batch in batches for context in contexts]


def _workload(args: argparse.Namespace, size: tuple[str, int, int, int, int]) -> Any:
    from dataclasses import replace

    from latent_santa.eval.bench.workload import load, synthetic

    if args.workload:
        workload = load(args.workload, "cuda")
    else:
        layout, heads, groups, context, batch = size
        workload = synthetic(
            layout, heads, groups, context, batch, args.head_dim, args.parent_size, args.representatives, seed=args.seed
        )
    dtype = workload.rows.values.dtype
    query = tuple(part.to(dtype) if args.query_dtype == "model" else part.float() for part in workload.query)
    return replace(workload, query=query)


def _facts(protocol: Any, bandwidth: float) -> dict[str, Any]:
    import datetime
    from dataclasses import asdict

    import torch
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "command": "latent-santa " + " ".join(sys.argv[1:]),
        "copy_bandwidth": bandwidth,
        "protocol": asdict(protocol),
    }


def _write(out: Path, facts: dict[str, Any], records: list[dict[str, Any]]) -> None:
    from latent_santa.eval.bench import report

    out.mkdir(parents=True, exist_ok=True)
    (out / "operator.json").write_text(json.dumps({"facts": facts, "results": records}, indent=1) + "\n")
    (out / "operator.md").write_text(report.markdown(facts, records))
    picture = report.plot(records)
    if picture:
        (out / "operator.png").write_bytes(picture)
