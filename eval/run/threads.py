"""How many threads PyTorch takes on a CPU that others use too: more threads than free CPUs only wait for each other."""

from __future__ import annotations

import os
import sys

CHOSEN_BY_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def free_cpus(cpus: int, load: float, processes: int = 1) -> int:
    """CPUs that nobody uses, of those that this process may use, shared by so many processes; at least 1.

    load  processes that ran or waited for a CPU over the last minute, on the average
    """
    return max(1, round(cpus - load) // processes)


def use_free_cpus(processes: int = 1) -> None:
    """Let PyTorch use no more threads than CPUs are free, and say so where that is fewer than it would take.

    A number that the user has set is left alone.
    """
    if any(name in os.environ for name in CHOSEN_BY_USER) or not hasattr(os, "getloadavg"):
        return
    import torch

    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = free_cpus(cpus, os.getloadavg()[0], processes)
    if free < torch.get_num_threads():
        torch.set_num_threads(free)
        print(
            f"note: {cpus} CPUs, load {os.getloadavg()[0]:.1f}: PyTorch takes {free} thread{'s' if free > 1 else ''}; "
            "OMP_NUM_THREADS sets another number",
            file=sys.stderr,
        )
