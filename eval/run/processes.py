"""Several processes on one evaluation, as accelerate and torchrun start them: who am I, and waiting for the others.

They share the prompts, each with a model of its own, or hold one model together (tensor parallelism).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among `world`; process `rank` takes every world-size-th prompt, starting with its own number.

    `local_rank` and `local_world` count the processes of this machine. Where they hold one model `together`, each takes
    every prompt, and the first alone writes.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    together: bool = False

    @property
    def first(self) -> bool:
        """Whether this process freezes the prompts, merges results and writes reports."""
        return self.rank == 0

    @property
    def writes(self) -> bool:
        """Whether this process writes the results of its prompts."""
        return self.first or not self.together

    @property
    def places(self) -> tuple[int, int]:
        """This process's place among those that have prompts of their own, and how many these are."""
        return (0, 1) if self.together else (self.rank, self.world)

    def own(self, prompts: Sequence[T]) -> list[T]:
        """The prompts that this process answers."""
        place, count = self.places
        return list(prompts[place::count])

    def wait(self) -> None:
        """Return when every process has called this as often as this one."""
        if self.world > 1:
            import torch
            import torch.distributed

            torch.distributed.all_reduce(torch.zeros(()))  # on the CPU: a barrier would ask for a GPU where there are

    def share(self, text: str) -> str:
        """The first process's text, in every process."""
        if self.world == 1:
            return text
        import torch.distributed

        box = [text]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def close(self) -> None:
        """Leave the group, so that the program ends without a warning."""
        if self.world > 1:
            import torch.distributed

            torch.distributed.destroy_process_group()


def join(together: bool = False) -> Processes:
    """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE and join the group.

    Where each process has a model, nothing but waiting and a path goes between them, so the group uses gloo, on GPU
    machines too: no time limit of minutes while one process still generates, and several processes may share a GPU.
    Where they hold one model together, its tensors on GPUs go through NCCL.
    """
    world = started()
    if world == 1:
        return Processes()
    import torch
    import torch.distributed

    local_rank, local_world = (int(os.environ.get(f"LOCAL_{name}", n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1)))
    backend = "gloo"
    if together and torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(backend, timeout=timedelta(days=7))
    return Processes(int(os.environ["RANK"]), world, local_rank, local_world, together)


def started() -> int:
    """How many processes the launcher started, on all machines."""
    return int(os.environ.get("WORLD_SIZE", "1"))
