"""What the operator benchmark times: one decoding step of one layer, made up or captured from a real model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from latent_santa.eval.errors import EvalError
from latent_santa.integers import ceil_div
from latent_santa.noise import noise_keys
from latent_santa.parent_records import ParentRecords, summarised
from latent_santa.parents import contiguous_parents
from latent_santa.routing_keys import PlainKeys, RoutingKeys
from latent_santa.rows import Rows
from latent_santa.step import DecodeStep, Draw, Suffix
from latent_santa.teams import Teams, build_teams, freeze_representatives

MLA_DIMS = (512, 64)
FORMAT = 3


@dataclass(frozen=True)
class Workload:
    """One decoding step of one layer, which has teams. ``source`` says where the numbers come from."""

    step: DecodeStep
    source: str

    @property
    def layout(self) -> str:
        """``"mla"``: two key parts, of which the first is the value too; or ``"gqa"``."""
        return "mla" if len(self.step.rows.keys) == 2 else "gqa"

    @property
    def teams(self) -> Teams:
        """The step's teams."""
        assert self.step.teams is not None
        return self.step.teams

    @property
    def context(self) -> int:
        """Cached rows of one sequence."""
        return self.step.rows.length

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: a latent with its rotary key, or a key and its value."""
        rows = self.step.rows
        parts = rows.keys if self.layout == "mla" else (*rows.keys, rows.values)
        return sum(part.shape[-1] * part.element_size() for part in parts)

    def describe(self) -> dict[str, Any]:
        """Sizes for a table and a file."""
        step = self.step
        return {
            "layout": self.layout,
            "batch": step.batch,
            "groups": step.groups,
            "heads": step.groups * step.heads,
            "context": self.context,
            "dims": [part.shape[-1] for part in step.query],
            "dtype": str(step.rows.values.dtype).removeprefix("torch."),
            "query_dtype": str(step.query[0].dtype).removeprefix("torch."),
            "teams": int(self.teams.count.sum()),
            "suffix": step.suffix.index.numel(),
            "source": self.source,
        }


@dataclass(frozen=True)
class Size:
    """Sizes of a synthetic workload: ``heads`` query heads in all, which ``groups`` share (1 for MLA), ``context`` rows
    of each of ``batch`` sequences, and GQA's head dimension; MLA has a latent of 512 and a rotary key of 64."""

    layout: str
    heads: int
    groups: int
    context: int
    batch: int
    dim: int = 128

    def bytes(self, item: int = 2) -> int:
        """Memory of the cached rows, ``item`` bytes per number."""
        width = sum(MLA_DIMS) if self.layout == "mla" else 2 * self.dim
        return self.batch * self.groups * self.context * width * item


