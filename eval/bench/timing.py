"""Paired timing with a cold L2 cache (Appendix E) and the bootstrap interval of a ratio."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

Launch = Callable[[], object]


@dataclass(frozen=True)
class Rounds:
    """How much is measured.

    Attributes:
        rounds: paired rounds; the order of the methods is reversed between adjacent ones.
        observations: timed calls per method and round.
        warmup: untimed calls per method before every round.
        evict: MiB read and written before every timed call, outside the timed interval.
    """

    rounds: int = 20
    observations: int = 100
    warmup: int = 20
    evict: int = 256


class DeviceClock:
    """Events of one CUDA device around calls, each after a buffer larger than L2 was read and written."""

    def __init__(self, rounds: Rounds, device: torch.device) -> None:
        self.rounds = rounds
        self.buffer = torch.zeros(max(rounds.evict, 1) * (1 << 18), dtype=torch.int32, device=device)

    def captured(self, launch: Launch, warm: int = 3) -> Launch:
        """A CUDA graph of one call; the result launches the graph, and keeps what the call keeps (scratch)."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warm):
                launch()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = launch()

        def graphed(_: object = (kept, launch)) -> None:
            graph.replay()

        return graphed

    def paired(self, methods: dict[str, Launch], in_order: bool = False) -> dict[str, list[float]]:
        """Each method's round medians in microseconds; methods take turns call by call, in reverse every other round
        unless ``in_order``."""
        medians: dict[str, list[float]] = {name: [] for name in methods}
        for number in range(self.rounds.rounds):
            order = list(methods) if in_order or number % 2 == 0 else list(reversed(methods))
            for name in order:
                for _ in range(self.rounds.warmup):
                    methods[name]()
            events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in methods}
            for _ in range(self.rounds.observations):
                for name in order:
                    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    self.buffer.add_(1)
                    start.record()
                    methods[name]()
                    end.record()
                    events[name].append((start, end))
            torch.cuda.synchronize()
            for name, pairs in events.items():
                medians[name].append(1000 * statistics.median(start.elapsed_time(end) for start, end in pairs))
        return medians

    def rotated(self, parts: dict[str, Launch], observations: int) -> dict[str, list[float]]:
        """Each part's round medians in microseconds. The parts before it run first, then L2 is evicted, so that every
        part finds what the ones before it write; which part comes first changes from turn to turn."""
        medians: dict[str, list[float]] = {name: [] for name in parts}
        names = list(parts)
        for _ in range(self.rounds.rounds):
            events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in parts}
            for turn in range(self.rounds.warmup + observations):
                first = turn % len(names)
                for place in (*range(first, len(names)), *range(first)):
                    for before in names[:place]:
                        parts[before]()
                    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    self.buffer.add_(1)
                    start.record()
                    parts[names[place]]()
                    end.record()
                    if turn >= self.rounds.warmup:
                        events[names[place]].append((start, end))
            torch.cuda.synchronize()
            for name, pairs in events.items():
                medians[name].append(1000 * statistics.median(start.elapsed_time(end) for start, end in pairs))
        return medians


def ratio_interval(slow: Sequence[float], fast: Sequence[float], resamples: int = 10_000) -> tuple[float, float, float]:
    """Ratio of two methods' medians of round medians, and its 95 % bootstrap interval over paired rounds."""
    picked = np.random.default_rng(0).integers(0, len(slow), (resamples, len(slow)))
    ratios = np.median(np.asarray(slow)[picked], axis=1) / np.median(np.asarray(fast)[picked], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return statistics.median(slow) / statistics.median(fast), float(low), float(high)


def copy_bandwidth(device: torch.device, gib: int = 2) -> float:
    """Bytes per second of a device-to-device copy, read plus written: the ceiling that times are set against."""
    source = torch.randint(0, 255, (gib << 30,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return 2 * source.numel() / statistics.median(times)
