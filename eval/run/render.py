"""Rendering a sample for one tokenizer: chat template once, special tokens once, answer prefix where asked for."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from latent_santa.eval.errors import EvalError

if TYPE_CHECKING:
    from latent_santa.eval.sources.samples import Sample

PREFIX_PLACES = ("assistant", "user", "none")


def join_texts(left: str, right: str) -> str:
    """`left + right` with exactly one break between the words of the two.

    The leading white space of `right` is dropped where `left` ends in white space and kept elsewhere (some templates
    end in "Assistant:" and need it).
    """
    return left + (right.lstrip() if left[-1:].isspace() else right)


def ids_sha256(ids: list[int]) -> str:
    """Hash of a list of token ids."""
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


@dataclass(frozen=True)
class Renderer:
    """Turns samples into token ids.

    answer_prefix  "assistant": the prefix opens the model's turn (as the official predictor does it by sending one
                   string); "user": it closes the user's turn; "none": it is left out
    chat           False: no chat template, even if the tokenizer has one
    """

    tokenizer: Any
    answer_prefix: str = "assistant"
    chat: bool = True

    @property
    def uses_template(self) -> bool:
        """Whether a chat template is applied."""
        return self.chat and bool(getattr(self.tokenizer, "chat_template", None))

    def text(self, user: str, prefix: str) -> str:
        """The prompt as one string. Without a template it is the plain text, special tokens not included."""
        if self.answer_prefix == "none":
            prefix = ""
        if not self.uses_template:
            return join_texts(user, prefix)
        if self.answer_prefix == "user":
            user, prefix = join_texts(user, prefix), ""
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": user}], tokenize=False, add_generation_prompt=True
        )
        return join_texts(rendered, prefix)

    def encode(self, user: str, prefix: str) -> list[int]:
        """Token ids of the prompt. A template brings its own special tokens, so none are added to it again."""
        text, special = self.text(user, prefix), not self.uses_template
        return self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]

    def count(self, user: str, prefix: str) -> int:
        """Number of tokens of the prompt."""
        return len(self.encode(user, prefix))

    def prompt(self, sample: Sample, limit: int | None) -> list[int]:
        """Token ids of a sample, checked: nothing is truncated, and the answer fits as well.

        Raises EvalError if prompt and new tokens together exceed `limit`, or if the prompt starts with two BOS tokens.
        """
        ids = self.encode(sample.input, sample.answer_prefix)
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise EvalError(
                f"{sample.id}: the prompt starts with two BOS tokens; the data seem to have a chat template in them "
                "already: use --no-chat-template"
            )
        if limit is not None and len(ids) + sample.max_new_tokens > limit:
            raise EvalError(
                f"{sample.id}: {len(ids)} prompt tokens and {sample.max_new_tokens} new ones exceed the model's limit "
                f"of {limit} positions, and prompts are never truncated; use shorter data, or --context-limit if the "
                "model is known to take more"
            )
        return ids

    def fingerprint(self) -> dict[str, Any]:
        """What the rendering depends on, for the manifest: hashes of tokenizer and template, and both options."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        # The vocabulary alone misses merges and normalisers; a slow tokenizer has nothing better.
        state = backend.to_str() if backend is not None else json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
        template = getattr(self.tokenizer, "chat_template", None)
        return {
            "tokenizer_sha256": hashlib.sha256(state.encode()).hexdigest(),
            "chat_template_sha256": hashlib.sha256(str(template).encode()).hexdigest() if self.uses_template else None,
            "answer_prefix": self.answer_prefix,
        }
