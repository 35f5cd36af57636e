"""Rendering a sample for one tokenizer: chat template once, special tokens once, answer prefix where asked for."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from latent_santa.eval.errors import EvalError
from latent_santa.eval.run.store import Prompt, fold
from latent_santa.eval.sources.samples import Sample, join_texts

PREFIX_PLACES = ("assistant", "user", "none")
THOUGHT = re.compile(r"<(think|thinking|thought|reasoning)>|\[(THINK)\]")


def ids_sha256(ids: list[int]) -> str:
    """Hash of a list of token ids."""
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


@dataclass(frozen=True)
class Renderer:
    """Turns samples into token ids.

    answer_prefix  "assistant": the prefix opens the model's turn (as the official predictor does it by sending one
                   string); "user": it closes the user's turn; "none": it is left out
    chat           False: no chat template, even if the tokenizer has one
    options        values of variables that the chat template reads, such as enable_thinking
    """

    tokenizer: Any
    answer_prefix: str = "assistant"
    chat: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raises EvalError for options that no template reads."""
        if not self.options:
            return
        if not self.uses_template:
            raise EvalError(f"--template-option {', '.join(self.options)}: no chat template is used")
        taken = {"messages", *inspect.signature(type(self.tokenizer).apply_chat_template).parameters}
        for name in self.options:
            if name in taken:
                raise EvalError(f"--template-option {name}: the evaluation itself sets it; give a template's variable")
            if not re.search(rf"\b{name}\b", str(self.tokenizer.chat_template)):
                raise EvalError(f"--template-option {name}: the chat template of this tokenizer does not read it")

    def warnings(self) -> list[str]:
        """What may make answers wrong: a template that opens a thought, which the answer then is part of."""
        if not self.uses_template:
            return []
        with_turn, without = self._chat("Question?"), self._chat("Question?", add_generation_prompt=False)
        turn = with_turn.removeprefix(without)
        opened = [(found.start(), found[0], found[1] or found[2]) for found in THOUGHT.finditer(turn)]
        if not opened:
            return []
        start, tag, name = opened[-1]
        if re.search(rf"[<\[]/{name}[>\]]", turn[start:]):
            return []
        known = "enable_thinking" in str(self.tokenizer.chat_template) and "enable_thinking" not in self.options
        option = "--template-option enable_thinking=false closes it" if known else "a --template-option may close it"
        inside = "the beginning of the answer stands" if self.answer_prefix == "assistant" else "the answer begins"
        return [f"the chat template opens a thought ({tag}), and {inside} inside of it; {option}"]

    def _chat(self, user: str, add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            [{"role": "user", "content": user}],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self.options,
        )

    @property
    def uses_template(self) -> bool:
        """Whether a chat template is applied."""
        return self.chat and bool(getattr(self.tokenizer, "chat_template", None))

    def text(self, user: str, prefix: str, chat: bool = True) -> str:
        """The prompt as one string. Without a template it is the plain text, special tokens not included.

        chat  False: the plain text, also in a run that uses the template
        """
        if self.answer_prefix == "none":
            prefix = ""
        if not (chat and self.uses_template):
            return join_texts(user, prefix)
        if self.answer_prefix == "user":
            user, prefix = join_texts(user, prefix), ""
        return join_texts(self._chat(user), prefix)

    def ids(self, text: str, chat: bool = True) -> list[int]:
        """Token ids of a rendered text. A template brings its own special tokens, so none are added to it again."""
        special = not (chat and self.uses_template)
        return self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]

    def encode(self, user: str, prefix: str, chat: bool = True) -> list[int]:
        """Token ids of the prompt."""
        return self.ids(self.text(user, prefix, chat), chat)

    def count(self, user: str, prefix: str, chat: bool = True) -> int:
        """Number of tokens of the prompt."""
        return len(self.encode(user, prefix, chat))

    def prompt(self, sample: Sample, limit: int | None) -> Prompt:
        """A sample rendered, tokenised and checked: nothing is truncated, and the answer fits as well.

        Raises EvalError if prompt and new tokens together exceed `limit`, or if the prompt starts with two BOS tokens.
        """
        text = self.text(sample.input, sample.answer_prefix, sample.chat)
        ids = self.ids(text, sample.chat)
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
        return Prompt(sample, len(ids), ids_sha256(ids), fold(text, sample.input))

    def frozen(self, prompt: Prompt) -> str:
        """The text of a frozen prompt; runs of earlier versions did not keep it."""
        sample = prompt.sample
        return self.text(sample.input, sample.answer_prefix, sample.chat) if prompt.text is None else prompt.text

    def fingerprint(self) -> dict[str, Any]:
        """What the rendering depends on, for the manifest: hashes of tokenizer and template, and the options."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        # The vocabulary alone misses merges and normalisers; a slow tokenizer has nothing better.
        state = backend.to_str() if backend is not None else json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
        template = getattr(self.tokenizer, "chat_template", None)
        return {
            "tokenizer_sha256": hashlib.sha256(state.encode()).hexdigest(),
            "chat_template_sha256": hashlib.sha256(str(template).encode()).hexdigest() if self.uses_template else None,
            "template_options": json.dumps(dict(self.options), sort_keys=True),
            "answer_prefix": self.answer_prefix,
        }
