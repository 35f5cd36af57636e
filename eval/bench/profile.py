"""What each kernel of a decoding step takes of the device: grid, registers, shared memory, occupancy (Table 14).

Numbers come from Triton's compiled objects. Without a GPU the kernels are compiled for compute capability 9.0 and not
launched; the plan of block sizes is then that of an H100 or H200.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from latent_santa.eval.bench.measure import Setting, stages
from latent_santa.eval.bench.workload import Workload

WARP, UNIT = 32, 256  # threads of a warp; registers that a warp is given at a time


@dataclass(frozen=True)
class Device:
    """Limits of a multiprocessor. The defaults are those of compute capability 9.0 (H100, H200), CUDA's guide,
    Table "Technical specifications per compute capability"."""

    processors: int = 132
    registers: int = 65536
    warps: int = 64
    programs: int = 32
    shared: int = 233472  # bytes
    shared_most: int = 232448  # bytes that one program may use
    reserved: int = 1024  # bytes that every program takes besides


@dataclass(frozen=True)
class Compiled:
    """One launch: its kernel, its programs, and what each of them takes."""

    launch: str
    kernel: str
    grid: tuple[int, ...]
    warps: int
    registers: int
    spilled: int  # bytes
    shared: int  # bytes

    @property
    def programs(self) -> int:
        """Programs of the launch (CTAs)."""
        count = 1
        for side in self.grid:
            count *= side
        return count

    def resident(self, device: Device) -> int:
        """Programs that one multiprocessor can hold at once: the tightest of registers, warps, slots and memory."""
        of_warp = -(-self.registers * WARP // UNIT) * UNIT
        by_registers = device.registers // of_warp // self.warps if of_warp else device.programs
        by_memory = device.shared // (self.shared + device.reserved)
        return min(by_registers, device.warps // self.warps, device.programs, by_memory)

    def occupancy(self, device: Device) -> float:
        """Warps in percent of those that the device can hold, with the launch's programs spread evenly: a bound, and no
        measurement."""
        held = min(self.programs, self.resident(device) * device.processors)
        return 100 * held * self.warps / (device.warps * device.processors)


def compiled(workload: Workload, setting: Setting, device: Device) -> list[Compiled]:
    """Every launch of one decoding step, compiled for compute capability 9.0; nothing runs and no GPU is needed.

    workload: on the CPU.

    Raises RuntimeError if Triton interprets its kernels, or cannot compile them.
    """
    from latent_santa.kernels import Workspace
    from latent_santa.kernels.support import interpreting

    if interpreting():
        raise RuntimeError("TRITON_INTERPRET=1 compiles nothing: unset it")
    found: list[tuple[str, tuple[int, ...], Any]] = []
    with _compiling(found, device):
        launches = stages(workload, setting, Workspace())
        order = []
        for name, launch in launches.items():
            before = len(found)
            launch()
            order += [name] * (len(found) - before)
    return [
        Compiled(name, kernel, grid, made.metadata.num_warps, *_registers(made), made.metadata.shared)
        for name, (kernel, grid, made) in zip(order, found, strict=True)
    ]


@contextmanager
def _compiling(found: list[tuple[str, tuple[int, ...], Any]], device: Device) -> Iterator[None]:
    """Launches of this process compile for 9.0 and go into ``found``, with kernels' plans for such a device."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from latent_santa.kernels import launch, launch_two_stage

    class Absent:
        """In the place of CUDA's driver."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, WARP)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    original = JITFunction.run

    def run(kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Any:
        made = original(kernel, *args, grid=grid, warmup=True, **options)
        found.append((kernel.__name__, tuple(grid), made))
        return made

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, "_active", Absent()))
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        for name, value in (
            ("processors", device.processors),
            ("shared_memory", device.shared_most),
            ("launches_early", True),
        ):
            for module in (launch, launch_two_stage):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, lambda _, value=value: value))
        yield


def _registers(made: Any) -> tuple[int, int]:
    """Registers per thread and spilled bytes of a compiled kernel, from ptxas, which comes with Triton."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(made.asm["ptx"])
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(source), "-o", str(Path(folder) / "kernel.cubin")]
        done = subprocess.run(command, capture_output=True, text=True)
    used = re.search(r"Used (\d+) registers", done.stderr)
    spilled = re.search(r"(\d+) bytes spill stores", done.stderr)
    if used is None or spilled is None:
        raise RuntimeError(f"ptxas says nothing of registers: {done.stderr.strip()[:300]}")
    return int(used.group(1)), int(spilled.group(1))
