"""Piece-wise encoding with the embedded model's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PAD, BOS, EOS, USER, ASSISTANT = range(5)
_MEMO_LIMIT = 300_000


class PieceEncoder:
    """Encodes pieces one by one, remembering them; the ids equal those of the joined text.

    `tokenizer` is a `tokenizers.Tokenizer`. Numbers are put together from their digits' tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._memo: dict[str, list[int]] = {}
        self._digits = [self._encode(str(digit))[0] for digit in range(10)]
        self._first_digits = [self._encode(f" {digit}")[0] for digit in range(10)]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def piece(self, text: str) -> list[int]:
        """Token ids of one piece (do not change the list)."""
        known = self._memo.get(text)
        if known is not None:
            return known
        if text[0] == " " and text[1:].isdigit():
            return [self._first_digits[int(text[1])], *(self._digits[int(digit)] for digit in text[2:])]
        if len(self._memo) > _MEMO_LIMIT:
            self._memo.clear()
        ids = self._memo[text] = self._encode(text)
        return ids

    def ids(self, pieces: Sequence[str]) -> list[int]:
        """Token ids of the pieces in order."""
        return [token for text in pieces for token in self.piece(text)]

    def cost(self, pieces: Sequence[str]) -> int:
        """Number of tokens of the pieces."""
        return sum(len(self.piece(text)) for text in pieces)
