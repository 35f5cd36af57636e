"""What a patched model's ``generate`` does beside generating: it tells the controller what only it knows.

That a prompt comes in chunks, and that what follows a prompt in one call are drafts, cannot be seen from the call.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from latent_santa.methods import METHODS

from .calls import Kind
from .control import CACHE_NAMES, Control

CONTINUOUS = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")


def wrapped(model: PreTrainedModel, control: Control) -> dict[str, Callable[..., Any]]:
    """Replacements of the model's own methods, by name."""
    replacements: dict[str, Callable[..., Callable[..., Any]]] = {
        "generate": _generate,
        "_prefill": _prefill,
        "_get_candidate_generator": _candidates,
        **{name: functools.partial(_refused, name) for name in CONTINUOUS},
    }
    return {
        name: make(getattr(model, name), model, control) for name, make in replacements.items() if hasattr(model, name)
    }


def _generate(generate: Callable[..., Any], model: PreTrainedModel, control: Control) -> Callable[..., Any]:
    """``generate`` that refuses caches it cannot use at once, and says so when nothing in it was sampled."""

    @functools.wraps(generate)
    def watched(*args: Any, **kwargs: Any) -> Any:
        _check_cache_kind(model, args, kwargs)
        thread = control.thread
        # an early exit generates within a generation
        outer = thread.generating, thread.draft_prompt, thread.asked, thread.beams, thread.shown
        thread.generating, thread.draft_prompt, thread.asked, thread.beams, thread.shown = True, None, None, False, None
        thread.looked = None
        before = Counter(thread.made)
        try:
            result = generate(*args, **kwargs)
        finally:
            thread.generating, thread.draft_prompt, thread.asked, thread.beams, thread.shown = outer
        made = thread.made - before
        sampled = made[Kind.DECODE] + made[Kind.REPLAY]
        quiet = thread.preparing or outer[0]  # an early exit generates its drafts within a generation
        if METHODS[control.config.method].sampled and not sampled and not quiet:
            warnings.warn(f"no call of this generation was sparse: {_why_dense(made)}", stacklevel=2)
        return result

    return watched


def _check_cache_kind(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    asked = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
    own = getattr(model, "generation_config", None)
    kinds = (kwargs.get("cache_implementation"), *(getattr(g, "cache_implementation", None) for g in (asked, own)))
    kind = next((kind for kind in kinds if kind is not None), None)
    if kind not in (None, "dynamic", "dynamic_full"):
        raise NotImplementedError(
            f"cache_implementation={kind!r}: supported is DynamicCache, what generate() makes by default; "
            "leave the option out"
        )


def _why_dense(made: Counter[Kind]) -> str:
    if made[Kind.UNCACHED]:
        return "it ran without a cache (use_cache=False), so there are no rows to group"
    if made[Kind.VERIFY]:
        return "it made calls of several tokens only (drafts, or a turn of fewer than P tokens), which attend densely"
    return "it made no single-token call on a filled cache, and first_token='dense' replays nothing"


def _prefill(prefill: Callable[..., Any], model: PreTrainedModel, control: Control) -> Callable[..., Any]:
    """``_prefill`` that tells the controller how long the generation may get, and where a prompt given in chunks ends.

    The rows of all chunks are grouped together, and only the last chunk's last token is replayed.
    """

    @functools.wraps(prefill)
    def chunked(input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        control.thread.asked = generation_config.max_length
        control.thread.beams = (generation_config.num_beams or 1) > 1
        if generation_config.prefill_chunk_size is None:
            return prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
        mask = model_kwargs.get("attention_mask")
        cache = next((model_kwargs[name] for name in CACHE_NAMES if model_kwargs.get(name) is not None), None)
        held = 0 if cache is None else cache.get_seq_length()
        if mask is not None:
            rows = mask.shape[1]
        else:  # newer releases drop a mask of ones and keep its length
            rows = getattr(generation_config, "_mask_length", held + input_ids.shape[1])
        if held and 0 < rows - held < control.config.parent_size:
            # a turn of fewer than P tokens joins the suffix: one ordinary call, in no need of chunks
            generation_config = copy.copy(generation_config)
            generation_config.prefill_chunk_size = None
            return prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
        control.thread.prefill_target = rows
        try:
            return prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
        finally:
            control.thread.prefill_target = None

    return chunked


def _candidates(generator: Callable[..., Any], model: PreTrainedModel, control: Control) -> Callable[..., Any]:
    """Called where a generation with drafts begins: what follows the prompt in a call are drafts from now on."""

    @functools.wraps(generator)
    def drafting(generation_config: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        control.thread.draft_prompt = input_ids.shape[1]
        return generator(generation_config, input_ids, *args, **kwargs)

    return drafting


def _refused(name: str, original: Callable[..., Any], model: PreTrainedModel, control: Control) -> Callable[..., Any]:
    @functools.wraps(original)
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{name}: continuous batching keeps its rows in a paged cache, and supported is DynamicCache: use "
            "generate(), or unpatch first"
        )

    return refused
