"""Which processes a module's heads are spread over: tensor parallelism as transformers sets it up."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from latent_santa.peers import Peers

SUPPORTED_SPREAD = (
    'supported is tensor parallelism of transformers alone (tp_plan="auto" under torchrun, with the plan of the '
    "model's class)"
)


def spread_weight(weight: Any) -> bool:
    """Whether a weight is a DTensor; who has not imported those has none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(weight, module.DTensor)


def refused_spread(weight: Any, tp_size: int | None) -> bool:
    """Whether a weight of a model over ``tp_size`` processes is spread in another way than tensor parallelism."""
    return spread_weight(weight) and not (tp_size and tp_size > 1 and _by_tensor_parallelism(weight))


def _by_tensor_parallelism(weight: Any) -> bool:
    # transformers 5.17 gives its mesh of one dimension no name
    return weight.device_mesh.ndim == 1 and weight.device_mesh.mesh_dim_names in (None, ("tp",), ("ep",))


@torch.no_grad()
def _gives_a_share(layer: Any) -> bool:
    """Whether a projection's output has a share of its numbers only: one that gathers them gives all."""
    weight: Any = getattr(layer, "weight", None)
    if not spread_weight(weight) or "forward" not in vars(layer):  # transformers sets one where it spreads a layer
        return False
    zeros = torch.zeros(1, 1, layer.in_features, dtype=weight.dtype, device=weight.device)
    return bool(layer(zeros).shape[-1] != layer.out_features)


def peers_of(module: Any, projections: Sequence[str], width: int, what: str) -> Peers | None:
    """The processes that share a module's heads, or None where this one has all of them.

    Args:
        module: the attention module.
        projections: names of its projections whose outputs are heads; the last one's heads are counted.
        width: numbers per head in the output of the last projection.
        what: what these heads are called.

    Raises:
        NotImplementedError: the heads are spread in another way than whole heads to each process in turn.
    """
    layers = {name: getattr(module, name) for name in projections if getattr(module, name, None) is not None}
    for name, layer in layers.items():
        if getattr(layer, "_hf_quantized_needs_local_tp", False):
            raise NotImplementedError(f"has a quantised {name} that is spread over processes; {SUPPORTED_SPREAD}")
    spread = [name for name, layer in layers.items() if _gives_a_share(layer)]
    if not spread:
        return None
    if len(spread) < len(layers):
        whole = ", ".join(sorted(set(layers) - set(spread)))
        raise NotImplementedError(
            f"has {', '.join(spread)} spread over processes and {whole} whole on each; {SUPPORTED_SPREAD}"
        )
    for name in spread:
        weight = layers[name].weight
        mesh, placements = weight.device_mesh, weight.placements
        if not _by_tensor_parallelism(weight) or not placements[0].is_shard(0):
            raise NotImplementedError(
                f"has {name} spread over processes as {placements} on {mesh}; {SUPPORTED_SPREAD}, without FSDP"
            )
    counted = layers[projections[-1]].weight
    heads, world = counted.shape[0] // width, counted.device_mesh.size()
    if heads % world:
        raise NotImplementedError(
            f"has {heads} {what} over {world} processes; each needs as many whole ones as the others: start a number "
            f"of processes that divides {heads}"
        )
    return Peers(counted.device_mesh.get_group(), counted.device_mesh.get_local_rank(), world)
