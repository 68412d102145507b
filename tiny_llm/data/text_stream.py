"""Token ids to text as they come, in pieces that are valid text at every moment.

A token of a byte-level tokenizer may end within a character. Decoding then shows a replacement character at
the end; such a piece is held back until later tokens complete it, or until the stream ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
CONTEXT = 8  # tokens before a piece that are decoded with it: they decide about spaces


class TextStream:
    """Decodes the tokens that follow `before`. The pieces of `push` and `finish` joined are their text."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._begin(list(before))

    def _begin(self, tokens: list[int]) -> None:
        self._tokens = tokens[-CONTEXT:]
        self._shown = self._decode()

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))

    def push(self, token: int) -> str:
        """Take a token and return the text that is complete with it, which may be empty."""
        self._tokens.append(token)
        text = self._decode()
        if text.endswith(REPLACEMENT):
            return ""
        piece = text[len(self._shown) :]
        self._begin(self._tokens)
        return piece

    def finish(self) -> str:
        """Return what was held back, incomplete characters as replacement characters."""
        piece = self._decode()[len(self._shown) :]
        self._begin(self._tokens)
        return piece
