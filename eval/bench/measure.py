"""One workload measured: checks before timing, then dense methods and sampled settings in the same paired rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from latent_santa.estimator import dense_attention, sampled_attention
from latent_santa.eval.bench.baselines import baselines
from latent_santa.eval.bench.goals import goal_of
from latent_santa.eval.bench.timing import Launch, ratio_interval
from latent_santa.eval.bench.workload import Workload
from latent_santa.eval.errors import EvalError
from latent_santa.kernels import BACKEND, Workspace
from latent_santa.routing_keys import RoutingKeys, quantise_parts
from latent_santa.rows import Rows
from latent_santa.step import Output, Sampling

# the PyTorch twin of a check keeps scores and noise of all heads and teams
MOST_CHECKED = 1 << 27
# draws of which an attention error is the mean
DRAWS = 8


class Clock(Protocol):
    """What measures: :class:`latent_santa.eval.bench.timing.DeviceClock`, or a stand-in in tests."""

    def captured(self, launch: Launch) -> Launch:
        """The call as a CUDA graph."""

    def paired(self, methods: dict[str, Launch], in_order: bool = False) -> dict[str, list[float]]:
        """Each method's round medians, microseconds; ``in_order``: never in reverse."""


@dataclass(frozen=True)
class Setting:
    """One way to run the sampled operator."""

    sampling: Sampling
    routing_dtype: str = "model"

    @property
    def name(self) -> str:
        """As the tables say it."""
        parts = [self.sampling.estimator.replace("_", " ")]
        parts += [f"K1={self.sampling.parents}"] if self.sampling.parents else []
        parts += [f"K={self.sampling.k}"]
        parts += [self.sampling.noise] if self.sampling.shared else []
        parts += [f"routing {self.routing_dtype}"] if self.routing_dtype != "model" else []
        return " ".join(parts)


def quantised(w: Workload, routing_dtype: str) -> Workload:
    """The workload with its routing keys in another representation."""
    teams, parents = w.teams, w.teams.parents
    if parents is not None:
        parents = replace(parents, keys=quantise_parts(parents.keys, routing_dtype, parents.sizes > 0))
    keys = quantise_parts(teams.routing_keys, routing_dtype, teams.sizes > 0)
    return replace(w, step=replace(w.step, teams=replace(teams, routing_keys=keys, parents=parents)))


def operator(w: Workload, setting: Setting, workspace: Workspace) -> Callable[[], Output]:
    """The Triton operator as one call without arguments, as a decoding step makes it: checked once and not each time.

    Raises:
        EvalError: the kernels cannot take the workload.
    """
    reason = BACKEND.reason_not(w.step, setting.sampling)
    if reason is not None:
        raise EvalError(f"{setting.name} of a workload ({w.source}): {reason}")
    return lambda: BACKEND.sampled_attention(w.step, setting.sampling, workspace)


def stages(w: Workload, setting: Setting, workspace: Workspace) -> dict[str, Launch]:
    """The operator's launches one by one, over what the whole operator left in the workspace."""
    from latent_santa.kernels.launch import launches_of

    launches = launches_of(w.step, setting.sampling, workspace)
    return {**launches.routing(), "attend": launches.attend, "combine": launches.combine}


def bytes_read(w: Workload, sampling: Sampling, output: Output) -> dict[str, int]:
    """Bytes that the method must read: routing keys with their sizes, the union's rows and the suffix's."""
    scored, routing = int(output.routing.sum()), 0
    parents = w.teams.parents
    if sampling.parents is not None and parents is not None:
        first = parents.count[parents.count > sampling.parents]
        scored -= int(first.sum()) * parents.vectors
        routing = int(first.sum()) * (parents.vectors * _key_bytes(parents.keys) + 4)
    routing += scored * (_key_bytes(w.teams.routing_keys) + 4)
    rows = {"union": int(output.union.sum()), "suffix": int(output.suffix.sum())}
    return {"routing": routing, **{name: count * w.row_bytes for name, count in rows.items()}}


