"""The access ledger: logical reads of decoding calls, Equations 13 (GQA) and 14 (MLA)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from .count_ring import CountRing
from .rows import Rows
from .teams import Teams

FIELDS = ("routing", "union", "suffix", "dense")
PACK = 256


@dataclass(frozen=True)
class Unit:
    """What one counted row costs, in vectors.

    GQA reads a key and a value per attended row and a key per representative (Equation 13). In MLA one row is one unit
    in either pass (Equation 14). The bytes are those of one such row in memory; routing keys may be held in fewer bits
    than the cache. A method that reads a part of a key, or bits in its place, counts it as an exact fraction.
    """

    routing: int | Fraction
    row: int
    dense: int
    routing_bytes: int | Fraction = 0
    row_bytes: int = 0
    dense_bytes: int = 0


MLA_UNIT = Unit(1, 1, 1)
GQA_UNIT = Unit(1, 2, 2)
# a scan reads every key; what it samples costs a value more in GQA, and nothing more in MLA, where it is the same row
MLA_SCAN_UNIT = Unit(1, 0, 1)
GQA_SCAN_UNIT = Unit(1, 1, 2)


def attended_unit(rows: Rows, teams: Teams | None) -> Unit:
    """Costs where representatives are scored and the rows of selected teams attended."""
    key, value = _row_bytes(rows)
    routing = 0 if teams is None else sum(part.bytes() for part in teams.routing_keys) // teams.sizes.numel()
    unit = replace(GQA_UNIT if value else MLA_UNIT, row_bytes=key + value, dense_bytes=key + value)
    return replace(unit, routing_bytes=routing)


def partial_unit(rows: Rows, routing_bytes: Fraction) -> Unit:
    """Costs where choosing reads ``routing_bytes`` instead of a key: as a vector, their share of a key's bytes."""
    key, _ = _row_bytes(rows)
    return replace(attended_unit(rows, None), routing=routing_bytes / key, routing_bytes=routing_bytes)


def scanned_unit(rows: Rows) -> Unit:
    """Costs where every key is scored and sampled rows are read for their values."""
    key, value = _row_bytes(rows)
    unit = GQA_SCAN_UNIT if value else MLA_SCAN_UNIT
    return replace(unit, routing_bytes=key, row_bytes=value, dense_bytes=key + value)


def _row_bytes(rows: Rows) -> tuple[int, int]:
    """Bytes of a row's key and of its value beside it; in MLA the value is part of the key."""
    key = sum(part.shape[-1] * part.element_size() for part in rows.keys)
    latent = rows.values is rows.keys[0]
    return key, 0 if latent else rows.values.shape[-1] * rows.values.element_size()


