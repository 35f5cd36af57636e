"""Up-projections that are not plain weights: packed, offloaded, adapted, or no latent up-projection at all."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor, nn

import latent_santa

from .tiny_models import prompt, tiny_model

EVERY_TEAM = {"budget": 1600, "parents": "contiguous"}


class PackedLinear(nn.Linear):
    """A linear layer that keeps int8 numbers with a scale an output, as quantised layers do."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False)
        scale = plain.weight.detach().abs().amax(1, keepdim=True) / 127
        packed = (plain.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale).T


class Adapted(nn.Module):
    """A frozen projection with a low-rank adapter beside it."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.base = plain
        self.down = nn.Parameter(0.2 * torch.randn(2, plain.in_features, generator=generator))
        self.up = nn.Parameter(0.2 * torch.randn(plain.out_features, 2, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Biased(nn.Linear):
    """Not linear in the latent alone: absorbing its weight would lose the bias."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features)
        self.weight = plain.weight
        nn.init.constant_(self.bias, 3.0)


def with_projection(kind: type[nn.Module]) -> torch.nn.Module:
    model = tiny_model("deepseek_v2")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = kind(layer.self_attn.kv_b_proj)
    return model.eval()


def generated(model: torch.nn.Module) -> list[int]:
    return model.generate(prompt(80), max_new_tokens=8, do_sample=False)[0, 80:].tolist()


@pytest.mark.parametrize("kind", [PackedLinear, Adapted])
def test_a_projection_that_is_no_plain_weight_is_asked_what_it_does(kind: type[nn.Module]) -> None:
    model = with_projection(kind)
    wanted = generated(model)
    with latent_santa.patch(model, **EVERY_TEAM) as santa:
        assert generated(model) == wanted and santa.full_calls == santa.sparse_calls == 8


def test_an_adapter_that_changes_between_prompts_is_followed() -> None:
    model = with_projection(Adapted)
    with latent_santa.patch(model, **EVERY_TEAM):
        generated(model)
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.up.data.mul_(-3)
        changed = generated(model)
    assert generated(model) == changed


def test_a_projection_that_is_not_linear_is_refused() -> None:
    model = with_projection(Biased)
    before = dict(model.model.layers[0].self_attn.__dict__)
    with pytest.raises(NotImplementedError, match="kv_b_proj .Biased. is not the plain latent up-projection"):
        latent_santa.patch(model)
    assert model.model.layers[0].self_attn.__dict__ == before


@pytest.mark.parametrize("name", ["deepseek_v2", "qwen2"])
def test_weights_offloaded_by_accelerate(name: str) -> None:
    model = tiny_model(name)
    dense = generated(model)
    with latent_santa.patch(model, budget=16, parents="contiguous"):
        sparse = generated(model)
    model = cpu_offload(model, execution_device="cpu")
    assert next(model.parameters()).is_meta
    with latent_santa.patch(model, budget=16, parents="contiguous") as santa:
        assert generated(model) == sparse
        santa.configure(budget=1600)
        assert generated(model) == dense
