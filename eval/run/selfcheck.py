"""The self-check of a model: does patching do on it what it promises."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from latent_santa.config import SantaConfig
from latent_santa.eval.run.comparison import common_start

NEW_TOKENS = 8
BUDGET = 128
DRAFT_TOKENS = 3


@dataclass
class Check:
    """One finding: what was looked at, whether it holds (None: not applicable), and what was seen."""

    name: str
    passed: bool | None
    seen: str


@torch.inference_mode()
def _generate(model: Any, ids: torch.Tensor, **options: Any) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and their logits ``(tokens, vocabulary)`` in float32."""
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return out.sequences[0, ids.shape[1] :].tolist(), torch.cat(out.logits).float()


def run_checks(model: Any, ids: list[int], config: SantaConfig | None = None) -> Iterator[Check]:
    """Check a loaded, unpatched model on one prompt; findings come as they are made.

    Args:
        config: settings to sample under; None for SANTA++'s own with a budget of 128.

    Raises:
        NotImplementedError: the model cannot be patched at all.
    """
    import latent_santa

    prompt = torch.tensor([ids], device=model.get_input_embeddings().weight.device)
    before = _state(model)
    tokens, logits = _generate(model, prompt)
    asked = config or SantaConfig(budget=BUDGET)
    # K >= M is dense where every representative is scored
    base = asked.with_overrides(routing="one_stage") if asked.method == "santa++" else SantaConfig()
    with latent_santa.patch(model, base) as santa:
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        yield Check("all layers patched", santa.layers >= layers, f"{santa.layers} {santa.layout.upper()} of {layers}")
        for estimator in ("per_head", "pooled"):
            santa.configure(estimator=estimator, budget=_all_teams(ids, santa.config))
            found, found_logits = _generate(model, prompt)
            yield _same(f"K >= M equals dense ({estimator})", tokens, logits, found, found_logits)
        santa.reset()
        santa.configure(asked)
        _generate(model, prompt)
        sampled = _samples(santa, len(ids))
        yield sampled
        percent, teams = santa.access.percent, "" if sampled.passed else ", with every team"
        yield Check("rows are counted", percent == percent, f"{percent:.1f} % of dense at S={asked.budget}{teams}")
        santa.configure(method="dense")
        found, found_logits = _generate(model, prompt)
        identical = found == tokens and torch.equal(found_logits, logits)
        yield Check('method "dense" is the unpatched model', identical, "bit-equal" if identical else "not bit-equal")
        santa.configure(base)
        yield _runs("prompt lookup decoding", lambda: _generate(model, prompt, prompt_lookup_num_tokens=DRAFT_TOKENS))
        yield _refuses("static cache", lambda: _generate(model, prompt, cache_implementation="static"))
    yield Check("unpatching restores every attribute", before == _state(model), f"{len(before)} attributes compared")
    again, again_logits = _generate(model, prompt)
    identical = again == tokens and torch.equal(again_logits, logits)
    yield Check("unpatching restores outputs", identical, "bit-equal" if identical else "not bit-equal")


def _samples(santa: Any, length: int) -> Check:
    """Whether calls of the budget left teams out. A prompt with no more than K teams gives nothing to sample."""
    name, sparse = f"a budget of {santa.config.budget} samples", santa.sparse_calls
    left_out = sparse - santa.full_calls
    if sparse and not left_out:
        return Check(name, None, f"{length} tokens have too few teams to leave any out; give a longer prompt")
    return Check(name, sparse > 0, f"{left_out} of {sparse} sparse calls leave teams out")


def _all_teams(ids: list[int], config: Any) -> int:
    """A budget that covers every team of a prompt: a team a row is the most there can be."""
    step = config.parent_size // config.representatives
    return (len(ids) + NEW_TOKENS) * step


def _same(name: str, tokens: list[int], logits: torch.Tensor, found: list[int], found_logits: torch.Tensor) -> Check:
    """Equal tokens, or a difference that starts where dense logits themselves are closer than rounding moves them."""
    common = common_start(tokens, found)
    shared = slice(0, min(common + 1, len(tokens), len(found)))
    worst = (logits[shared] - found_logits[shared]).abs().max().item()
    spread = logits[shared].std().item()
    seen = f"max logit difference {worst:.2e} (standard deviation of logits {spread:.2f})"
    if tokens == found:
        return Check(name, True, f"same tokens, {seen}")
    top = logits[common].topk(2).values
    tie = (top[0] - top[1]).item() <= 2 * worst and worst < 0.1 * spread
    why = "a tie within rounding" if tie else "no tie"
    return Check(name, tie, f"tokens differ from number {common} on ({why}), {seen}")


def _runs(name: str, action: Callable[[], Any]) -> Check:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # drafts may leave no sparse call, which is no failure here
        try:
            action()
        except (NotImplementedError, ValueError, RuntimeError) as error:
            return Check(name, False, f"{type(error).__name__}: {error}")
    return Check(name, True, "runs")


def _refuses(name: str, action: Callable[[], Any]) -> Check:
    try:
        action()
    except NotImplementedError as error:
        return Check(f"{name} is refused", True, str(error).split(";")[0])
    except (ValueError, RuntimeError) as error:
        return Check(f"{name} is refused", None, f"transformers refuses it for this model: {error}".split("\n")[0][:90])
    return Check(f"{name} is refused", False, "it ran")


def _state(model: Any) -> dict[str, Any]:
    """Identities of everything that patching may touch."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key in ("config", "expand_kv", "forward", "generate", "_latent_santa"):
            if key in module.__dict__:
                state[f"{name}.{key}"] = id(module.__dict__[key])
        state[f"{name} hooks"] = (len(module._forward_hooks), len(module._forward_pre_hooks))
    return state