def _key_bytes(keys: tuple[RoutingKeys, ...]) -> int:
    """Bytes of one routing key."""
    return sum(part.bytes() // part.shape[:3].numel() for part in keys)


def exact(w: Workload) -> Tensor:
    """Dense attention over all rows, ``(B, G, H, V)`` in float32; one sequence at a time bounds the copies."""
    step = w.step
    outs = []
    for b in range(step.batch):
        keys = tuple(part[b : b + 1] for part in step.rows.keys)
        rows = Rows(keys, keys[0] if w.layout == "mla" else step.rows.values[b : b + 1])
        visible = None if step.visible is None else step.visible[b : b + 1]
        outs.append(dense_attention(tuple(q[b : b + 1].float() for q in step.query), rows, visible, step.scale)[0])
    return torch.cat(outs)


def attention_error(w: Workload, launch: Callable[[], Output], want: Tensor) -> float:
    """Relative error of the output against dense attention, mean over heads, sequences and draws."""
    errors = []
    for _ in range(DRAWS):
        w.step.draw.step.add_(1)
        errors.append((launch().out - want).norm(dim=-1) / want.norm(dim=-1))
    w.step.draw.step.sub_(DRAWS)
    return float(torch.stack(errors).mean())


def checked(w: Workload, setting: Setting, launch: Callable[[], Output]) -> tuple[Output, float | None]:
    """The operator's output, and its largest relative error against the PyTorch twin where that fits in memory."""
    got = launch()
    if w.step.batch * w.step.groups * w.step.heads * w.teams.M > MOST_CHECKED:
        return got, None
    want = sampled_attention(replace(w.step, query=tuple(part.float() for part in w.step.query)), setting.sampling)
    error = (got.out - want.out).norm(dim=-1) / want.out.norm(dim=-1)
    return got, float(error.max())


def measure(
    w: Workload, settings: list[Setting], clock: Clock, modes: tuple[str, ...], bandwidth: float, with_stages: bool
) -> dict[str, Any]:
    """Time dense methods and every setting on one workload.

    Args:
        modes: of ``"graph"`` (CUDA graphs) and ``"stream"``.
        bandwidth: bytes per second of a device copy.

    Returns:
        A record ready for JSON. Times are microseconds, medians of round medians.
    """
    dense, missing = baselines(w)
    record: dict[str, Any] = {"workload": w.describe(), "missing": missing, "dense": {}, "sampled": []}
    calls: dict[str, Launch] = dict(dense)
    # each setting has a workspace of its own, so that stages find what their setting left there
    spaces = {setting: Workspace() for setting in settings}
    dense_output = exact(w)
    loads = {setting: quantised(w, setting.routing_dtype) for setting in settings}
    for setting in settings:
        launch = operator(loads[setting], setting, spaces[setting])
        output, error = checked(loads[setting], setting, launch)
        calls[setting.name] = launch
        read = bytes_read(loads[setting], setting.sampling, output)
        record["sampled"].append(
            {"name": setting.name, **asdict(setting.sampling), "routing_dtype": setting.routing_dtype, "error": error,
             "attention_error": attention_error(loads[setting], launch, dense_output),
             "routing_rows": int(output.routing.sum()), "union_rows": int(output.union.sum()), "bytes": read,
             "workspace_bytes": spaces[setting].bytes()}
        )  # fmt: skip
    rows_bytes = w.step.batch * w.step.groups * w.context * w.row_bytes
    for mode in modes:
        methods = {name: clock.captured(call) if mode == "graph" else call for name, call in calls.items()}
        rounds = clock.paired(methods)
        for name in dense:
            time = statistics.median(rounds[name])
            entry = {"us": time, "rounds": rounds[name], "bandwidth_fraction": rows_bytes / (time * 1e-6) / bandwidth}
            record["dense"].setdefault(name, {})[mode] = entry
        for entry in record["sampled"]:
            entry[mode] = _against(entry, rounds, list(dense), bandwidth)
    if with_stages:
        for setting, entry in zip(settings, record["sampled"], strict=True):
            parts = stages(loads[setting], setting, spaces[setting])
            # a stage clears what later ones mark, so in reverse they would be timed on nothing
            rounds = clock.paired({name: clock.captured(call) for name, call in parts.items()}, in_order=True)
            entry["stages_us"] = {name: statistics.median(times) for name, times in rounds.items()}
    _set_goals(record)
    return record


def _against(
    entry: dict[str, Any], rounds: dict[str, list[float]], dense: list[str], bandwidth: float
) -> dict[str, Any]:
    own = rounds[entry["name"]]
    time = statistics.median(own)
    result: dict[str, Any] = {"us": time, "rounds": own}
    result["bandwidth_fraction"] = sum(entry["bytes"].values()) / (time * 1e-6) / bandwidth
    ratios = {}
    for name in dense:
        point, low, high = ratio_interval(rounds[name], own)
        ratios[name] = {"ratio": point, "low": low, "high": high}
    result["ratios"] = ratios
    result["best_dense"] = min(dense, key=lambda name: statistics.median(rounds[name])) if dense else None
    return result


def _set_goals(record: dict[str, Any]) -> None:
    w = record["workload"]
    for entry in record["sampled"]:
        entry["goal"] = goal_of(
            w["layout"], w["heads"], w["batch"], w["context"], entry["estimator"], entry["k"], entry["routing_dtype"],
            entry["parents"] is not None, entry["noise"],
        )  # fmt: skip