def synthetic(
    size: Size,
    parent_size: int = 16,
    representatives: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    seed: int = 0,
    spread: float = 2.0,
    parent_summary: str | None = None,
) -> Workload:
    """Random rows around slowly moving centres, random queries whose scores have standard deviation ``spread``.

    Heads draw nearly disjoint teams of such rows, so the union is about as large as it can be: real heads agree more.
    A ``parent_summary`` adds the records of the parents, for two stages.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    batch, groups, context = size.batch, size.groups, size.context

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def part(width: int) -> Tensor:
        centres = normal(batch, groups, ceil_div(context, parent_size), width).to(dtype)
        noise = torch.empty(batch, groups, context, width, dtype=dtype, device=device)
        for b in range(batch):
            noise[b] = normal(groups, context, width).to(dtype)
        return noise.mul_(0.7).add_(centres.repeat_interleave(parent_size, 2)[:, :, :context], alpha=0.7)

    dims = MLA_DIMS if size.layout == "mla" else (size.dim,)
    keys = tuple(part(width) for width in dims)
    rows = Rows(keys, keys[0] if size.layout == "mla" else part(size.dim))
    query = tuple(normal(batch, groups, size.heads // groups, width).to(dtype) for width in dims)
    real = torch.ones(1, context, dtype=torch.bool, device=device)
    parents = contiguous_parents(real, parent_size).expand(1, groups, -1)
    built = []
    for b in range(batch):  # one sequence at a time bounds the float32 copies
        one = Rows(tuple(k[b : b + 1] for k in keys), rows.values[b : b + 1])
        teams = freeze_representatives(build_teams(one.keys[0], parents, representatives), one)
        if parent_summary is not None:
            teams = replace(teams, parents=summarised(teams, parents, one, parent_summary))
        built.append(teams)
    suffix = Suffix(torch.empty(0, dtype=torch.int64, device=device))
    now = torch.full((batch,), context, dtype=torch.int64, device=device)
    draw = Draw(noise_keys(seed, list(range(batch)), device), now, 0)
    scale = spread * sum(dims) ** -0.5
    return Workload(DecodeStep(query, rows, stacked(built), suffix, draw, scale), "synthetic")


def stacked(built: list[Teams]) -> Teams:
    """Records of single sequences as one batch, padded to the largest team and parent counts."""
    most = max(t.M for t in built)
    parents = [t.parents for t in built if t.parents is not None]
    return Teams(
        sizes=_joined([t.sizes for t in built]),
        count=torch.cat([t.count for t in built]),
        team_of_row=_joined([t.team_of_row for t in built], -1),
        representative=_joined([t.representative for t in built], -1),
        row_bound=[max(t.most_rows(n + 1) for t in built) for n in range(most)],
        routing_keys=_joined_keys([t.routing_keys for t in built]),
        parents=_stacked_parents(parents) if parents else None,
    )


def _stacked_parents(parents: list[ParentRecords]) -> ParentRecords:
    return ParentRecords(
        summary=parents[0].summary,
        sizes=_joined([p.sizes for p in parents]),
        count=torch.cat([p.count for p in parents]),
        of_team=_joined([p.of_team for p in parents], -1),
        most_teams=max(p.most_teams for p in parents),
        keys=_joined_keys([p.keys for p in parents]),
        spread=tuple(map(_joined, zip(*(p.spread for p in parents), strict=True))),
    )


def _joined(parts: Sequence[Tensor], fill: int = 0) -> Tensor:
    """Tensors ``(1, G, M, ...)`` as one batch, padded to the largest M."""
    most = max(part.shape[2] for part in parts)
    return torch.cat([pad(part, (0, 0) * (part.dim() - 3) + (0, most - part.shape[2]), value=fill) for part in parts])


def _joined_keys(keys: Sequence[tuple[RoutingKeys, ...]]) -> tuple[PlainKeys, ...]:
    return tuple(PlainKeys(_joined([part.codes for part in parts])) for parts in zip(*keys, strict=True))


def save(workload: Workload, path: Path) -> None:
    """Write a workload for :func:`load`.

    Raises:
        EvalError: the file cannot be written.
    """
    step, teams = workload.step, workload.teams
    parents = teams.parents
    content = {
        "format": FORMAT,
        "source": workload.source,
        "query": step.query,
        "keys": step.rows.keys,
        "values": None if workload.layout == "mla" else step.rows.values,
        "teams": vars(teams) | {"routing_keys": _codes(teams.routing_keys), "parents": None},
        "parents": None if parents is None else vars(parents) | {"keys": _codes(parents.keys)},
        "suffix": (step.suffix.index, step.suffix.visible),
        "draw": (step.draw.key, step.draw.step, step.draw.layer),
        "scale": step.scale,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(_cpu(content), path)
    except (OSError, RuntimeError) as error:  # a disk that gets full is the second in torch.save
        if path.is_file():
            path.unlink()  # half of a workload
        raise EvalError(f"--out {path}: cannot be written ({error}); give another --out") from error


def _codes(keys: tuple[RoutingKeys, ...]) -> tuple[Tensor, ...]:
    assert all(part.scales is None for part in keys), "a workload is saved with plain routing keys"
    return tuple(part.codes for part in keys)


def _cpu(value: Any) -> Any:
    """The value with every tensor copied to the CPU: a view would drag its whole buffer into the file."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {name: _cpu(item) for name, item in value.items()}
    return type(value)(_cpu(item) for item in value) if isinstance(value, tuple) else value


def load(path: Path, device: str) -> Workload:
    """Read what ``bench capture`` wrote.

    Raises:
        EvalError: the file is missing or holds something else.
    """
    if not path.exists():
        raise EvalError(f"no workload file {path}: `latent-santa bench capture` writes one")
    try:
        held = torch.load(path, map_location=device, weights_only=True)
        if held["format"] != FORMAT:
            raise ValueError(f"format {held['format']!r}")
        keys = tuple(held["keys"])
        teams, parents = held["teams"], held["parents"]
        if parents is not None:
            parents = ParentRecords(**(parents | {"keys": tuple(map(PlainKeys, parents["keys"]))}))
        step = DecodeStep(
            query=tuple(held["query"]),
            rows=Rows(keys, keys[0] if held["values"] is None else held["values"]),
            teams=Teams(**(teams | {"routing_keys": tuple(map(PlainKeys, teams["routing_keys"])), "parents": parents})),
            suffix=Suffix(*held["suffix"]),
            draw=Draw(*held["draw"]),
            scale=held["scale"],
        )
        return Workload(step, held["source"])
    except Exception as error:  # unpickling has no common base for what is wrong with a file
        raise EvalError(
            f"{path} is no workload of format {FORMAT} ({type(error).__name__}): write it again with `latent-santa "
            "bench capture`"
        ) from error


def with_query(workload: Workload, dtype: torch.dtype) -> Workload:
    """The workload with its query in another dtype."""
    query = tuple(part.to(dtype) for part in workload.step.query)
    return replace(workload, step=replace(workload.step, query=query))
