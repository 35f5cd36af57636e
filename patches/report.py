"""The text of ``santa.report()``: settings, calls and the ledger."""

from __future__ import annotations

import io
from collections import Counter
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from latent_santa.config import SantaConfig
from latent_santa.methods import METHODS

from .calls import Kind
from .control import Control
from .graphs import StepGraphs

if TYPE_CHECKING:
    from .handle import SantaHandle

EQUATIONS = {"mla": "Equation 14", "gqa": "Equation 13"}
# heads that share a row from which one draw for all of them is recommended
MANY_HEADS = 64
COLUMNS = ("layer", "calls", "routing", "union", "suffix", "dense", "percent", "w/o routing", "bytes %")


def report(handle: SantaHandle, control: Control) -> str:
    """What the handle's model did since the last reset."""
    stream = io.StringIO()
    console = Console(file=stream, width=80, color_system=None)
    state = "patched" if handle.patched else "no longer patched"
    title = f"{type(handle.model).__name__}: {handle.layers} {handle.layout.upper()} layers {state}"
    console.print(f"{title}, {_described(handle.config)}")
    console.print(
        f"calls: {handle.prefill_calls} prefill, {handle.sparse_calls} sparse ({control.count(Kind.REPLAY)} replays, "
        f"{handle.full_calls} with every team selected), {handle.dense_calls} dense"
    )
    peers = control.adapters[0].peers
    if peers is not None:
        console.print(f"heads spread over {peers.world} processes; the rows are the whole model's")
    if handle.graphs.mode != "off":
        console.print(f"graphs: {_graphs(handle.graphs)}")
    if handle.compiled:
        console.print(f"compiled: {handle.compiled} parts in calls of one token; outputs differ by rounding")
    if handle.exact_parts:
        console.print(f"own kernels: {handle.exact_parts} parts in calls of few tokens, with the model's bits")
    for line in _notes(handle, control):
        console.print(line)
    equation = EQUATIONS.get(handle.layout, "units of its layout")
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
        title=f"rows read by decoding calls ({equation}); logical access, not time",
    )
    summary = handle.access.as_dict()
    # a scan that read the keys of attended rows: what it would cost to know them without the scan
    bounds = summary["totals"]["bound"] != summary["totals"]["row_read"]
    for column in (*COLUMNS, *(["bound"] if bounds else [])):
        table.add_column(column, justify="right")
    for entry in (*summary["per_layer"], {"layer": "all", **summary["totals"]}):
        percents = [entry["percent"], entry["percent_without_routing"], entry["bytes_percent"]]
        percents += [entry["percent_bound"]] if bounds else []
        table.add_row(
            *(str(entry[name]) for name in COLUMNS[:6]),
            *("-" if value is None else f"{value:.2f}" for value in percents),
        )
    # numbers are never cut: counts of many digits make the table wider than the text above it
    Console(file=stream, width=200, color_system=None).print(table)
    return stream.getvalue()


def _graphs(graphs: StepGraphs) -> str:
    made = f"{graphs.replayed} steps replayed"
    if graphs.captured:
        made += f", {graphs.captured} captured in {graphs.seconds:.1f} s"
    eager = [f"{count} launch by launch: {reason}" for reason, count in graphs.eager.most_common()]
    return "; ".join([made, *eager])


def _described(config: SantaConfig) -> str:
    used = config.used()
    parts = [f"method {config.method}"]
    if "parents" in used:
        parts += [f"{config.parents} parents", f"P={config.parent_size}"]
    if "representatives" in used:
        parts.append(f"R={config.representatives}")
    if "budget" in used:
        parts.append(f"S={config.budget} (K={config.teams_per_head})")
    if "hash_bits" in used:
        parts.append(f"K={config.hash_bits} bits, L={config.hash_tables} tables")
    if "estimator" in used:
        parts.append(config.estimator)
    if used.get("routing") == "two_stage":
        parts.append(f"two-stage routing (K1={config.parents_per_head}, {config.parent_summary})")
    if used.get("exact_first") or used.get("exact_last"):
        parts.append(f"first {config.exact_first} and last {config.exact_last} rows exact")
    if used.get("routing_dtype", "model") != "model":
        parts.append(f"{config.routing_dtype} routing keys")
    if "noise" in used:
        parts.append(f"{config.noise} noise")
    if "regroup_after" in used:
        after = METHODS[config.method].regroup_after(config)
        parts.append(f"generated rows grouped at {after}" if after else "generated rows exact")
    return ", ".join(parts)


def _notes(handle: SantaHandle, control: Control) -> list[str]:
    notes = []
    counted = {
        config: made for config, made in control.calls.items() if any(made[kind] for kind in Kind if kind.counted)
    }
    if len(counted) > 1:
        notes.append(f"counts and rows below add up {len(counted)} settings since the last reset():")
        notes += [f"  {_calls(made)}: {_described(config)}" for config, made in counted.items()]
    elif counted and handle.config not in counted:
        ((config, made),) = counted.items()
        notes.append(f"counts and rows below are of other settings than these: {_calls(made)}: {_described(config)}")
    if handle.prefill_calls and not counted:
        notes.append(
            "every call was a dense prefill: nothing was sampled. A call over prompt and continuation scores densely; "
            "santa.score(input_ids, continuation) scores token by token"
        )
    heads = control.adapters[0].module.config.num_attention_heads
    sampled_apart = handle.config.used().get("noise") == "independent"
    if handle.layout == "mla" and heads >= MANY_HEADS and sampled_apart:
        notes.append(
            f'{heads} heads share each row, and each draws by itself: preset="many_heads" (one draw for all heads, '
            "pooled, two stages) is faster at no larger attention error"
        )
    return notes


def _calls(made: Counter[Kind]) -> str:
    sampled = made[Kind.DECODE] + made[Kind.REPLAY]
    return f"{sampled} sparse and {made[Kind.DENSE] + made[Kind.VERIFY]} dense calls"
