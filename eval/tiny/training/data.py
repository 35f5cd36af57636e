"""Batches of training samples, made in worker processes or in place."""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Callable
from pathlib import Path
from queue import Full
from random import Random
from typing import Any, NamedTuple

import numpy as np

from ..encoder import PAD, PieceEncoder
from .curriculum import mix
from .samples import KINDS, Sampler, training_prose


class Batch(NamedTuple):
    """ids (B, L) uint16; targets: flat positions (B * L) of answer tokens, int32; kinds: each target's kind, int8."""

    ids: np.ndarray
    targets: np.ndarray
    kinds: np.ndarray


class BatchMaker:
    """Makes batch `number` at a progress: a function of (seed, number, progress) alone.

    Every batch holds about `tokens` tokens of one sequence length, whatever the length.
    """

    def __init__(self, tokenizer_file: Path, tokens: int, seed: int, longest: int | None = None) -> None:
        from tokenizers import Tokenizer

        self._sampler = Sampler(PieceEncoder(Tokenizer.from_file(str(tokenizer_file))), training_prose())
        self._tokens, self._seed, self._longest = tokens, seed, longest

    def make(self, number: int, progress: float) -> Batch:
        """The batch; sequences are padded with PAD at the end."""
        rng = Random(f"{self._seed}/{number}")
        now = mix(progress, self._longest)
        length = rng.choices(list(now.lengths), weights=list(now.lengths.values()))[0]
        count = max(1, self._tokens // length)
        ids = np.full((count, length), PAD, np.uint16)
        targets, kinds = [], []
        for row in range(count):
            sample = self._sampler.sample(rng, length, now)
            ids[row, : len(sample.ids)] = sample.ids
            for start, end in sample.answers:
                targets.append(np.arange(row * length + start, row * length + end, dtype=np.int32))
                kinds.append(np.full(end - start, KINDS.index(sample.kind), np.int8))
        return Batch(ids, np.concatenate(targets), np.concatenate(kinds))


class Feed:
    """Batches `first`, `first + 1`, ... from `workers` processes (0: in place, in order).

    `progress` is read when a batch is made; with workers, batches come in the order in which they are ready.
    """

    def __init__(self, maker: BatchMaker, workers: int, first: int = 0, progress: float = 0.0) -> None:
        self._maker, self._next = maker, first
        self._progress = mp.Value("d", progress)
        self._workers: list[Any] = []
        if workers:
            context = mp.get_context("fork")
            self._queue = context.Queue(maxsize=3 * workers)
            for place in range(workers):
                arguments = (maker.make, self._queue, self._progress, first + place, workers)
                worker = context.Process(target=_work, args=arguments, daemon=True)
                worker.start()
                self._workers.append(worker)

    def set_progress(self, progress: float) -> None:
        """Tell the makers how far training is (0 to 1)."""
        self._progress.value = progress

    def get(self) -> Batch:
        """The next batch."""
        if self._workers:
            batch: Batch = self._queue.get(timeout=120)
            return batch
        self._next += 1
        return self._maker.make(self._next - 1, self._progress.value)

    def close(self) -> None:
        """Stop the workers."""
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.join()
        self._workers = []


def _work(make: Callable[[int, float], Batch], queue: Any, progress: Any, number: int, stride: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    parent = os.getppid()
    while True:
        batch = make(number, progress.value)
        while True:  # a parent that was killed cannot stop its workers: they notice
            try:
                queue.put(batch, timeout=5)
                break
            except Full:
                if os.getppid() != parent:
                    queue.cancel_join_thread()
                    return
        number += stride
