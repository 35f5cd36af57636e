"""What the patch asks of a layout: how one attention module's cache rows become keys, values and output."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from latent_santa.peers import Peers
from latent_santa.rows import Rows


class Adapter(Protocol):
    """One attention module of one layout.

    A new layout is a subclass and one row of ``find.LAYOUTS``. B counts sequences, G sharing groups, H query heads per
    group and N cache rows.

    Attributes:
        layout: the layout's name, such as ``"mla"``.
        module: the attention module.
        replaces: attributes of the module that the patch replaces by these values until it is undone.
        key_dims: dimensions of each part of a row's key.
        peers: the processes that the module's heads are spread over (tensor parallelism), or None.
        first: numbers in the whole model of the first sharing group here, and of the first head here of each group.
        groups_apart: whether each of the processes has sharing groups of its own, or heads of all groups.
    """

    layout: str
    module: Any
    replaces: dict[str, Any] = {}
    key_dims: tuple[int, ...]
    peers: Peers | None = None
    first: tuple[int, int] = (0, 0)
    groups_apart: bool = True

    def check(self) -> None:
        """Raise NotImplementedError if the module does not compute what this adapter assumes. By default it does."""
        return None

    def rows(self, keys: Tensor, values: Tensor) -> Rows:
        """A cache layer's ``keys`` and ``values`` as rows: each key part and the values are ``(B, G, N, D)``."""

    def points(self, keys: Tensor) -> Tensor:
        """What parents and teams are formed on, ``(B, G, N, D)``."""

    def query(self, states: Tensor) -> tuple[Tensor, ...]:
        """Query states ``(B, G * H, 1, D)`` as one ``(B, G, H, D)`` per key part, float32 or the rows' dtype.

        It reads the module's weights as they are now; the ``output`` calls of the same step use the same weights.
        """

    def output(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        """Weighted sums of values ``(B, G, H, V)``, float32, as attention output ``(B, 1, G * H, D)`` in ``dtype``."""

    def expand(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """A cache layer's rows as the keys and values that the model's own attention takes: by default as they are."""
        return keys, values
