"""What the operator benchmark times: queries, a cache and its teams, made up or captured from a real model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from latent_santa.eval.errors import EvalError
from latent_santa.noise import noise_keys
from latent_santa.parents import contiguous_parents
from latent_santa.routing_keys import PlainKeys
from latent_santa.rows import Rows
from latent_santa.step import DecodeStep, Draw, Suffix
from latent_santa.teams import Teams, build_teams, freeze_representatives

MLA_DIMS = (512, 64)
FORMAT = 2


@dataclass
class Workload:
    """One decoding call of one layer. ``source`` says where the numbers come from."""

    layout: str
    query: tuple[Tensor, ...]
    rows: Rows
    teams: Teams
    suffix: Suffix
    draw: Draw
    scale: float
    source: str

    @property
    def step(self) -> DecodeStep:
        """The workload as the operators' argument."""
        return DecodeStep(self.query, self.rows, self.teams, self.suffix, self.draw, self.scale)

    @property
    def batch(self) -> int:
        return self.query[0].shape[0]

    @property
    def groups(self) -> int:
        return self.query[0].shape[1]

    @property
    def heads(self) -> int:
        """Query heads a sharing group."""
        return self.query[0].shape[2]

    @property
    def context(self) -> int:
        return self.rows.length

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: a latent with its rotary key, or a key and its value."""
        parts = [*self.rows.keys] + ([] if self.layout == "mla" else [self.rows.values])
        return sum(part.shape[-1] * part.element_size() for part in parts)

    def describe(self) -> dict[str, Any]:
        """Sizes for a table and a file."""
        return {
            "layout": self.layout,
            "batch": self.batch,
            "groups": self.groups,
            "heads": self.groups * self.heads,
            "context": self.context,
            "dims": [part.shape[-1] for part in self.query],
            "dtype": str(self.rows.values.dtype).removeprefix("torch."),
            "query_dtype": str(self.query[0].dtype).removeprefix("torch."),
            "teams": int(self.teams.count.sum()),
            "suffix": self.suffix.index.numel(),
            "source": self.source,
        }


def synthetic(
    layout: str,
    heads: int,
    groups: int,
    context: int,
    batch: int,
    dim: int = 128,
    parent_size: int = 16,
    representatives: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    seed: int = 0,
    spread: float = 2.0,
) -> Workload:
    """Random rows around slowly moving centres, random queries whose scores have standard deviation ``spread``.

    Heads draw nearly disjoint teams of such rows, so the union is about as large as it can be: real heads agree more.

    Args:
        heads: query heads in all; ``groups`` share them (1 for MLA).
        dim: head dimension (GQA); MLA has a latent of 512 and a rotary key of 64.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def part(width: int) -> Tensor:
        centres = normal(batch, groups, -(-context // parent_size), width).to(dtype)
        noise = torch.empty(batch, groups, context, width, dtype=dtype, device=device)
        for b in range(batch):
            noise[b] = normal(groups, context, width).to(dtype)
        return noise.mul_(0.7).add_(centres.repeat_interleave(parent_size, 2)[:, :, :context], alpha=0.7)

    dims = MLA_DIMS if layout == "mla" else (dim,)
    keys = tuple(part(width) for width in dims)
    rows = Rows(keys, keys[0] if layout == "mla" else part(dim))
    query = tuple(normal(batch, groups, heads // groups, width).to(dtype) for width in dims)
    real = torch.ones(1, context, dtype=torch.bool, device=device)
    parents = contiguous_parents(real, parent_size).expand(1, groups, -1)
    built = []
    for b in range(batch):  # one sequence at a time bounds the float32 copies
        one = Rows(tuple(k[b : b + 1] for k in keys), rows.values[b : b + 1])
        built.append(freeze_representatives(build_teams(one.keys[0], parents, representatives), one))
    teams = stacked(built)
    suffix = Suffix(torch.empty(0, dtype=torch.int64, device=device))
    step = torch.full((batch,), context, dtype=torch.int64, device=device)
    draw = Draw(noise_keys(seed, list(range(batch)), device), step, 0)
    return Workload(layout, query, rows, teams, suffix, draw, spread * sum(dims) ** -0.5, "synthetic")


def stacked(built: list[Teams]) -> Teams:
    """Records of single sequences as one batch, padded to the largest team count."""
    most = max(t.M for t in built)

    def join(name: str, fill: int) -> Tensor:
        parts = [getattr(t, name) for t in built]
        width = max(p.shape[-1] for p in parts)
        return torch.cat([pad(p, (0, width - p.shape[-1]), value=fill) for p in parts])

    def keys_of(i: int) -> PlainKeys:
        return PlainKeys(torch.cat([pad(t.routing_keys[i].codes, (0, 0, 0, most - t.M)) for t in built]))

    keys = tuple(keys_of(i) for i in range(len(built[0].routing_keys)))
    bound = [max(t.most_rows(n + 1) for t in built) for n in range(most)]
    return Teams(
        sizes=join("sizes", 0),
        count=torch.cat([t.count for t in built]),
        team_of_row=join("team_of_row", -1),
        representative=join("representative", -1),
        row_bound=bound,
        routing_keys=keys,
    )


def save(workload: Workload, path: Path) -> None:
    """Write a workload for :func:`load`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"format": FORMAT, **_packed(workload)}, path)


def _packed(w: Workload) -> dict[str, Any]:
    assert all(part.scales is None for part in w.teams.routing_keys), "a workload is saved with plain routing keys"
    keys = tuple(part.codes for part in w.teams.routing_keys)
    teams = {name: _cpu(value) for name, value in (vars(w.teams) | {"routing_keys": keys}).items()}
    values = None if w.layout == "mla" else _cpu(w.rows.values)
    return {
        "layout": w.layout, "query": _cpu(w.query), "keys": _cpu(w.rows.keys), "values": values, "teams": teams,
        "suffix": _cpu((w.suffix.index, w.suffix.visible)), "scale": w.scale, "source": w.source,
        "draw": (_cpu(w.draw.key), _cpu(w.draw.step), w.draw.layer),
    }  # fmt: skip


def _cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
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
        rows = Rows(keys, keys[0] if held["values"] is None else held["values"])
        key, step, layer = held["draw"]
        records = held["teams"] | {"routing_keys": tuple(map(PlainKeys, held["teams"]["routing_keys"]))}
        return Workload(
            held["layout"], tuple(held["query"]), rows, Teams(**records), Suffix(*held["suffix"]),
            Draw(key, step, layer), held["scale"], held["source"],
        )  # fmt: skip
    except Exception as error:  # unpickling has no common base for what is wrong with a file
        raise EvalError(
            f"{path} is no workload of format {FORMAT} ({type(error).__name__}): write it again with `latent-santa "
            "bench capture`"
        ) from error
