"""What a device offers: processors, shared memory, and launches that overlap the end of the one before."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device; a small number stands for the interpreter."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use."""
    if device.type != "cuda":
        return 1 << 20
    found = torch.cuda.get_device_properties(device)
    # every device from compute capability 8.0 on lets a program ask for 99 KiB
    return int(getattr(found, "shared_memory_per_block_optin", 99 << 10))


@functools.cache
def launches_early(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch (compute capability 9.0)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait(PDL: tl.constexpr):
    """Programmatic dependent launch: let the next kernel start, then wait for the writes of the previous one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
