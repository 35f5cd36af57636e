"""MLA attention modules: queries are absorbed into latent space, and the cache is never expanded while decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from latent_santa.rows import Rows

from .adapter import Adapter
from .spread import peers_of, spread_weight

HALF = (torch.bfloat16, torch.float16)


class MlaAdapter(Adapter):
    """Absorbed attention of one MLA module.

    ``kv_b_proj`` holds, per head, W_UK (latent to content key) and W_UV (latent to value). A content score is
    q_nope . (W_UK c) = (q_nope W_UK) . c, and a value is W_UV c, so queries go into latent space once per step and the
    weighted sum of latents comes back once per step.
    """

    layout = "mla"
    groups_apart = False
    PARTS = ("kv_b_proj", "kv_a_layernorm", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")

    def __init__(self, module: Any) -> None:
        missing = [part for part in self.PARTS if not hasattr(module, part)]
        if missing:
            raise NotImplementedError(f"has expand_kv but no {', '.join(missing)}")
        self.module = module
        self.replaces = {"expand_kv": _unexpanded}
        self.nope, self.rope = module.qk_nope_head_dim, module.qk_rope_head_dim
        self.value_dim, self.rank = module.v_head_dim, module.kv_lora_rank
        self.key_dims = (self.rank, self.rope)
        width = self.nope + self.value_dim
        self.peers = peers_of(module, ("q_proj", "q_b_proj", "kv_b_proj"), width, "heads")
        if self.peers is not None:
            self.first = (0, self.peers.rank * (module.kv_b_proj.out_features // width // self.peers.world))
        # taken again at every query: nothing shows reliably that a projection has not changed since. A write through
        # ``weight.data`` does not count as a version, and an adapter's scale is a number anywhere in its module
        self._weights: Tensor | None = None

    def up_projection(self) -> Tensor:
        """W_UK over W_UV as the module applies them now: ``(H, nope + v, rank)`` in the model's dtype, heads here.

        The weight of a plain linear layer is used directly. Any other projection (quantised, offloaded, with adapters)
        is asked what it does to the unit vectors, so that packed weights are never read as numbers.

        Raises:
            NotImplementedError: the projection does not apply one linear map to all sequences.
        """
        projection = self.module.kv_b_proj
        if self.peers is not None:
            # transformers computes the share of the heads in a forward of its own
            weight = projection.weight.to_local() if spread_weight(projection.weight) else projection.weight
            return weight.view(-1, self.nope + self.value_dim, self.rank)
        hooked = projection._forward_pre_hooks or projection._forward_hooks or "forward" in vars(projection)
        if type(projection) is nn.Linear and not hooked:
            weight = projection.weight
            if weight.is_floating_point() and weight.element_size() >= 2 and not weight.is_meta:
                return weight.view(-1, self.nope + self.value_dim, self.rank)
        layer_norm = self.module.kv_a_layernorm.weight
        device = layer_norm.device if not layer_norm.is_meta else torch.device("cpu")
        # one sequence, so that maps which differ between sequences cannot take a unit vector for one of them
        unit = torch.eye(self.rank, dtype=layer_norm.dtype, device=device)[None]
        with torch.no_grad():
            try:
                image = projection(unit)
            except (RuntimeError, ValueError, IndexError) as error:
                raise NotImplementedError(f"{self._refusal()} ({type(error).__name__}: {error})") from error
        if image.shape[:2] != unit.shape[:2]:
            raise NotImplementedError(f"{self._refusal()} (one sequence gives {tuple(image.shape)})")
        return image[0].T.reshape(-1, self.nope + self.value_dim, self.rank).contiguous()

    def _refusal(self) -> str:
        return (
            f"the kv_b_proj of layer {self.module.layer_idx} ({type(self.module.kv_b_proj).__name__}) does not apply "
            "one linear map to every sequence; supported is one adapter per call: leave adapter_names out, or unpatch"
        )

    def query(self, states: Tensor) -> tuple[Tensor, ...]:
        """Query states ``(B, H, 1, nope + rope)`` as parts ``(B, 1, H, rank)`` and ``(B, 1, H, rope)``.

        On a GPU they keep the model's half precision, as in its own attention, and W_UK is not copied to float32.
        """
        self._weights = self.up_projection().to(states.device)
        content, rotary = states[:, :, 0].split((self.nope, self.rope), -1)
        w_uk = self._weights[:, : self.nope]
        if w_uk.is_cuda and w_uk.dtype == content.dtype in HALF:
            return torch.bmm(content.transpose(0, 1), w_uk).transpose(0, 1)[:, None], rotary[:, None]
        absorbed = torch.einsum("bhd,hdr->bhr", content.float(), w_uk.float())
        return absorbed[:, None], rotary.float()[:, None]

    def rows(self, keys: Tensor, values: Tensor) -> Rows:
        """The cache layer's content latents and rotary keys as rows."""
        return Rows((keys, values), keys)

    def points(self, keys: Tensor) -> Tensor:
        """What parents and teams are formed on: the normalised content latents alone (Appendix F)."""
        return keys

    def output(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        """Latent sums ``(B, 1, H, rank)`` as attention output ``(B, 1, H, v)`` in the model's dtype."""
        assert self._weights is not None
        w_uv = self._weights[:, self.nope :]
        if w_uv.is_cuda and w_uv.dtype == dtype in HALF:
            latents = out[:, 0].transpose(0, 1).to(dtype)
            if torch.is_grad_enabled():  # bmm into a given tensor refuses weights that require gradients
                return torch.bmm(latents, w_uv.transpose(1, 2)).transpose(0, 1)[:, None]
            values = latents.new_empty(out.shape[0], *w_uv.shape[:2])
            torch.bmm(latents, w_uv.transpose(1, 2), out=values.transpose(0, 1))  # as the next projection reads it
            return values[:, None]
        return torch.einsum("bghr,hvr->bghv", out, w_uv.float()).to(dtype)

    def expand(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The class's own expansion, for dense calls."""
        return type(self.module).expand_kv(self.module, keys, values)

    def check(self) -> None:
        """See that absorbed scores and values equal the expanded ones on a few random rows.

        Raises:
            NotImplementedError: they differ, so the module is no MLA layer of the known form.
        """
        weight = self.module.kv_a_layernorm.weight
        device = weight.device if not weight.is_meta else torch.device("cpu")
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device=device, dtype=weight.dtype)

        # under autocast the module itself would round more than the check allows
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            latents, rotary = draw(1, 1, 3, self.rank), draw(1, 1, 3, self.rope)
            keys, values = (part.float() for part in self.expand(latents, rotary))
            states = draw(1, keys.shape[1], 1, self.nope + self.rope).to(keys.device)
            wanted = torch.einsum("bhqd,bhnd->bhn", states.float(), keys)
            content, turned = (part.float() for part in self.query(states))
            found = content[:, 0] @ latents.to(keys.device)[:, 0].float().transpose(1, 2)
            found = found + turned[:, 0] @ rotary.to(keys.device)[:, 0].float().transpose(1, 2)
            value = self.output(
                latents.to(keys.device).float()[:, :, :1].expand(-1, -1, keys.shape[1], -1), torch.float32
            )
        precise = weight.dtype == torch.float32 and type(self.module.kv_b_proj) is nn.Linear
        tolerance = 1e-4 if precise else 0.05
        for name, ours, theirs in (("scores", found, wanted), ("values", value[0, 0], values[0, :, 0])):
            error = ((ours - theirs).norm() / theirs.norm().clamp_min(1e-20)).item()
            if not error <= tolerance:
                raise NotImplementedError(
                    f"{type(self.module).__name__}: absorbed {name} differ from expand_kv's by {error:.1e} (allowed "
                    f"{tolerance:.0e}); its kv_b_proj ({type(self.module.kv_b_proj).__name__}) is not the plain latent "
                    "up-projection that latent_santa supports"
                )


def _unexpanded(latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Stands in for a module's ``expand_kv``, so that the attention function gets the cache's own rows."""
    return latents, rotary
