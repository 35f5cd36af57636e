"""The processes that share the heads of a layer (tensor parallelism), and what they tell one another.

Every method here is an exchange: all processes of the group call it in the same order, with tensors of equal shape.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Peers:
    """A group of processes, each with an equal share of a layer's heads, in the order of their ranks.

    Attributes:
        group: their process group.
        rank: this process's place in it.
        world: how many they are.
    """

    group: Any
    rank: int
    world: int

    def any(self, flags: Tensor) -> Tensor:
        """Where any process's ``flags``, bool, are set."""
        return self.largest(flags.to(torch.uint8)).bool()

    def largest(self, values: Tensor) -> Tensor:
        """The largest of the processes' values, place by place."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def sum(self, values: Tensor) -> Tensor:
        """The sum of the processes' values, place by place."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def _reduced(self, values: Tensor, op: Any) -> Tensor:
        values = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(values, op, group=self.group)
        return values

    def joined(self, part: Tensor, dim: int) -> Tensor:
        """The processes' parts, one behind the other along ``dim``."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.world)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """This process's part of what :meth:`joined` gives. No exchange."""
        return whole.chunk(self.world, dim)[self.rank]

    def firsts(self, record: T, device: torch.device) -> T:
        """The first process's ``record``, in every process. Its tensors, on ``device``, go from device to device, and
        may have other shapes in each process; the rest is pickled. It waits for the device."""
        source = dist.get_global_rank(self.group, 0)
        apart = _TensorsApart()
        box: list[Any] = [apart.packed(record) if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=source, group=self.group, device=device)
        if self.rank:
            record = apart.unpacked(box[0], device)
        if apart.tensors:
            # all in one, and as bytes: NCCL knows no int16
            pieces = [tensor.view(-1).view(torch.uint8) for tensor in apart.tensors]
            together = torch.cat(pieces)
            dist.broadcast(together, src=source, group=self.group)
            for piece, sent in zip(pieces, together.split([piece.numel() for piece in pieces]), strict=True):
                if self.rank:
                    piece.copy_(sent)
        return record


class _TensorsApart:
    """Pickles a record without its tensors, whose shapes and dtypes stand in their places."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def packed(self, record: Any) -> bytes:
        stream, pickler = io.BytesIO(), None
        pickler = pickle.Pickler(stream)
        pickler.persistent_id = self._set_apart  # type: ignore[method-assign]
        pickler.dump(record)
        return stream.getvalue()

    def unpacked(self, packed: bytes, device: torch.device) -> Any:
        unpickler = pickle.Unpickler(io.BytesIO(packed))
        unpickler.persistent_load = lambda shape_and_dtype: self._made(*shape_and_dtype, device)  # type: ignore
        return unpickler.load()

    def _set_apart(self, part: Any) -> Any:
        if not isinstance(part, Tensor):
            return None
        self.tensors.append(part.contiguous())
        return tuple(part.shape), part.dtype

    def _made(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        self.tensors.append(torch.empty(shape, dtype=dtype, device=device))
        return self.tensors[-1]
