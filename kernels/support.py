"""What the kernels can run on, asked before anything is launched."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from latent_santa.rows import Rows
from latent_santa.teams import Teams

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_KEY_DIMS = 512
MOST_VALUE_DIMS = 512
MOST_HEADS = 4 * 65536
# the selection compares all candidates (plan.py) with all: 512 compile in ten seconds, 1,024 in more than a minute
MOST_TEAMS_PER_HEAD = 340


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, on the CPU: ``TRITON_INTERPRET=1`` before the first import."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def unavailable(device: torch.device) -> str | None:
    """Why no kernel can run for tensors on ``device``, or None."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed: pip install 'triton>=3.4'"
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


def unsupported(query: tuple[Tensor, ...], rows: Rows, teams: Teams, teams_per_head: int = 1) -> str | None:
    """Why :func:`latent_santa.kernels.sampled_attention` cannot take these inputs, or None when it can.

    Args:
        query: parts ``(B, G, H, D_i)``.
        rows: the cache, one key part (GQA) or two (MLA: content latent and rotary key).
        teams: the prompt's team records.
        teams_per_head: K before the cap by the number of teams.
    """
    values = rows.values
    reason = unavailable(values.device) or unsupported_dtype(values.dtype)
    if reason is not None:
        return reason
    for part in query:
        if part.dtype not in (torch.float32, values.dtype):
            return f"a query part is {part.dtype}: the kernels take float32 or the rows' {values.dtype}"
    if len(rows.keys) > 2 or len(rows.keys) != len(query):
        parts = f"{len(rows.keys)} key parts and {len(query)} query parts"
        return f"{parts}: the kernels take one (GQA) or two (MLA) of each"
    for name, part in (*((f"key part {i}", k) for i, k in enumerate(rows.keys)), ("values", values)):
        if part.stride(-1) != 1:
            return f"{name} has stride {part.stride(-1)} in its last dimension: the kernels need 1"
        if part.dtype != values.dtype:
            return f"{name} is {part.dtype} beside {values.dtype} values: the kernels need one dtype"
    for i, part in enumerate(rows.keys):
        most = MOST_KEY_DIMS if i == 0 else 128
        if part.shape[-1] > most:
            return f"key part {i} has {part.shape[-1]} dimensions: the kernels take at most {most}"
    if values.shape[-1] > MOST_VALUE_DIMS:
        return f"values have {values.shape[-1]} dimensions: the kernels take at most {MOST_VALUE_DIMS}"
    if len(rows.keys) == 2 and values is not rows.keys[0] and values.data_ptr() != rows.keys[0].data_ptr():
        return "two key parts with separate values: the kernels take two parts only where the values are the first one"
    if teams.length > rows.length:
        return f"teams cover {teams.length} rows and the cache holds {rows.length}"
    if len({routed.bits for routed in teams.routing_keys}) > 1:
        return "routing key parts in several formats: the kernels need one"
    for i, routed in enumerate(teams.routing_keys):
        if routed.group & (routed.group - 1):
            return f"routing key part {i} has a scale for {routed.group} dimensions: the kernels need a power of two"
        if routed.scales is None and (routed.codes.dtype != values.dtype or routed.codes.stride(-1) != 1):
            return f"routing key part {i} must be contiguous {values.dtype}, like the rows, or integer codes"
    if teams.M > teams_per_head > MOST_TEAMS_PER_HEAD:
        return f"{teams_per_head} teams a head are to be sampled: the kernels sample at most {MOST_TEAMS_PER_HEAD}"
    if query[0].shape[2] >= MOST_HEADS:
        return f"{query[0].shape[2]} query heads a group: the noise counter holds fewer than {MOST_HEADS}"
    return None
