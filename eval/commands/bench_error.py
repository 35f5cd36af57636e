"""``latent-santa bench error``: the attention error of the operator's settings, without a GPU."""

from __future__ import annotations

import argparse
import json
from typing import Any

from latent_santa.eval.commands import options
from latent_santa.eval.commands.bench_operator import add_sampling_options, sampled_settings
from latent_santa.eval.errors import EvalError

DESCRIPTION = """\
The attention error of sampled settings on one layer's decoding step, in PyTorch on the CPU: relative error per head
against dense attention in float64, over many draws, and its ratio to the first setting's on the same draws. So it says
which settings of `bench operator` have the error of one stage or less.

Example: latent-santa bench error --context 131072 --routing one_stage,two_stage --parents-per-head 16,32

Example: latent-santa bench error --workload a.pt,b.pt --routing one_stage,two_stage --parents-per-head 16,32
"""


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "error",
        help="attention errors of the operator's settings over many draws, in PyTorch",
        description=DESCRIPTION,
        formatter_class=options.Help,
    )
    add = parser.add_argument_group("workload").add_argument
    add("--layout", default="mla", choices=("mla", "gqa"))
    add("--heads", type=options.positive, default=16, help="query heads in all")
    add("--groups", type=options.positive, default=4, help="KV heads (GQA)")
    add("--context", type=options.positive, default=32768, help="cached rows")
    add("--workloads", type=options.positive, default=2, help="synthetic workloads, each from a seed of its own")
    add("--workload", type=options.values(options.path, "a.pt,b.pt"), metavar="FILES", help="of `bench capture`")
    add_sampling_options(parser)
    parser.add_argument("--draws", type=options.positive, default=32, help="draws of noise per workload")
    parser.add_argument("--seed", type=int, default=0, help="seed of synthetic rows and of the bootstrap")
    parser.add_argument("--out", type=options.path, metavar="FILE", help="write table and errors as JSON there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure one workload after another, print the table and write it."""
    from latent_santa.eval.bench.errors import compared, errors, markdown
    from latent_santa.eval.bench.workload import Size, load, synthetic
    from latent_santa.eval.run.store import check_writable

    options.at_least(args, seed=0)
    settings = sampled_settings(args)
    groups = 1 if args.layout == "mla" else args.groups
    if args.heads % groups:
        raise EvalError(f"--heads {args.heads} must be a multiple of --groups {groups}")
    if args.out:
        check_writable(args.out.parent)
    size = Size(args.layout, args.heads, groups, args.context, 1)
    records, sources = [], []
    for number in range(len(args.workload or range(args.workloads))):
        if args.workload:
            workload = load(args.workload[number], "cpu")
        else:
            workload = synthetic(
                size, args.parent_size, args.representatives, device="cpu", seed=args.seed + number,
                parent_summary=args.parent_summary,
            )  # fmt: skip
        if workload.teams.parents is None and any(setting.sampling.parents for setting in settings):
            raise EvalError(f"{workload.source} has no parents: capture it with --parent-summary mean for two stages")
        sources.append(workload.describe())
        records.append(errors(workload, settings, args.draws))
        print(f"{sources[-1]['source']} measured", flush=True)
    table = compared(records, settings[0].name, args.seed)
    print(markdown(table))
    if args.out:
        content = {"workloads": sources, "draws": args.draws, "table": table, "errors": records}
        args.out.write_text(json.dumps(content) + "\n")
    return 0
