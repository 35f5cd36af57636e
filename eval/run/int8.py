"""LLM.int8 weights as Appendix F has them: linear layers and routed experts, but not kv_b_proj and lm_head.

transformers keeps the experts of a layer as two parameters with three dimensions, which its own int8 loading leaves in
16 bits: nine tenths of DeepSeek-V2-Lite. Here every expert's matrices become bitsandbytes layers of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from latent_santa.eval.errors import EvalError

# sampled attention reads the weight of kv_b_proj itself
UNQUANTISED = ("kv_b_proj", "lm_head")
OUTLIER = 6.0  # LLM.int8 multiplies input columns with larger values in 16 bits; what transformers sets, too
EXPERT_WEIGHTS = {"gate_up_proj", "down_proj"}
# of transformers' experts: weights are (experts, out, in), gate above up, nothing added
USUAL = {
    "is_transposed": False,
    "is_concatenated": True,
    "has_bias": False,
    "has_gate": True,
    "has_post_expert_norm": False,
}


def int8_linear(weight: Tensor, bias: Tensor | None, device: torch.device) -> nn.Module:
    """A bitsandbytes layer of a weight ``(out, in)``, quantised row by row on the way to `device`."""
    import bitsandbytes

    outputs, inputs = weight.shape
    layer = bitsandbytes.nn.Linear8bitLt(
        inputs, outputs, bias is not None, has_fp16_weights=False, threshold=OUTLIER, device="meta"
    )
    # bitsandbytes quantises what leaves the CPU's memory, even for the CPU
    packed = bitsandbytes.nn.Int8Params(weight.detach().cpu().contiguous(), requires_grad=False, has_fp16_weights=False)
    layer.weight = packed.to(device)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().to(device), requires_grad=False)
    return layer


class Int8Experts(nn.Module):
    """Routed experts whose matrices are LLM.int8 layers; a drop-in for a class of transformers' with usual weights."""

    def __init__(self, experts: Any, device: torch.device) -> None:
        super().__init__()
        self.act_fn = experts.act_fn
        self.gate_up = nn.ModuleList(int8_linear(weight, None, device) for weight in experts.gate_up_proj)
        self.down = nn.ModuleList(int8_linear(weight, None, device) for weight in experts.down_proj)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of the chosen experts' outputs.

        hidden_states  ``(tokens, hidden)``
        top_k_index    chosen experts ``(tokens, k)``
        top_k_weights  their weights, likewise
        """
        found = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, place = (top_k_index == expert).nonzero(as_tuple=True)
            gate, up = self.gate_up[expert](hidden_states[token]).chunk(2, -1)
            out = self.down[expert](self.act_fn(gate) * up) * top_k_weights[token, place, None]
            found.index_add_(0, token, out.to(found.dtype))
        return found


def _stacked(module: nn.Module, weight: Tensor) -> bool:
    """Whether a module's own weight is a stack of matrices; those of convolutions have as many dimensions."""
    return weight.dim() == 3 and not isinstance(module, _ConvNd)


def _experts(name: str, module: nn.Module) -> bool:
    """Whether a module keeps experts' weights.

    Raises:
        EvalError: it does, in a layout that cannot be quantised here.
    """
    stacked = {key for key, weight in module.named_parameters(recurse=False) if _stacked(module, weight)}
    if not stacked:
        return False
    own = {key for key, _ in module.named_parameters(recurse=False)}
    gate = getattr(type(module), "_apply_gate", None)
    usual = all(getattr(module, key, value) == value for key, value in USUAL.items())
    if own != EXPERT_WEIGHTS or not usual or getattr(gate, "__name__", "") != "_default_apply_gate":
        raise EvalError(
            f"--quant int8: {name} ({type(module).__name__}) keeps {', '.join(sorted(stacked))} in a layout that is "
            "not supported, so that they would stay in 16 bits; use --quant none"
        )
    return True


def quantise(model: nn.Module, device: torch.device | None) -> None:
    """Replace linear layers and experts of a 16-bit model by LLM.int8 ones, in place; the rest of it is left alone.

    device  where the int8 weights go; None: where each weight is

    Raises:
        EvalError: a weight cannot be quantised; it is named.
    """
    found = []
    for where, parent in model.named_modules():
        for name, child in parent.named_children():
            path = f"{where}.{name}".lstrip(".")
            if name in UNQUANTISED or not (isinstance(child, nn.Linear) or _experts(path, child)):
                continue
            if isinstance(child, nn.Linear) and type(child) is not nn.Linear:
                raise EvalError(f"--quant int8: {path} is a {type(child).__name__}, no plain linear layer")
            if next(child.parameters()).is_meta:
                raise EvalError(f"--quant int8: {path} is on no device: use a --device-map with room for all weights")
            found.append((parent, name))
    for parent, name in found:  # nothing is changed before all of it is known to work
        child = getattr(parent, name)
        target = device or next(child.parameters()).device
        if isinstance(child, nn.Linear):
            setattr(parent, name, int8_linear(child.weight, child.bias, target))
        else:
            setattr(parent, name, Int8Experts(child, target))


def share(model: nn.Module) -> dict[str, int]:
    """Parameters of a model, those in 8 bits, and those that `quantise` is meant to put in 8 bits; shared ones once."""
    sizes = {id(weight): weight.numel() for weight in model.parameters()}
    meant: set[int] = set()
    for name, module in model.named_modules():
        if name.rpartition(".")[2] not in UNQUANTISED:
            own = module.named_parameters(recurse=False)
            linear = isinstance(module, nn.Linear)
            meant |= {id(w) for key, w in own if (linear and key == "weight") or _stacked(module, w)}
    return {
        "parameters": sum(sizes.values()),
        "int8_parameters": sum(weight.numel() for weight in model.parameters() if weight.dtype == torch.int8),
        "int8_meant": sum(sizes[key] for key in meant),
    }
