"""Paired timing with a cold L2 cache (Appendix E) and the bootstrap interval of a ratio."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

Launch = Callable[[], object]


@dataclass(frozen=True)
class Protocol:
    """How much is measured.

    Attributes:
        rounds: paired rounds; the order of the methods is reversed between adjacent ones.
        observations: timed calls a method and round.
        warmup: untimed calls a method before every round.
        evict: MiB read and written before every timed call, outside the timed interval.
    """

    rounds: int = 20
    observations: int = 100
    warmup: int = 20
    evict: int = 256


class Evictor:
    """Reads and writes a buffer larger than L2, so that the next call finds none of its inputs there."""

    def __init__(self, mib: int, device: torch.device) -> None:
        self.buffer = torch.zeros(max(mib, 1) * (1 << 18), dtype=torch.int32, device=device)

    def __call__(self) -> None:
        self.buffer.add_(1)


def observe(launch: Launch, evict: Evictor, count: int) -> list[float]:
    """Microseconds between events around each of ``count`` calls, each after an eviction."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for start, end in events:
        evict()
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return [1000 * start.elapsed_time(end) for start, end in events]


def paired(methods: dict[str, Launch], protocol: Protocol, evict: Evictor) -> dict[str, list[float]]:
    """Each method's round medians in microseconds; methods take turns call by call."""
    medians: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(protocol.rounds):
        order = list(methods) if number % 2 == 0 else list(reversed(methods))
        for name in order:
            for _ in range(protocol.warmup):
                methods[name]()
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in methods}
        for _ in range(protocol.observations):
            for name in order:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                evict()
                start.record()
                methods[name]()
                end.record()
                events[name].append((start, end))
        torch.cuda.synchronize()
        for name, pairs in events.items():
            medians[name].append(1000 * statistics.median(start.elapsed_time(end) for start, end in pairs))
    return medians


def ratio_interval(slow: list[float], fast: list[float], resamples: int = 10_000) -> tuple[float, float, float]:
    """Ratio of two methods' medians of round medians, and its 95% bootstrap interval over paired rounds."""
    point = statistics.median(slow) / statistics.median(fast)
    generator = random.Random(0)
    rounds = range(len(slow))
    ratios = []
    for _ in range(resamples):
        picked = generator.choices(rounds, k=len(rounds))
        ratios.append(statistics.median(slow[i] for i in picked) / statistics.median(fast[i] for i in picked))
    ratios.sort()
    return point, ratios[int(0.025 * resamples)], ratios[int(0.975 * resamples)]


def captured(launch: Launch, warm: int = 3) -> Launch:
    """A CUDA graph of one call; the result replays it."""
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

    def replay(_: object = kept) -> None:
        graph.replay()

    return replay


def copy_bandwidth(device: torch.device, gib: int = 2) -> float:
    """Bytes a second of a device-to-device copy, read plus written: the ceiling that times are set against."""
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
