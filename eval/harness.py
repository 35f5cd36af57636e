"""lm-evaluation-harness on a patched model: its tasks that generate, and the rows that they read.

    with latent_santa.patch(model, budget=128) as santa:
        results = evaluate(SampledLM(santa, tokenizer), ["gsm8k"], limit=50)
        print(results["results"], results["latent_santa"])

Tasks of log-likelihoods are refused. The harness gives them prompt and continuation in one call, which a patched model
attends densely, so that their scores would be dense attention's under another name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

try:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise ImportError(
        "latent_santa.eval.harness needs lm-evaluation-harness: pip install 'latent-santa[harness]'"
    ) from error

if TYPE_CHECKING:
    from torch import Tensor

    from latent_santa.patches import SantaHandle

GENERATES = "generate_until"


class SampledLM(HFLM):
    """The harness's Hugging Face model over a patched one. `options` are HFLM's, such as batch_size.

    A prompt's noise is drawn from its token ids and the settings' seed, whatever is asked before it or with it.
    """

    def __init__(self, santa: SantaHandle, tokenizer: Any, **options: Any) -> None:
        super().__init__(pretrained=santa.model, tokenizer=tokenizer, **options)
        self.santa = santa

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **settings: Any) -> Any:
        mask = settings.get("attention_mask")
        real = context.new_ones(context.shape) if mask is None else mask
        self.santa.sequence_keys = [_key(ids[kept.bool()].tolist()) for ids, kept in zip(context, real, strict=True)]
        try:
            return super()._model_generate(context, max_length, stop, **settings)
        finally:
            self.santa.sequence_keys = None

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Refused: NotImplementedError."""
        raise NotImplementedError(_refusal("a task"))

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Refused: NotImplementedError."""
        raise NotImplementedError(_refusal("a task"))


def evaluate(lm: SampledLM, tasks: Sequence[Any], **options: Any) -> dict[str, Any]:
    """The harness's `simple_evaluate` with these options; `latent_santa` of the results says what was sampled and read.

    Raises:
        NotImplementedError: a task does not generate. Nothing has run then.
        RuntimeError: no call was sampled although the method samples, so the scores would be dense attention's.
    """
    from latent_santa.methods import METHODS

    manager = options.pop("task_manager", None) or TaskManager(metadata=options.get("metadata"))
    kinds = {name: task.OUTPUT_TYPE for name, task in manager.load(list(tasks))["tasks"].items()}
    if wrong := [f"{name} ({kind})" for name, kind in kinds.items() if kind != GENERATES]:
        raise NotImplementedError(_refusal(", ".join(wrong)))
    lm.santa.reset()
    results = dict(simple_evaluate(model=lm, tasks=list(tasks), task_manager=manager, **options) or {})
    if METHODS[lm.santa.config.method].sampled and not lm.santa.sparse_calls:
        raise RuntimeError(
            "no call of this evaluation was sampled; is the model still patched, and does it use a cache?"
        )
    results["latent_santa"] = {
        "settings": lm.santa.config.to_dict(),
        "sparse_calls": lm.santa.sparse_calls,
        "dense_calls": lm.santa.dense_calls,
        "rows_percent": lm.santa.access.percent,
    }
    return results


def _key(ids: list[int]) -> int:
    """Noise key of a prompt, below 2**63."""
    return int.from_bytes(hashlib.sha256(json.dumps(ids).encode()).digest()[:8], "big") >> 1


def _refusal(what: str) -> str:
    return (
        f"{what}: only tasks of type {GENERATES} are sampled. Log-likelihoods are one dense call over prompt and "
        "continuation; santa.score(ids, continuation) gives those of sampled attention"
    )
