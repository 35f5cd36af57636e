"""What the kernels can run on, asked before anything is launched."""

from __future__ import annotations

import os

import torch

from latent_santa.routing_keys import RoutingKeys
from latent_santa.step import DecodeStep, Sampling

LEAST_TRITON = (3, 6)  # pyproject.toml's `gpu` extra
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_KEY_DIMS = (512, 256)  # of the first key part, and of the rotary one
MOST_VALUE_DIMS = 512
MOST_HEADS = 4 * 65536


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, on the CPU: ``TRITON_INTERPRET=1`` before the first import."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def unavailable(device: torch.device) -> str | None:
    """Why no kernel can run for tensors on ``device``, or None."""
    try:
        import triton
    except ImportError:
        return "triton is not installed: pip install 'latent-santa[gpu]'"
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < LEAST_TRITON:
        least = ".".join(map(str, LEAST_TRITON))
        return f"triton {triton.__version__} is installed, the kernels need {least}: pip install 'latent-santa[gpu]'"
    if device.type == "cuda":
        if interpreting():
            return "TRITON_INTERPRET=1 runs kernels on CPU tensors only: unset it to use the GPU"
        if torch.cuda.get_device_capability(device) < (8, 0):
            name = torch.cuda.get_device_name(device)
            return f"{name} has compute capability below 8.0, and the kernels need 8.0 or later"
        return None
    if device.type == "cpu" and interpreting():
        return None
    return f"the rows are on {device}: the kernels need a CUDA device (or TRITON_INTERPRET=1 and CPU tensors)"


def unsupported_dtype(dtype: torch.dtype) -> str | None:
    """Why the kernels cannot take rows of ``dtype``, or None when they can."""
    if dtype not in DTYPES:
        return f"rows are {dtype}: the kernels take bfloat16, float16 and float32"
    if dtype == torch.bfloat16 and interpreting():
        return "rows are bfloat16, and Triton's interpreter gets bfloat16 products wrong: use float16 or float32"
    return None


def reason_not(step: DecodeStep, sampling: Sampling) -> str | None:
    """Why :func:`latent_santa.kernels.sampled_attention` cannot run the step, or None when it can.

    The answer depends on devices, dtypes, shapes, strides and formats, and on whether M exceeds K; not on any number
    that a tensor holds. A caller may keep it for as long as these stay the same.
    """
    if step.teams is None:
        return "this step has no teams: the kernels sample teams"
    if sampling.parents is not None and step.teams.parents is None:
        return "two-stage routing needs the parents' records, and these teams carry none"
    values = step.rows.values
    return (
        unavailable(values.device)
        or unsupported_dtype(values.dtype)
        or _unsupported_heads(step)
        or _unsupported_rows(step)
        or _unsupported_teams(step)
        or (_unsupported_parents(step) if two_stages(step, sampling) else None)
    )


def dense_reason_not(step: DecodeStep) -> str | None:
    """Why :func:`latent_santa.kernels.dense.dense_attention` cannot run the step, or None when it can."""
    values = step.rows.values
    return unavailable(values.device) or unsupported_dtype(values.dtype) or _unsupported_rows(step)


def two_stages(step: DecodeStep, sampling: Sampling) -> bool:
    """Whether a first stage leaves parents out; else every team is open, and one stage is all."""
    parents = None if step.teams is None else step.teams.parents
    return sampling.parents is not None and parents is not None and parents.C > sampling.parents


def _unsupported_heads(step: DecodeStep) -> str | None:
    if step.heads >= MOST_HEADS:
        return f"{step.heads} query heads per group: the noise counter holds fewer than {MOST_HEADS}"
    if step.draw.first[1] % 4 or (step.peers is not None and step.heads % 4):  # all processes say the same
        heads = f"{step.heads} heads per process, here from number {step.draw.first[1]} on"
        return f"{heads}: the kernels draw noise for whole quads of heads"
    return None


def _unsupported_rows(step: DecodeStep) -> str | None:
    keys, values = step.rows.keys, step.rows.values
    for part in step.query:
        if part.dtype not in (torch.float32, values.dtype):
            return f"a query part is {part.dtype}: the kernels take float32 or the rows' {values.dtype}"
    if len(keys) > 2 or len(keys) != len(step.query):
        parts = f"{len(keys)} key parts and {len(step.query)} query parts"
        return f"{parts}: the kernels take one (GQA) or two (MLA) of each"
    for name, part in (*((f"key part {i}", part) for i, part in enumerate(keys)), ("values", values)):
        if part.stride(-1) != 1:
            return f"{name} has stride {part.stride(-1)} in its last dimension: the kernels need 1"
        if part.dtype != values.dtype:
            return f"{name} is {part.dtype} beside {values.dtype} values: the kernels need one dtype"
    for i, (part, most) in enumerate(zip(keys, MOST_KEY_DIMS, strict=False)):
        if part.shape[-1] > most:
            return f"key part {i} has {part.shape[-1]} dimensions: the kernels take at most {most}"
    if values.shape[-1] > MOST_VALUE_DIMS:
        return f"values have {values.shape[-1]} dimensions: the kernels take at most {MOST_VALUE_DIMS}"
    if len(keys) == 2 and values is not keys[0] and values.data_ptr() != keys[0].data_ptr():
        return "two key parts with separate values: the kernels take two parts only where the values are the first one"
    return None


def _unsupported_teams(step: DecodeStep) -> str | None:
    teams, values = step.teams, step.rows.values
    assert teams is not None
    if teams.covered > step.rows.length:
        return f"teams cover {teams.covered} rows and the cache holds {step.rows.length}"
    return _unsupported_keys("routing key", teams.routing_keys, values.dtype)


def _unsupported_parents(step: DecodeStep) -> str | None:
    assert step.teams is not None and step.teams.parents is not None
    parents, dtype = step.teams.parents, step.rows.values.dtype
    if step.peers is not None:
        return "two-stage routing over a group's heads on several processes has no kernels"
    wanted = {"isotropic": torch.float32, "diagonal": dtype}
    for i, part in enumerate(parents.spread):
        if part.dtype != wanted[parents.summary] or part.stride(-1) != 1:
            return f"parents' spread {i} must be contiguous {wanted[parents.summary]}, and is {part.dtype}"
    return _unsupported_keys("parents' key", parents.keys, dtype)


def _unsupported_keys(name: str, keys: tuple[RoutingKeys, ...], dtype: torch.dtype) -> str | None:
    if len({part.bits for part in keys}) > 1:
        return f"{name} parts in several formats: the kernels need one"
    for i, part in enumerate(keys):
        if part.bits == 4 and part.group & (part.group - 1):
            return f"{name} part {i} has a scale for {part.group} dimensions: the kernels need a power of two"
        if part.bits == 8 and part.scales is not None and part.scales.shape[-1] > 1:
            return f"{name} part {i} has {part.scales.shape[-1]} scales: the kernels need one in 8 bits"
        if part.scales is None and (part.codes.dtype != dtype or part.codes.stride(-1) != 1):
            return f"{name} part {i} must be contiguous {dtype}, like the rows, or in codes"
    return None
