"""Norms, routed experts and what stands around attention in few launches with the bits of the model's own, in calls of
few tokens on a GPU.

A decoding step is hundreds of small kernels of PyTorch's. Those that round nothing but what they say can be joined
without another bit in the outputs. A part is taken over only where it gave the bits of its own forward on random inputs
on this device, so a release or a device with other roundings keeps its own. Hooks and adapters see the model's own.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from latent_santa.kernels import unavailable

from .experts import GROUPED
from .families.spread import spread_weight
from .own_attention import autocasts, hooked, own_attention

log = logging.getLogger("latent_santa")
Forward = Callable[..., Any]
MOST_TOKENS = 64
# tokens and magnitudes of the inputs on which bits are compared
TRIED, MAGNITUDES = (1, 8, 32, MOST_TOKENS), (0.01, 1.0, 30.0)
HALF = (torch.bfloat16, torch.float16)
# what makes the forward of parts of one class and size, or None where nothing has their bits
_agreed: dict[tuple[Any, ...], Callable[[Any], Forward] | None] = {}


def exact_parts(base: nn.Module) -> list[tuple[nn.Module, str, Forward]]:
    """What replaces what: (module, name of its method, replacement). Nothing where the model is not on a GPU."""
    weights = list(base.parameters())
    if any(not weight.is_cuda or unavailable(weight.device) for weight in weights) or any(map(spread_weight, weights)):
        return []
    modules = (module for module in base.modules() if "forward" not in vars(module))
    found = ((module, exact_forward(module) or exact_attention(module, base)) for module in modules)
    return [(module, "forward", forward) for module, forward in found if forward is not None]


def exact_attention(module: Any, base: Any) -> Forward | None:
    """A ``forward`` for an attention module that rotates and writes its row in one launch, or None where that has other
    bits, or where others than plain projections take part."""
    linear = [child for name, child in module.named_children() if "_proj" in name]
    plain = all(type(child) is nn.Linear and child.weight.dtype in HALF for child in linear)
    if not linear or not plain or hooked(part for part in module.modules() if part is not module):
        return None

    def states(weight: Tensor, tokens: int) -> Tensor:
        return _normal(weight, 1, tokens, weight.shape[-1])

    return own_attention(module, base, torch.equal, states, MOST_TOKENS, own_norm=False)


def exact_forward(module: Any) -> Forward | None:
    """A ``forward`` for the module that launches few kernels for few tokens, or None where none has its bits."""
    if _is_norm(module):
        part, kinds = _with_other_weights(module), [_norm]
    elif _is_grouped_experts(module):
        part, kinds = module, [_experts, _experts_around_products]
    else:
        return None
    sizes = tuple((name, weight.shape, weight.dtype, weight.device) for name, weight in module.named_parameters())
    key = (type(module), sizes, getattr(module, "variance_epsilon", None), _top(module))
    if key not in _agreed:
        seen = (kind for kind in kinds if _same_bits(part.forward, kind(part), _inputs(part)))
        _agreed[key] = next(seen, None)
    kind = _agreed[key]
    return None if kind is None else kind(module)


def _same_bits(original: Forward, forward: Forward, inputs: Iterable[tuple[Tensor, ...]]) -> bool:
    try:
        with torch.no_grad():
            return all(torch.equal(forward(*given), original(*given)) for given in inputs)
    except Exception as error:  # it takes or gives something else, or its kernels cannot be made here
        log.debug("%s keeps its own launches: %s", getattr(original, "__qualname__", original), error)
        return False


def _elsewhere(states: Tensor, weight: Tensor) -> bool:
    """Whether a call is left to the module's own forward."""
    few = states.numel() <= MOST_TOKENS * states.shape[-1]
    alike = states.dtype == weight.dtype and states.device == weight.device and states.stride(-1) == 1
    plain = not torch.is_grad_enabled() and not autocasts(states) and not torch.compiler.is_compiling()
    return not few or not alike or not plain


def _is_norm(module: Any) -> bool:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or not isinstance(eps, float):
        return False
    return weight.dim() == 1 and weight.dtype in HALF


