"""Rows read, per request and in total, counted on the device and read seldom: Equation 14 for a serving engine.

A step adds its counts per place of the batch. Before the next step they move, on the device, to the slot of the request
that had the place, so that no step waits for a number. A thread reads the slots every second while something happens,
writes the file, and logs a line. The file is replaced at once, so that a worker that dies leaves the last whole one.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# what the kernels count, in the order of their columns; the last are rows of requests that attend to all of theirs
COLUMNS = ("routing", "union", "suffix", "dense_rows")
# finished requests that the file keeps, the latest ones; totals are of all
KEPT = 1000
PERIOD = 1.0


class Ledger:
    """The counts of one process.

    Attributes:
        counts: ``(places, 4)`` int64 on the device, added to by every layer of a step.
    """

    def __init__(
        self,
        places: int,
        layers: int,
        device: torch.device,
        about: dict[str, Any],
        path: str = "",
        log_seconds: float = 0.0,
        say: Callable[[str], None] = print,
    ) -> None:
        self.counts = torch.zeros(places, len(COLUMNS), dtype=torch.int64, device=device)
        slots = 2 * places
        self._table = torch.zeros(slots + 1, len(COLUMNS), dtype=torch.int64, device=device)  # the last is nobody's
        self._slot_of_place = torch.full((places,), slots, dtype=torch.int64, device=device)
        self._layers, self._about, self._path, self._log_seconds, self._say = layers, about, path, log_seconds, say
        self._slots: dict[str, int] = {}
        self._placed: list[str] = []
        self._full: list[tuple[Tensor, dict[str, int]]] = []  # tables that were swapped for empty ones
        self._requests: dict[str, list[int]] = {}  # columns, steps, rows of dense attention
        self._gone = [0] * (len(COLUMNS) + 2)  # of requests that the file has no room for
        self._unsampled: dict[str, list[int]] = {}
        self._steps = 0
        self._untold = True
        self._lock = threading.Lock()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        if path or log_seconds:
            threading.Thread(target=self._watch, name="latent_santa ledger", daemon=True).start()
            atexit.register(self._try_to_write)

    def before_step(self, ids: Sequence[str], rows: Sequence[int], decodes: int) -> None:
        """Note who has which place in the step that follows; the counts of the step before move to their requests.

        Args:
            ids: requests of the batch in its order, those that decode one token first.
            rows: rows that each sees in this step.
            decodes: how many of them decode one token.
        """
        with self._lock:
            self._table.index_add_(0, self._slot_of_place, self.counts)
            self.counts.zero_()
            if list(ids) != self._placed:
                self._place(list(ids))
            self._steps += 1
            for name, seen in zip(ids[:decodes], rows, strict=False):
                request = self._request(name)
                request[-2] += 1
                request[-1] += seen * self._layers

    def unsampled(self, reason: str, rows: int) -> None:
        """Count decoding that vLLM's own dense attention did: one request's step, and the rows it read."""
        with self._lock:
            entry = self._unsampled.setdefault(reason, [0, 0])
            entry[0] += 1
            entry[1] += rows * self._layers

    def _place(self, ids: list[str]) -> None:
        self._placed = ids
        new = [name for name in ids if name not in self._slots]
        if len(self._slots) + len(new) > len(self._table) - 1:
            self._full.append((self._table.clone(), self._slots))
            self._table.zero_()
            self._slots, new = {}, ids
        for name in new:
            self._slots[name] = len(self._slots)
        nobody = len(self._table) - 1
        slots = [self._slots[name] for name in ids] + [nobody] * (len(self._slot_of_place) - len(ids))
        self._slot_of_place.copy_(torch.tensor(slots), non_blocking=True)

    def _request(self, name: str) -> list[int]:
        return self._requests.setdefault(name, [0] * (len(COLUMNS) + 2))

    def as_dict(self) -> dict[str, Any]:
        """Settings, totals, requests and reasons of unsampled decoding, as plain numbers; it waits for the device."""
        with self._lock:
            full, self._full = self._full, []
            now = self._table.clone()
            now.index_add_(0, self._slot_of_place, self.counts)
            slots, steps = dict(self._slots), self._steps
        for table, owners in full:
            read = table.tolist()
            for name, slot in owners.items():
                request = self._request(name)
                request[: len(COLUMNS)] = [a + b for a, b in zip(request, read[slot], strict=False)]
        read = now.tolist()
        with self._lock:
            while len(self._requests) > KEPT and (old := next(iter(self._requests))) not in slots:
                self._gone = [a + b for a, b in zip(self._gone, self._requests.pop(old), strict=True)]
            requests = {name: list(found) for name, found in self._requests.items()}
            unsampled = {reason: list(entry) for reason, entry in self._unsampled.items()}
        for name, slot in slots.items():
            if name in requests:
                found = requests[name]
                found[: len(COLUMNS)] = [a + b for a, b in zip(found, read[slot], strict=False)]
        everyone = [sum(column) for column in zip(self._gone, *requests.values(), strict=True)]
        return {
            **self._about,
            "layers": self._layers,
            "engine_steps": steps,
            "totals": _named(everyone),
            "requests": {name: _named(found) for name, found in requests.items()},
            "unsampled": {reason: {"steps": a, "rows": b} for reason, (a, b) in unsampled.items()},
        }

    def line(self, found: dict[str, Any]) -> str:
        """The totals in one line of a log."""
        total = found["totals"]
        read = "nothing decoded yet" if total["percent"] is None else f"read {total['percent']:.1f} % of dense's rows"
        dense = sum(entry["steps"] for entry in found["unsampled"].values())
        return (
            f"SANTA++: {read} in {total['steps']} decoding steps of {len(found['requests'])} requests (routing "
            f"{total['routing']}, union {total['union']}, suffix {total['suffix']}, dense {total['dense_rows']}); "
            f"{dense} steps were left to vLLM's dense attention"
        )

    def write(self) -> None:
        """Replace the file by what is known now."""
        if not self._path:
            return
        found = self.as_dict()
        target = Path(self._path)
        target.parent.mkdir(parents=True, exist_ok=True)
        spare = target.with_name(f"{target.name}.{os.getpid()}")
        spare.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        os.replace(spare, target)

    def _try_to_write(self) -> None:
        """Write; a file that cannot be written is told of once until it can, and counting goes on."""
        try:
            self.write()
            self._untold = True
        except OSError as error:
            if self._untold:
                self._untold = False
                self._say(f"SANTA++: the row counts cannot be written, and are tried again: {error}")

    def _watch(self) -> None:
        logged, seen, settled, told = time.monotonic(), 0, 0, 0
        while True:
            time.sleep(PERIOD)
            steps = self._steps
            if steps != settled:
                # a step that is still running is looked at once more, after a second without another one
                settled, seen = (steps if steps == seen else settled), steps
                with torch.cuda.stream(self._stream):  # does nothing without a device
                    self._try_to_write()
            if self._log_seconds and steps != told and time.monotonic() - logged >= self._log_seconds:
                logged, told = time.monotonic(), steps
                with torch.cuda.stream(self._stream):
                    self._say(self.line(self.as_dict()))


def _named(found: Sequence[int]) -> dict[str, Any]:
    named: dict[str, Any] = dict(zip((*COLUMNS, "steps", "dense"), found, strict=True))
    read = sum(found[: len(COLUMNS)])
    return {**named, "percent": 100 * read / named["dense"] if named["dense"] else None}
