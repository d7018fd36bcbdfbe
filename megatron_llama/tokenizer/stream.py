"""Decodes tokens into text while they arrive."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_llama.tokenizer.base import Tokenizer

UNFINISHED = "\ufffd"
"""What a decoder shows for bytes that are no character yet."""


class TextStream:
    """Turns token ids into text piece by piece. The pieces together are the text of all ids.

    The text of a token may depend on the one before it (a space is dropped at the start), and a
    character may take several tokens. So the last tokens are decoded again with every new one, and
    a piece is returned when it ends in whole characters."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        """``before`` holds ids that come first and whose text is not returned."""
        self._tokenizer = tokenizer
        self._ids = list(before)
        self._context = 0
        self._shown = len(self._ids)

    def add(self, token: int) -> str:
        """Return the text that the token completes, which may be empty."""
        self._ids.append(token)
        text = self._pending()
        if not text or text.endswith(UNFINISHED):
            return ""
        self._context = self._shown
        self._shown = len(self._ids)
        return text

    def rest(self) -> str:
        """Return the text that is left when no token follows."""
        text = self._pending()
        self._shown = len(self._ids)
        return text

    def _pending(self) -> str:
        known = self._tokenizer.decode(self._ids[self._context : self._shown])
        return self._tokenizer.decode(self._ids[self._context :])[len(known) :]
