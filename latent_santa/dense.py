"""Exact attention over every visible row, straight from the cache, by the fastest operator that this machine has.

This is the dense baseline that sampling has to beat. In MLA queries are absorbed and each latent is read once, as key
and as value; in GQA the heads of a group share one reading of a row. On a CPU, and for float32 rows, plain products do
it. On a GPU there are several operators, and which is fastest depends on shape and release: those that run are timed,
once per shape.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .ahead import Ahead
from .estimator import dense_attention
from .kernels import dense_reason_not
from .step import DecodeStep

log = logging.getLogger("latent_santa")

HALF = (torch.bfloat16, torch.float16)
# whether a product of two half-precision batches may leave float32
MIXED = "dtype" in torch.ops.aten.bmm.overloads()
# more than any GPU's L2: written before a timed call, so that no operator finds its rows there
EVICTED_BYTES = 1 << 28
TIMED = 5
# relative; rounding to bfloat16 stays a few times below
MOST_ERROR = 0.02


@dataclass(frozen=True)
class Seen:
    """A padding mask in the forms that kernels take.

    Attributes:
        start, stop: ``(B,)`` int32, first visible row and the row after the last; no start where it is 0 in every
            sequence, so that kernels need not look for it.
        bias: ``(B, 1, 1, N)`` in the rows' dtype, 0 for visible rows and -inf for others.
        unbroken: whether each sequence's visible rows are one span.
    """

    start: Tensor | None
    stop: Tensor
    bias: Tensor
    unbroken: bool


class Operator:
    """One way to compute exact attention over all visible rows."""

    name: str

    def reason_not(self, step: DecodeStep, seen: Seen | None) -> str | None:
        """Why it cannot run the step, in words for a user; None when it can."""
        raise NotImplementedError

    def attend(self, step: DecodeStep, seen: Seen | None) -> tuple[Tensor, Tensor]:
        """``out (B, G, H, V)`` and ``lse (B, G, H)``, float32."""
        raise NotImplementedError


class Products(Operator):
    """Products, a float32 softmax and a product; half-precision rows are never copied to float32 on a GPU."""

    name = "products"

    def reason_not(self, step: DecodeStep, seen: Seen | None) -> str | None:
        return None

    def attend(self, step: DecodeStep, seen: Seen | None) -> tuple[Tensor, Tensor]:
        rows = step.rows
        if not rows.values.is_cuda or rows.values.dtype not in HALF:
            return dense_attention(step.query, rows, step.visible, step.scale)
        parts = zip(_halved(step), rows.keys, strict=True)
        s = step.scale * sum(_product(query, part.transpose(2, 3)) for query, part in parts)
        assert isinstance(s, Tensor)
        if step.visible is not None:
            s = s.masked_fill(~step.visible[:, None, None], -torch.inf)
        lse = s.logsumexp(-1)
        weights = (s - lse.clamp_min(torch.finfo(s.dtype).min)[..., None]).exp().to(rows.values.dtype)
        return _product(weights, rows.values), lse


class HalfProducts(Operator):
    """The same in the rows' own dtype, as in a model's eager attention: scores are rounded, and passes are short."""

    name = "half products"

    def reason_not(self, step: DecodeStep, seen: Seen | None) -> str | None:
        return _no_half(step)

    def attend(self, step: DecodeStep, seen: Seen | None) -> tuple[Tensor, Tensor]:
        s = None
        for query, part in zip(_halved(step), step.rows.keys, strict=True):
            q, k = query.flatten(0, 1), part.flatten(0, 1).transpose(1, 2)
            s = torch.bmm(q, k) if s is None else torch.baddbmm(s, q, k)
        assert s is not None
        if seen is not None:
            bias = seen.bias[:, 0].repeat_interleave(step.groups, 0)
            s = torch.add(bias, s, alpha=step.scale)
        else:
            s = s.mul_(step.scale)
        weights = s.softmax(-1)  # float32 inside
        top, place = s.max(-1)
        # log Z is the largest score less the logarithm of its weight
        lse = top.float() - weights.gather(-1, place[..., None])[..., 0].float().log()
        shape = (step.batch, step.groups)
        return torch.bmm(weights, step.rows.values.flatten(0, 1)).float().unflatten(0, shape), lse.unflatten(0, shape)


class FlashAttention3(Operator):
    """FlashAttention-3, which takes latents as values and as a second part of the keys."""

    name = "FA3"

    def reason_not(self, step: DecodeStep, seen: Seen | None) -> str | None:
        kernel = _fa3()
        return kernel if isinstance(kernel, str) else _no_span(seen) or _no_half(step)

    def attend(self, step: DecodeStep, seen: Seen | None) -> tuple[Tensor, Tensor]:
        *first, last = (part.flatten(1, 2)[:, None] for part in _halved(step))
        *content, keys = (part.transpose(1, 2) for part in step.rows.keys)
        options: dict[str, Any] = {"qv": first[0]} if content else {}
        if seen is not None:
            options |= {"cache_seqlens": seen.stop}
            options |= {} if seen.start is None else {"cache_leftpad": seen.start}
        values = step.rows.values.transpose(1, 2)
        kernel: Any = _fa3()
        out, lse, *_ = kernel(
            last, keys, values, **options, softmax_scale=step.scale, causal=False, return_softmax_lse=True
        )
        return _grouped(step, out[:, 0], lse)


class CudnnAttention(Operator):
    """cuDNN's attention as PyTorch brings it."""

    name = "cuDNN"

    def reason_not(self, step: DecodeStep, seen: Seen | None) -> str | None:
        if seen is None:
            return "it plans again for every number of rows, which takes longer than a step"
        return _no_latents(step) or _no_half(step)

    def attend(self, step: DecodeStep, seen: Seen | None) -> tuple[Tensor, Tensor]:
        assert seen is not None
        query, rows = _halved(step)[0].flatten(1, 2)[:, :, None], step.rows
        bias = seen.bias.expand(-1, query.shape[1], -1, -1)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, rows.keys[0], rows.values, bias, True, scale=step.scale
        )
        return _grouped(step, out[:, :, 0], lse)