class AccessLedger:
    """Row counts of every decoding call, kept on the device until somebody asks.

    One call c of one layer records ``(B, G)`` counts, in the paper's symbols:

    - ``routing``, m_c: vectors scored to choose teams, or what else the method's :class:`Unit` prices as routing;
    - ``union``, u_c: prompt rows of the selected teams, counted once per sharing group;
    - ``suffix``, e_c: rows attended exactly;
    - ``dense``, N_c: rows that dense attention would read.

    Equation 13 (GQA) is sum(m + 2 (u + e)) / sum(2 N), Equation 14 (MLA) sum(m + u + e) / sum(N). Prefill and team
    construction are not counted (Appendix C.1). The bound, sum(u + e) / sum(N) in both layouts, is what a method would
    read that knew which rows to attend; where a scan read their keys already, it is not the access without routing.
    """

    def __init__(self) -> None:
        self._calls: dict[int, list[tuple[Unit, Tensor]]] = {}
        self._waiting: dict[int, CountRing] = {}
        self._lock = threading.RLock()  # threads that generate on one model record into one ledger

    def record(self, layer: int, unit: Unit, routing: Tensor, union: Tensor, suffix: Tensor, dense: Tensor) -> None:
        """Add one call of one layer; counts are integer tensors ``(B, G)``. No synchronisation with the host."""
        entry = torch.stack((routing, union, suffix, dense)).to(torch.int32)[None]
        with self._lock:
            self._fold()
            calls = self._calls.setdefault(layer, [])
            calls.append((unit, entry))
            # fold single entries together, so that a long run does not hold one tensor per call
            last = calls[-PACK:] if len(calls) > PACK else []
            if last and all(u == unit and c.shape[0] == 1 and c.shape[1:] == entry.shape[1:] for u, c in last):
                calls[-PACK:] = [(unit, torch.cat([c for _, c in last]))]

    def step_done(self, ring: CountRing) -> None:
        """One step more has its counts in ``ring``; they are taken when it is full, or when they are needed."""
        with self._lock:
            if any(waiting is not ring for waiting in self._waiting.values()):
                self._fold()  # two caches in turn: calls stay in the order in which they were made
            ring.filled += 1
            self._waiting[id(ring)] = ring
            if ring.filled == ring.slots:
                self._fold()

    def _fold(self) -> None:
        """Take over what waits in rings."""
        for ring in self._waiting.values():
            for layer, unit, entries in ring.take():
                self._calls.setdefault(layer, []).append((unit, entries))
        self._waiting.clear()

    def reset(self) -> None:
        """Forget every count."""
        with self._lock:
            self._fold()
            self._calls.clear()

    def _stretches(self) -> Iterator[tuple[int, int, Unit, Tensor]]:
        """(layer, number of the first call within the layer, unit, ``(C, 4, B, G)`` int64 on the host).

        C calls in a row that are alike, joined on the device: one transfer for all of them.
        """
        with self._lock:
            self._fold()
            recorded = [(layer, list(self._calls[layer])) for layer in sorted(self._calls)]
        for layer, calls in recorded:
            number = 0
            for (unit, *_), alike in groupby(calls, lambda call: (call[0], call[1].shape[1:], call[1].device)):
                stored = torch.cat([entries for _, entries in alike]).cpu().long()
                yield layer, number, unit, stored
                number += len(stored)

    def _entries(self) -> Iterator[tuple[int, int, Unit, Tensor]]:
        """(layer, call number within the layer, unit, ``(4, B, G)`` int64 on the host)."""
        for layer, first, unit, stored in self._stretches():
            for number, entry in enumerate(stored, first):
                yield layer, number, unit, entry

    def totals(self) -> dict[str, Any]:
        """Summed counts: ``calls``, the four row counts, the equation's parts in its own units (``routing_read``,
        ``row_read``, ``numerator``, ``bound`` and ``denominator``), and beside them ``bytes`` and ``dense_bytes``.
        Whole numbers are ints; sums of fractions are rounded to a float once, at the end."""
        return _plain(self._total())

    def _total(self) -> _Total:
        return _sum((unit, entry) for _, _, unit, entry in self._entries())

    @property
    def percent(self) -> float:
        """Equation 14 (MLA) or 13 (GQA): reads including routing, in percent of dense reads, pooled over everything
        recorded by summing numerators and denominators; NaN before the first decoding call."""
        return _percent(self._total(), "numerator")

    @property
    def percent_without_routing(self) -> float:
        """The same without the routing term."""
        return _percent(self._total(), "row_read")

    @property
    def percent_bound(self) -> float:
        """The bound: attended rows in percent of dense rows, whatever it took to choose them."""
        return _percent(self._total(), "bound")

    def per_layer(self) -> list[dict[str, Any]]:
        """Totals and percentages of each layer, in layer order."""
        return self._grouped("layer", 0)

    def per_step(self) -> list[dict[str, Any]]:
        """Totals and percentages of each decoding call, summed over layers, in the order of recording."""
        return self._grouped("step", 1)

    def _grouped(self, name: str, place: int) -> list[dict[str, Any]]:
        groups: dict[int, list[tuple[Unit, Tensor]]] = {}
        for item in self._entries():
            groups.setdefault((item[0], item[1])[place], []).append((item[2], item[3]))
        return [{name: number, **_with_percent(_sum(groups[number]))} for number in sorted(groups)]

    def per_sequence(self) -> list[dict[str, Any]]:
        """Totals and percentages of each sequence of the batch.

        Raises:
            ValueError: the recorded calls had different batch sizes.
        """
        return [{"sequence": b, **_with_percent(total)} for b, total in enumerate(self._sequence_totals(None))]

    def sequence_totals(self, calls: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """:meth:`totals` of each sequence of the batch.

        Args:
            calls: for each sequence, how many calls of every layer count, from the first one recorded, so that a
                sequence that ended before its neighbours is counted as if alone. None counts all calls.

        Raises:
            ValueError: the recorded calls had different batch sizes, or another one than ``calls`` has entries.
        """
        return list(map(_plain, self._sequence_totals(calls)))

    def _sequence_totals(self, calls: Sequence[int] | None) -> list[_Total]:
        stretches = list(self._stretches())
        sizes = sorted({stored.shape[2] for *_, stored in stretches})
        if len(sizes) > 1:
            raise ValueError(f"calls with batch sizes {sizes} were recorded; per_sequence needs one: reset() between")
        if calls is None:
            most = max((first + len(stored) for _, first, _, stored in stretches), default=0)
            calls = [most] * sum(sizes)
        elif sizes and sizes != [len(calls)]:
            raise ValueError(f"calls has {len(calls)} entries, but the recorded calls had a batch of {sizes[0]}")
        limits = torch.tensor(calls, dtype=torch.int64)
        totals = [_nothing() for _ in calls]
        for _, first, unit, stored in stretches:
            counted = torch.arange(first, first + len(stored))[:, None] < limits
            rows = (stored.sum(-1) * counted[:, None]).sum(0)
            for b, total in enumerate(totals):
                _add(total, unit, int(counted[:, b].sum()), rows[:, b].tolist())
        return totals

    def as_dict(self) -> dict[str, Any]:
        """Everything above as plain numbers, ready for JSON."""
        return {
            "totals": _with_percent(self._total()),
            "per_layer": self.per_layer(),
            "per_step": self.per_step(),
        }


_Total = dict[str, int | Fraction]


def _nothing() -> _Total:
    names = ("calls", *FIELDS, "routing_read", "row_read", "numerator", "bound", "denominator", "bytes", "dense_bytes")
    return dict.fromkeys(names, 0)


def _add(total: _Total, unit: Unit, calls: int, rows: Sequence[int]) -> None:
    """Add ``calls`` calls whose summed row counts, in the order of ``FIELDS``, are ``rows``."""
    routing, union, suffix, dense = rows
    total["calls"] += calls
    for name, count in zip(FIELDS, rows, strict=True):
        total[name] += count
    total["routing_read"] += unit.routing * routing
    total["row_read"] += unit.row * (union + suffix)
    total["bound"] += unit.dense * (union + suffix)
    total["denominator"] += unit.dense * dense
    total["bytes"] += unit.routing_bytes * routing + unit.row_bytes * (union + suffix)
    total["dense_bytes"] += unit.dense_bytes * dense
    total["numerator"] = total["routing_read"] + total["row_read"]


def _sum(entries: Any) -> _Total:
    total = _nothing()
    for unit, entry in entries:
        _add(total, unit, 1, entry.flatten(1).sum(1).tolist())
    return total


def _plain(total: _Total) -> dict[str, Any]:
    return {name: int(value) if value == int(value) else float(value) for name, value in total.items()}


def _percent(total: _Total, part: str) -> float:
    return float(100 * total[part] / total["denominator"]) if total["denominator"] else float("nan")


def _with_percent(total: _Total) -> dict[str, Any]:
    # JSON has no NaN: an empty ledger has no percentage
    shares = {"percent": "numerator", "percent_without_routing": "row_read", "percent_bound": "bound"}
    percents = {name: _percent(total, part) if total["denominator"] else None for name, part in shares.items()}
    bytes_percent = float(100 * total["bytes"] / total["dense_bytes"]) if total["dense_bytes"] else None
    return {**_plain(total), **percents, "bytes_percent": bytes_percent}
