"""What a new model costs: nothing for a family of a known layout; an adapter and a table row for a new layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import latent_santa
from latent_santa.access import MLA_UNIT
from latent_santa.patches.families import Adapter, find
from latent_santa.rows import Rows

from .tiny_models import assert_same, generate, prompt, tiny_model

EVERY_TEAM = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 4096}


class NewFamily(nn.Module):
    """Attention that no class of transformers computes like this: gated values, in a known layout."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = old.config, old.layer_idx, old.head_dim
        self.num_key_value_groups, self.scaling = old.num_key_value_groups, 2 * old.scaling
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = old.q_proj, old.k_proj, old.v_proj, old.o_proj

    def cached(self, states: Tensor) -> tuple[Tensor, Tensor]:
        heads = (*states.shape[:2], -1, self.head_dim)
        keys, values = (part(states).view(heads).transpose(1, 2) for part in (self.k_proj, self.v_proj))
        return keys, values * keys.sigmoid()

    def seen(self, *cached: Tensor) -> tuple[Tensor, Tensor]:
        return cached[0], cached[1]

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> tuple[Tensor, Any]:
        shape = hidden_states.shape[:2]
        query = self.q_proj(hidden_states).view(*shape, -1, self.head_dim).transpose(1, 2)
        rows = self.cached(hidden_states)
        cache = kwargs.pop("cache", None) or kwargs.pop("past_key_values", None)
        if cache is not None:
            rows = cache.update(*rows, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        output, weights = attend(self, query, *self.seen(*rows), attention_mask, scaling=self.scaling, dropout=0.0)
        return self.o_proj(output.flatten(2)), weights


class NewLayout(NewFamily):
    """Values are the keys turned by a matrix: the cache holds keys alone, and an empty tensor beside them."""

    def __init__(self, old: Any) -> None:
        super().__init__(old)
        self.turn = nn.Parameter(torch.randn(old.head_dim, old.head_dim) / old.head_dim**0.5)
        del self.q_proj, self.k_proj, self.v_proj
        self.q_proj, self.row_proj = old.q_proj, old.k_proj

    def cached(self, states: Tensor) -> tuple[Tensor, Tensor]:
        keys = self.row_proj(states).view(*states.shape[:2], -1, self.head_dim).transpose(1, 2)
        return keys, keys[..., :0]

    def seen(self, *cached: Tensor) -> tuple[Tensor, Tensor]:
        return cached[0], cached[0] @ self.turn


class NewLayoutAdapter(Adapter):
    """All that the patch must know of it."""

    layout = "toy"

    def __init__(self, module: Any) -> None:
        self.module, self.key_dims = module, (module.head_dim,)
        self.replaces = {"seen": lambda *cached: cached}

    def unit(self, method: str) -> Any:
        return MLA_UNIT

    def rows(self, keys: Tensor, values: Tensor) -> Rows:
        return Rows((keys,), keys)

    def points(self, keys: Tensor) -> Tensor:
        return keys

    def query(self, states: Tensor) -> tuple[Tensor, ...]:
        return (states[:, :, 0].float().unflatten(1, (-1, self.module.num_key_value_groups)),)

    def output(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        return (out @ self.module.turn.float()).flatten(1, 2)[:, None].to(dtype)

    def expand(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return type(self.module).seen(self.module, keys, values)


def rebuilt(kind: Any) -> Any:
    model = tiny_model("qwen2")
    torch.manual_seed(0)
    for layer in model.model.layers:
        layer.self_attn = kind(layer.self_attn)
    return model.eval()


def check(model: Any) -> None:
    wanted, before = generate(model, prompt(61)), dict(vars(model.model.layers[0].self_attn))
    with latent_santa.patch(model, **EVERY_TEAM) as santa:
        assert_same(generate(model, prompt(61)), wanted)
        assert santa.layers == 2 and santa.sparse_calls == santa.full_calls == 6
        santa.configure(budget=16)
        santa.reset()
        assert not torch.allclose(generate(model, prompt(61)).scores[0], wanted.scores[0], atol=1e-2)
        assert 0 < santa.access.totals()["union"] < santa.access.totals()["dense"]
    assert dict(vars(model.model.layers[0].self_attn)) == before
    assert_same(generate(model, prompt(61)), wanted, 0)


def test_a_new_family_of_a_known_layout_needs_nothing():
    check(rebuilt(NewFamily))


def test_a_new_layout_is_an_adapter_and_a_row(monkeypatch):
    monkeypatch.setattr(find, "LAYOUTS", [*find.LAYOUTS, (("row_proj", "turn"), NewLayoutAdapter)])
    check(rebuilt(NewLayout))