class FlashAttention2(Operator):
    """FlashAttention-2 as PyTorch brings it."""

    name = "FA2"

    def reason_not(self, step: DecodeStep, seen: Seen | None) -> str | None:
        return "it takes no mask" if seen is not None else _no_latents(step) or _no_half(step)

    def attend(self, step: DecodeStep, seen: Seen | None) -> tuple[Tensor, Tensor]:
        query, rows = _halved(step)[0].flatten(1, 2)[:, :, None], step.rows
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, rows.keys[0], rows.values, scale=step.scale
        )
        return _grouped(step, out[:, :, 0], lse)


class SplitRows(Operator):
    """This package's own Triton kernel, which splits the rows of a sequence over the device."""

    name = "split rows"

    def reason_not(self, step: DecodeStep, seen: Seen | None) -> str | None:
        return dense_reason_not(step)

    def attend(self, step: DecodeStep, seen: Seen | None) -> tuple[Tensor, Tensor]:
        from .kernels.dense import dense_attention as split  # imports triton

        return split(step, seen and seen.start, seen and seen.stop, seen is not None and not seen.unbroken)


class FlashMLA(Operator):
    """Here only to say why it is not used."""

    name = "FlashMLA"

    def reason_not(self, step: DecodeStep, seen: Seen | None) -> str | None:
        return "it needs latent and rotary key side by side in pages of 64 rows: a copy of the whole cache per step"


OPERATORS: tuple[Operator, ...] = (
    FlashAttention3(),
    CudnnAttention(),
    FlashAttention2(),
    SplitRows(),
    FlashMLA(),
    HalfProducts(),
    Products(),
)

_chosen: dict[tuple[Any, ...], Operator] = {}
_seen: WeakKeyDictionary[Ahead, dict[torch.device, Seen]] = WeakKeyDictionary()


class _Thread(threading.local):
    # of the thread's last call outside of a capture, which cannot read the mask on the host. What is captured has run
    # before, on the same rows
    unbroken, padded = False, True
    used: str | None = None


_thread = _Thread()


def attend_all(step: DecodeStep) -> tuple[Tensor, Tensor]:
    """Exact attention over all visible rows (Equation 1): ``out (B, G, H, V)`` and ``lse (B, G, H)``, float32."""
    seen = _seen_of(step)
    operator = _operator(step, seen)
    _thread.used = operator.name
    return operator.attend(step, seen)


def last_used() -> str | None:
    """Name of the operator that this thread's last step ran, or captured; None before the first one."""
    return _thread.used


def reasons_not(step: DecodeStep) -> dict[str, str]:
    """Operators that cannot run the step, with the reason."""
    seen = _seen_of(step)
    found = {operator.name: operator.reason_not(step, seen) for operator in OPERATORS}
    return {name: reason for name, reason in found.items() if reason is not None}


def _operator(step: DecodeStep, seen: Seen | None) -> Operator:
    values = step.rows.values
    if not values.is_cuda:
        return OPERATORS[-1]
    shapes = (step.batch, step.groups, step.heads, *(part.shape[-1] for part in step.query), values.shape[-1])
    # rows grow by one a step without a mask: nothing changes before they have doubled
    key = (
        values.device,
        values.dtype,
        shapes,
        step.rows.length.bit_length(),
        seen and (seen.unbroken, seen.start is None),
    )
    if key not in _chosen:
        able = [operator for operator in OPERATORS if operator.reason_not(step, seen) is None]
        if torch.cuda.is_current_stream_capturing():
            return OPERATORS[-1]  # nothing can be timed in a capture; what is captured has run before
        _chosen[key] = _fastest(able, step, seen)
    return _chosen[key]