def _with_other_weights(norm: Any) -> Any:
    """The norm with weights that show every rounding, which those of a new model, all 1, do not."""
    other = copy.deepcopy(norm)
    other.weight = nn.Parameter(_normal(norm.weight, len(norm.weight)), requires_grad=False)
    return other


def _norm(module: Any) -> Forward:
    from latent_santa.kernels.norm import rms_norm

    original = module.forward

    @wraps(original)
    def forward(hidden_states: Tensor) -> Tensor:
        if _elsewhere(hidden_states, module.weight):
            return original(hidden_states)  # type: ignore[no-any-return]
        return rms_norm(hidden_states, module.weight, module.variance_epsilon)

    return forward


def _is_grouped_experts(module: Any) -> bool:
    """Whether a module is experts whose grouped products are what a call runs, and all that they do."""
    names = ("gate_up_proj", "down_proj", "_apply_gate", "has_gate", "has_bias", "is_transposed")
    if not all(hasattr(module, name) for name in names) or not module.has_gate or module.has_bias:
        return False
    if getattr(module, "has_post_expert_norm", False) or getattr(module, "_is_expert_parallel", False):
        return False
    return _top(module) is not None and hasattr(moe, "_grouped_linear") and grouped(module)


def _experts(module: Any) -> Forward:
    """The experts' forward in own launches but for the activation."""
    from latent_santa.kernels.grouped import grouped_product

    def product(states: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        # an adapter puts tensors of its own in place of the weights
        if module.is_transposed or not weights.is_contiguous() or weights.dtype != states.dtype:
            return _library_product(module, states, weights, ends)
        return grouped_product(states, weights, ends)

    return _with_products(module, product)


def _experts_around_products(module: Any) -> Forward:
    """The experts' forward with own launches around PyTorch's grouped products."""
    return _with_products(module, functools.partial(_library_product, module))


def _library_product(module: Any, states: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    result: Tensor = moe._grouped_linear(states, weights, ends, bias=None, is_transposed=module.is_transposed)
    return result


def _with_products(module: Any, product: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Forward:
    from latent_santa.kernels.grouped import grouped_experts

    original, count = module.forward, module.down_proj.shape[0]

    def products(states: Tensor, ends: Tensor) -> Tensor:
        return product(module._apply_gate(product(states, module.gate_up_proj, ends)), module.down_proj, ends)

    @wraps(original)
    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tried = top_k_index.shape[1] == _top(module)
        tried = tried and top_k_weights.dtype in (torch.float32, hidden_states.dtype)
        if not tried or not grouped(module) or _elsewhere(hidden_states, module.down_proj):
            return original(hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
        return grouped_experts(hidden_states, top_k_index, top_k_weights, count, products)

    return forward


def grouped(module: Any) -> bool:
    """Whether a call of the experts now is the grouped product of transformers."""
    found = moe.ALL_EXPERTS_FUNCTIONS.get(GROUPED)
    return module.config._experts_implementation == GROUPED and found is moe.grouped_mm_experts_forward


def _top(module: Any) -> Any:
    """Experts per token, where a module has them."""
    return getattr(getattr(module, "config", None), "num_experts_per_tok", None)


def _inputs(module: Any) -> Iterator[tuple[Tensor, ...]]:
    """Random arguments of a norm or of experts, as a decoding step has them."""
    if _is_norm(module):
        for tokens in TRIED:
            states = _normal(module.weight, tokens, 1, len(module.weight))
            yield from ((size * states,) for size in MAGNITUDES)
        return
    weight, top, generator = module.gate_up_proj, _top(module), torch.Generator().manual_seed(1)
    width = weight.shape[1] if module.is_transposed else weight.shape[2]
    for tokens in TRIED:
        index = torch.rand(tokens, len(weight), generator=generator).topk(top).indices.to(weight.device)
        shares = torch.rand(tokens, top, generator=generator).to(weight.device)
        for kind in (torch.float32, weight.dtype):
            yield _normal(weight, tokens, width), index, shares.to(kind)


def _normal(weight: Tensor, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
