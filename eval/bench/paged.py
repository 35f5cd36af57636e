"""``python -m latent_santa.eval.bench.paged``: the paged kernels beside those over one contiguous cache, same teams.

Both sample the same rows with the same noise, which is checked before anything is timed. Blocks lie at random places.
Times are medians of paired rounds inside CUDA graphs with a cold L2 cache, in microseconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from latent_santa.eval.bench.timing import DeviceClock, Launch, Rounds
from latent_santa.eval.bench.workload import Size, synthetic
from latent_santa.kernels import Workspace, sampled_attention
from latent_santa.kernels.launch import launches_of
from latent_santa.kernels.paged import PagedScratch, paged_attention, write_rows
from latent_santa.kernels.paged_launch import PagedLaunches
from latent_santa.noise import noise_keys
from latent_santa.paged import PagedSampling, empty_records
from latent_santa.rows import Rows
from latent_santa.step import DecodeStep, Draw, Sampling, Suffix


def contiguous_step(size: Size, device: str, dtype: torch.dtype = torch.bfloat16) -> DecodeStep:
    """A synthetic step with all rows but the newest grouped, and one noise key for all sequences."""
    step = synthetic(size, device=device, dtype=dtype, parent_summary="mean").step
    keys = tuple(torch.cat((part, part[:, :, :1]), 2) for part in step.rows.keys)
    n = size.context
    draw = Draw(noise_keys(0, [0] * size.batch, device), torch.full((size.batch,), n + 1, device=device), 0)
    return replace(step, rows=Rows(keys, keys[0]), suffix=Suffix(torch.arange(n, n + 1, device=device)), draw=draw)


class PagedCase:
    """The rows of a contiguous step in blocks at random places, and its queries."""

    def __init__(self, step: DecodeStep, block_size: int, table_rows: int = 0) -> None:
        latent, rotary = step.rows.keys
        batch, _, n, rank = latent.shape
        device, each = latent.device, -(-n // block_size)
        place = torch.randperm(batch * each, generator=torch.Generator().manual_seed(1)).to(device).view(batch, each)
        shape = (batch * each, block_size, rank + rotary.shape[3])
        self.cache = torch.zeros(shape, dtype=latent.dtype, device=device)
        self.table = torch.zeros(batch, max(each, table_rows // block_size), dtype=torch.int32, device=device)
        self.table[:, :each] = place
        self.lengths = torch.full((batch,), n, dtype=torch.int32, device=device)
        self.records = empty_records(shape[0], block_size, 16, 4, device, self.cache)
        self.query = tuple(part[:, 0] for part in step.query)
        self.counts = torch.zeros(batch, 4, dtype=torch.int64, device=device)
        slots = (place[:, :, None] * block_size + torch.arange(block_size, device=device)).flatten(1)[:, :n]
        for b in range(batch):
            write_rows(self.cache, self.records, latent[b, 0], rotary[b, 0], slots[b])
        self.newest = latent[:, 0, -1], rotary[:, 0, -1], slots[:, -1].contiguous()

    def write(self) -> None:
        """Write the newest row of every request once more; a block that it fills gets its teams."""
        write_rows(self.cache, self.records, *self.newest)

    def where(self, sampling: PagedSampling) -> tuple[Any, ...]:
        """The step's arguments but for the results'."""
        return self.query, self.cache, self.records, self.table, self.lengths, sampling


@dataclass
class Method:
    """Paged attention of a case with scratch of its own; ``writing``: with the launch that writes rows before."""

    case: PagedCase
    sampling: PagedSampling
    writing: bool = False
    scratch: PagedScratch = field(default_factory=PagedScratch)

    def __call__(self) -> Tensor:
        if self.writing:
            self.case.write()
        return paged_attention(*self.case.where(self.sampling), self.case.counts, None, self.scratch)


def contiguous_sampling(sampling: PagedSampling) -> Sampling:
    """The same settings for a contiguous cache."""
    return Sampling(sampling.teams_per_head, sampling.estimator, sampling.noise, sampling.parents_per_head)


def checked(want: Any, method: Method) -> float:
    """The largest relative difference of a head's output from the contiguous kernels'; different counts are printed."""
    counts = method.case.counts.zero_()
    got = method().float()
    counted = torch.stack((want.routing[:, 0], want.union[:, 0], want.suffix[:, 0], 0 * want.suffix[:, 0]), 1)
    if not torch.equal(counts, counted):
        print(f"  ROWS DIFFER: paged {counts[0].tolist()}, contiguous {counted[0].tolist()}")
    return float(((got - want.out[:, 0]).norm(dim=-1) / want.out[:, 0].norm(dim=-1)).max())


def stages(step: DecodeStep, case: PagedCase, sampling: PagedSampling) -> dict[str, dict[str, Launch]]:
    """The single launches of both, in order."""
    plain = launches_of(step, contiguous_sampling(sampling), Workspace())
    paged = PagedLaunches(*case.where(sampling), PagedScratch())
    out = torch.empty_like(case.query[0])
    return {
        "contiguous": {**plain.routing(), "attend": plain.attend, "combine": plain.combine},
        "paged": {**paged.routing(), "attend": paged.attend, "combine": lambda: paged.combine(out, case.counts)},
    }


def measured(args: argparse.Namespace, clock: Any, batch: int, step: DecodeStep) -> dict[str, Any]:
    """One workload: checks, whole steps in paired rounds, and single launches."""
    cases = {str(size): PagedCase(step, size) for size in args.blocks}
    if args.wide:
        cases[f"{args.blocks[0]} wide"] = PagedCase(step, args.blocks[0], args.wide)
    found: dict[str, Any] = {"batch": batch, "rows": step.rows.length, "heads": args.heads, "k": args.k}
    methods: dict[str, Launch] = {}
    for estimator, k1 in itertools.product(args.estimators, (None, *args.parents)):
        fields = {"teams_per_head": args.k, "heads_in_model": args.heads, "scale": step.scale}
        sampling = PagedSampling(estimator=estimator, parents_per_head=k1, **fields)
        setting = estimator if k1 is None else f"{estimator} K1={k1}"
        workspace, sampled = Workspace(), contiguous_sampling(sampling)
        want = sampled_attention(step, sampled, workspace)

        def contiguous(sampled: Sampling = sampled, workspace: Workspace = workspace) -> object:
            return sampled_attention(step, sampled, workspace)

        methods[f"{setting}: contiguous"] = clock.captured(contiguous)
        for name, case in cases.items():
            variants = {"": Method(case, sampling), ", writing": Method(case, sampling, True)}
            if k1 is None:
                many = {n: Method(case, sampling, scratch=PagedScratch(programs=n)) for n in args.programs}
                variants |= {f", {n} programs": method for n, method in many.items()}
            found[f"difference {setting} {name}"] = checked(want, variants[""])
            for variant, method in variants.items():
                methods[f"{setting}: blocks of {name}{variant}"] = clock.captured(method)
    times = clock.paired(methods)
    found["times"] = {name: statistics.median(medians) for name, medians in times.items()}
    found["rounds"] = times
    found["stages"] = {}
    for k1 in (None, *args.parents[:1]) if args.stages else ():
        sampling = PagedSampling(
            teams_per_head=args.k, heads_in_model=args.heads, scale=step.scale, parents_per_head=k1
        )  # fmt: skip
        for name, launches in stages(step, cases[str(args.blocks[0])], sampling).items():
            for launch in launches.values():  # what a launch reads must have been written
                launch()
            timed = clock.paired({stage: clock.captured(launch) for stage, launch in launches.items()}, in_order=True)
            found["stages"][name if k1 is None else f"{name} K1={k1}"] = {
                stage: statistics.median(medians) for stage, medians in timed.items()
            }
    return found


def show(found: dict[str, Any]) -> None:
    """A workload's table; the last column is the time over the contiguous kernels'."""
    print(f"batch {found['batch']}, {found['rows']} rows, {found['heads']} heads, K={found['k']}")
    differences = [f"{name[11:]} {value:.0e}" for name, value in found.items() if name.startswith("difference")]
    print("  differences: " + ", ".join(differences))
    for name, time in found["times"].items():
        print(f"  {name:48s} {time:8.1f} {time / found['times'][name.split(':')[0] + ': contiguous']:6.2f}")
    for name, timed in found["stages"].items():
        print(f"  {name}:" + "".join(f" {stage} {time:.1f}" for stage, time in timed.items()), flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file of all times")
    parser.add_argument("--workloads", nargs="+", default=["1x32768"], metavar="BxN", help="requests x rows of each")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--k", type=int, default=32, help="K, teams per head")
    parser.add_argument("--parents", type=int, nargs="*", default=[], help="K1 of two stages, to time as well")
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 64], help="rows of a block")
    parser.add_argument("--estimators", nargs="+", default=["per_head", "pooled"], choices=["per_head", "pooled"])
    parser.add_argument("--programs", type=int, nargs="*", default=[], help="routing programs per processor to try")
    parser.add_argument("--wide", type=int, default=0, help="also time a block table that has room for so many rows")
    parser.add_argument("--stages", action="store_true", help="also time single launches")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--observations", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5)
    args = parser.parse_args()
    clock = DeviceClock(Rounds(args.rounds, args.observations, args.warmup), torch.device("cuda"))
    results = []
    for workload in args.workloads:
        batch, context = map(int, workload.split("x"))
        step = contiguous_step(Size("mla", args.heads, 1, context, batch), "cuda")
        results.append(measured(args, clock, batch, step))
        show(results[-1])
        args.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