def _fastest(able: list[Operator], step: DecodeStep, seen: Seen | None) -> Operator:
    """The operator of the least median time on this step. One that fails, or finds another result, is left out."""
    device = step.rows.values.device
    wanted = OPERATORS[-1].attend(step, seen)[0]
    evicted = torch.empty(EVICTED_BYTES, dtype=torch.uint8, device=device)
    times: dict[Operator, float] = {}
    for operator in able:
        spans = []
        try:
            error = float((operator.attend(step, seen)[0] - wanted).norm() / wanted.norm().clamp_min(1e-20))
            if not error <= MOST_ERROR:
                log.warning("dense attention: %s is off by %.1e and is not used", operator.name, error)
                continue
            for _ in range(TIMED):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                evicted.zero_()
                start.record()
                operator.attend(step, seen)
                end.record()
                spans.append((start, end))
            torch.cuda.synchronize(device)
        except (RuntimeError, TypeError) as failure:
            log.warning("dense attention: %s cannot run here (%s)", operator.name, str(failure).partition("\n")[0])
            continue
        times[operator] = median(start.elapsed_time(end) for start, end in spans)
    log.info("dense attention: %s", ", ".join(f"{op.name} {1000 * ms:.0f} us" for op, ms in times.items()))
    return min(times, key=lambda operator: times[operator])


def _seen_of(step: DecodeStep) -> Seen | None:
    """The step's mask, brought into its forms once for all layers of a call."""
    if step.visible is None or not step.visible.is_cuda:
        return None
    ahead, device = step.draw.ahead, step.visible.device
    if ahead is None:
        return _forms(step.visible, step.rows.values.dtype)
    known = _seen.setdefault(ahead, {})
    if device not in known:
        known[device] = _forms(step.visible, step.rows.values.dtype)
    return known[device]


def _forms(visible: Tensor, dtype: torch.dtype) -> Seen:
    place = torch.arange(visible.shape[1], device=visible.device)
    start = torch.where(visible, place, visible.shape[1]).amin(-1)
    stop = torch.where(visible, place + 1, 0).amax(-1)
    if not visible.is_cuda or not torch.cuda.is_current_stream_capturing():
        broken = visible.sum(-1) != (stop - start).clamp_min(0)
        found = torch.stack((broken.any(), start.any())).tolist()  # one wait for both
        _thread.unbroken, _thread.padded = not found[0], found[1]
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
    return Seen(start.int() if _thread.padded else None, stop.int(), bias[:, None, None], _thread.unbroken)


def _halved(step: DecodeStep) -> list[Tensor]:
    """The query's parts in the rows' dtype."""
    return [part.to(step.rows.values.dtype) for part in step.query]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of half-precision ``(B, G, ., .)``, in float32 where PyTorch can."""
    left, right = a.flatten(0, 1), b.flatten(0, 1)
    out = torch.bmm(left, right, out_dtype=torch.float32) if MIXED else torch.bmm(left, right).float()
    return out.unflatten(0, a.shape[:2])


def _grouped(step: DecodeStep, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """A kernel's ``(B, G * H, V)`` and its ``(B, G * H)`` with ones behind, by sharing group in float32."""
    by_group = (step.groups, step.heads)
    return out.float().unflatten(1, by_group), lse.reshape(step.batch, *by_group)


@lru_cache
def _fa3() -> Callable[..., Any] | str:
    """FlashAttention-3's decoding call, or why there is none."""
    reasons = []
    for name in ("fa3_fwd_interface", "flash_attn_interface"):  # from the index, and built from its source
        try:
            kernel: Callable[..., Any] = importlib.import_module(name).flash_attn_with_kvcache
            return kernel
        except (ImportError, AttributeError, OSError) as error:
            reasons.append(f"{name}: {error}")
    return f"it does not import ({'; '.join(reasons)})"


def _no_span(seen: Seen | None) -> str | None:
    return None if seen is None or seen.unbroken else "a sequence's visible rows are no single span"


def _no_half(step: DecodeStep) -> str | None:
    dtype = step.rows.values.dtype
    return None if dtype in HALF else f"it takes rows in half precision, and these are {dtype}"


def _no_latents(step: DecodeStep) -> str | None:
    return None if len(step.query) == 1 else "it takes keys of one part, and no latent that is key and value"
