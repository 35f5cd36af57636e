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


@triton.jit
def wait_then_start(PDL: tl.constexpr):
    """As :func:`wait`, but the next kernel starts after the wait, and finds what was written before this one."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def ask_for(rows, width, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """Let the first ``width`` (at most WIDTH) numbers behind each pointer come into the L2 cache, before a wait for
    other inputs. Does nothing without programmatic dependent launch."""
    if PDL:
        LINE: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth  # 128 bytes
        i_number = tl.arange(0, triton.next_power_of_2(triton.cdiv(WIDTH, LINE))) * LINE
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l,r",
            [rows[:, None] + i_number[None, :], (i_number < width)[None, :].to(tl.int32)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
