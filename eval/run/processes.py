"""Several processes on one evaluation, as accelerate and torchrun start them: who am I, and waiting for the others."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class Processes:
    """This process among `world`; process `rank` takes every world-size-th prompt, starting with its own number.

    `local_rank` and `local_world` count the processes of this machine.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @property
    def first(self) -> bool:
        """Whether this process freezes the prompts, merges results and writes reports."""
        return self.rank == 0

    def wait(self) -> None:
        """Return when every process has called this as often as this one."""
        if self.world > 1:
            import torch.distributed

            torch.distributed.barrier()

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


def join() -> Processes:
    """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE and join the group.

    Nothing but barriers and a path goes between the processes, so the group uses gloo, on GPU machines too: no time
    limit of minutes while one process still generates, and several processes may share a GPU.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Processes()
    import torch.distributed

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", timeout=timedelta(days=7))
    here = (int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")))
    return Processes(int(os.environ["RANK"]), world, *here)
