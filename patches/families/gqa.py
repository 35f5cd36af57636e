"""GQA and MHA attention modules: query heads of one KV head form a sharing group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latent_santa.rows import Rows

from .adapter import Adapter
from .spread import peers_of


class GqaAdapter(Adapter):
    """Attention of one module with rotated keys and values in its cache."""

    layout = "gqa"

    def __init__(self, module: Any) -> None:
        self.module = module
        self.key_dims = (module.head_dim,)
        self.group = module.num_key_value_groups
        self.peers = peers_of(module, ("q_proj", "k_proj", "v_proj"), module.head_dim, "KV heads")
        if self.peers is not None:
            groups = module.k_proj.out_features // module.head_dim // self.peers.world
            self.first = (self.peers.rank * groups, 0)

    def query(self, states: Tensor) -> tuple[Tensor, ...]:
        """Query states ``(B, G * H, 1, D)`` as one part ``(B, G, H, D)``; a group's heads are neighbours."""
        states = states[:, :, 0].unflatten(1, (-1, self.group))
        # kernels feed a float32 query over half-precision rows in two parts, of which the second would be zero
        return (states if states.is_cuda else states.float(),)

    def rows(self, keys: Tensor, values: Tensor) -> Rows:
        return Rows((keys,), values)

    def points(self, keys: Tensor) -> Tensor:
        """What parents and teams are formed on: rotated keys, as cached."""
        return keys

    def output(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        """``(B, G, H, V)`` as attention output ``(B, 1, G * H, V)`` in the model's dtype."""
        return out.flatten(1, 2)[:, None].to(dtype)
