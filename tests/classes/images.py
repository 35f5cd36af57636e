"""Inputs with one image, in the forms that classes take them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .configs import text


def image_inputs(model: PreTrainedModel) -> dict[str, Any] | None:
    """Arguments of ``generate`` for a prompt with an image that the model can read, or None if no form fits."""
    for pixels in _forms(model):
        try:
            with torch.no_grad():
                tokens = _tokens(model, pixels)
                given = _prompt(model, tokens, pixels)
                first = model(**given).logits[:, -1]
                other = model(**{**given, "pixel_values": -given["pixel_values"]}).logits[:, -1]
        except Exception:
            continue
        if first.isfinite().all() and not torch.allclose(first, other, atol=1e-4):
            return given
    return None


def _forms(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Pixels as one picture, as pictures of one prompt, and as rows of patches with their grid."""
    vision = getattr(model.config, "vision_config", model.config)
    generator = torch.Generator().manual_seed(1)
    size, patch = getattr(vision, "image_size", 16), getattr(vision, "patch_size", 4)
    size, patch = (n if isinstance(n, int) else n[0] for n in (size, patch))
    channels = getattr(vision, "in_channels", getattr(vision, "num_channels", 3))

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    picture, sizes = drawn(1, channels, size, size), torch.tensor([[size, size]])
    yield {"pixel_values": picture}
    yield {"pixel_values": picture, "high_res_pixel_values": drawn(1, channels, size, size)}
    yield {"pixel_values": picture, "image_sizes": sizes}
    yield {"pixel_values": picture[None]}
    yield {"pixel_values": picture[None], "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool)}
    for tiles in (2, 3):
        yield {"pixel_values": drawn(1, tiles, channels, size, size), "image_sizes": sizes}
    for side in (4, 8):
        grid, shape = torch.tensor([[1, side, side]]), torch.tensor([[side, side]])
        flat = drawn(1, side**2, channels * patch**2)
        yield {"pixel_values": flat, "spatial_shapes": shape, "pixel_attention_mask": torch.ones(1, side**2)}
        yield {"pixel_values": drawn(1, channels, patch, patch * side**2), "target_sizes": shape}
        yield {"pixel_values": drawn(side**2, channels, patch, patch), "image_grid_thw": grid}
        for frames in (2, 1):
            rows = drawn(side**2, channels * frames * patch**2)
            yield {"pixel_values": rows, "image_grid_thw": grid}
            yield {"pixel_values": rows, "image_grid_thw": grid, "image_merge_sizes": torch.tensor([1])}


def _tokens(model: PreTrainedModel, pixels: dict[str, Tensor]) -> int:
    """How many tokens stand for the image."""
    inner = getattr(model, "model", model)  # its own says which arguments it takes
    body = inner if hasattr(inner, "get_image_features") else model
    takes = inspect.signature(body.get_image_features).parameters
    features = body.get_image_features(**{name: value for name, value in pixels.items() if name in takes})
    for name in ("pooler_output", "last_hidden_state"):
        found = getattr(features, name, None)
        if found is not None:
            features = found
            break
    parts = features if isinstance(features, (list, tuple)) else [features]
    return sum(part.numel() // part.shape[-1] for part in parts)


def _prompt(model: PreTrainedModel, tokens: int, pixels: dict[str, Tensor]) -> dict[str, Any]:
    config = model.config
    image = next(
        getattr(config, name)
        for name in ("image_token_id", "image_token_index", "img_context_token_id")
        if getattr(config, name, None) is not None
    )
    before, after = text(6, seed=3), text(22, seed=4)
    around = [
        torch.tensor([[getattr(config, name)]]) if getattr(config, name, None) is not None else before[:, :0]
        for name in ("vision_start_token_id", "vision_end_token_id")
    ]
    ids = torch.cat((before, around[0], torch.full((1, tokens), image), around[1], after), 1)
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels}
    takes = inspect.signature(type(model).forward).parameters
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in takes:
            given[name] = (ids == image).long()
    return given
