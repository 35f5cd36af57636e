"""PyTorch's threads on a machine that others use too."""

from __future__ import annotations

import os

import pytest
import torch

from latent_santa.eval.run import threads


@pytest.mark.parametrize(
    ("cpus", "load", "processes", "free"),
    [(2, 0.1, 1, 2), (2, 1.2, 1, 1), (2, 9.0, 1, 1), (16, 3.6, 1, 12), (16, 0.2, 4, 4), (2, 0.0, 4, 1)],
)
def test_busy_cpus_are_left_to_others(cpus, load, processes, free):
    assert threads.free_cpus(cpus, load, processes) == free


def test_threads_go_down_to_what_is_free_and_never_up(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8), raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (6.9, 0.0, 0.0), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    threads.use_free_cpus()
    assert asked == [] and capsys.readouterr().err == ""
    monkeypatch.delenv("OMP_NUM_THREADS")
    threads.use_free_cpus()
    assert asked == [1] and "8 CPUs, load 6.9: PyTorch takes 1 thread;" in capsys.readouterr().err
    monkeypatch.setattr(os, "getloadavg", lambda: (1.0, 0.0, 0.0), raising=False)
    threads.use_free_cpus()
    assert asked == [1]
