"""``latent-santa bench profile``: what each kernel of a decoding step takes of the device (Table 14)."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from latent_santa.eval.commands import options
from latent_santa.eval.errors import EvalError

HEADER = ("launch", "kernel", "CTAs", "warps", "reg./thr.", "spilled", "shared KiB", "occ. bound %")


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "profile",
        help="each kernel of a decoding step: launches, grid, registers, shared memory, occupancy (Table 14)",
        description=(
            "Compile the kernels of one decoding step of one layer for compute capability 9.0 (H100, H200), with the "
            "block sizes that such a device gets, and say what each launch takes. Nothing is launched and no GPU is "
            "needed. The occupancy is a bound from registers, shared memory and grid. --ncu adds Nsight Compute's "
            "counters; it runs the step on the GPU that is there, with that GPU's block sizes."
        ),
        formatter_class=options.Help,
    )
    add = parser.add_argument_group("workload").add_argument
    add("--layout", default="mla", choices=("mla", "gqa"))
    add("--heads", type=int, default=16, help="query heads in all")
    add("--groups", type=int, default=4, help="KV heads (GQA)")
    add("--context", type=options.positive, default=32768, help="cached rows")
    add("--batch", type=options.positive, default=1, help="sequences")
    add("--workload", type=options.path, metavar="FILE", help="a workload that `bench capture` saved, instead")
    add = parser.add_argument_group("method").add_argument
    add("--budget", type=options.positive, default=128, help="S; K = S / (P / R) teams per head, P/R = 16/4")
    add("--estimator", default="per_head", choices=("per_head", "pooled"))
    add("--noise", default="independent", choices=("independent", "shared"), help="shared: one draw for all heads")
    add("--parents-per-head", type=options.positive, metavar="K1", help="two stages, with K1 parents per head")
    parser.add_argument("--ncu", action="store_true", help="also Nsight Compute's counters: needs a GPU and ncu")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)  # what ncu runs
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compile and print; 0."""
    from latent_santa.eval.bench import counters, profile
    from latent_santa.eval.report.tables import markdown_table

    setting = _setting(args)
    if args.launch:
        return _launch(args, setting)
    if args.ncu:
        counters.check()
    workload = _workload(args, "cpu")
    device = profile.Device()
    try:
        found = profile.compiled(workload, setting, device)
    except (ImportError, RuntimeError) as error:
        raise EvalError(f"the kernels cannot be compiled: {error}") from error
    lines = [
        [
            *(one.launch, one.kernel, str(one.programs), str(one.warps), str(one.registers), str(one.spilled)),
            *(f"{one.shared / 1024:.1f}", f"{one.occupancy(device):.1f}"),
        ]
        for one in found
    ]
    print(f"{len(found)} launches, {setting.name}, compiled for compute capability 9.0\n")
    print(markdown_table(HEADER, lines))
    if args.ncu:
        _counters([one.kernel for one in found])
    return 0


def _setting(args: argparse.Namespace) -> Any:
    from latent_santa.config import SantaConfig
    from latent_santa.eval.bench.measure import Setting
    from latent_santa.step import Sampling

    try:
        k = SantaConfig(budget=args.budget).teams_per_head
    except ValueError as error:
        raise EvalError(str(error)) from error
    return Setting(Sampling(k, args.estimator, args.noise, args.parents_per_head))


def _workload(args: argparse.Namespace, device: str) -> Any:
    from latent_santa.eval.bench.workload import Size, load, synthetic

    if args.workload:
        return load(args.workload, device)
    groups = 1 if args.layout == "mla" else args.groups
    if groups < 1 or args.heads < 1 or args.heads % groups:
        raise EvalError(f"--heads {args.heads} must be a positive multiple of --groups {groups}")
    size = Size(args.layout, args.heads, groups, args.context, args.batch)
    return synthetic(size, device=device, parent_summary="mean" if args.parents_per_head else None)


def _launch(args: argparse.Namespace, setting: Any) -> int:
    """Run the step as often as ncu is to see it."""
    import torch

    from latent_santa.eval.bench.counters import CAPTURES
    from latent_santa.eval.bench.measure import operator
    from latent_santa.kernels import Workspace

    step = operator(_workload(args, "cuda"), setting, Workspace())
    for _ in range(CAPTURES):
        step()
    torch.cuda.synchronize()
    return 0


def _counters(kernels: list[str]) -> None:
    """Run this command again under ncu, and print what it counted."""
    from latent_santa.eval.bench.counters import METRICS, counters
    from latent_santa.eval.report.tables import markdown_table

    given = [word for word in sys.argv[1:] if word != "--ncu"]
    found = counters([sys.executable, "-m", "latent_santa.eval", *given, "--launch"], kernels)
    lines = [[name, *(f"{values[column]:.2f}" for column in METRICS.values())] for name, values in found]
    print(markdown_table(("kernel", *METRICS.values()), lines))
