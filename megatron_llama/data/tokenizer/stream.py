"""Decodes tokens into text while they arrive, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_llama.data.tokenizer.base import Tokenizer

UNFINISHED = "\ufffd"
"""Character that a decoder shows for bytes that are no character yet."""


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


class StopStrings:
    """Ends a text that comes piece by piece before the first of some strings.

    A possible beginning of such a string is kept back until it is decided. The string that is
    complete first counts, so the text does not depend on where the pieces end."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._kept = ""
        self.found = False
        """Whether the text has ended. Nothing may be added to it then."""

    def add(self, piece: str) -> str:
        """Return the text that is certain now, which may be empty."""
        text = self._kept + piece
        places = [(text.find(string), len(string)) for string in self._strings]
        ends = [(start + length, start) for start, length in places if start >= 0]
        if ends:
            self.found = True
            self._kept = ""
            return text[: min(ends)[1]]
        certain = next(at for at in range(len(text) + 1) if self._may_begin(text[at:]))
        self._kept = text[certain:]
        return text[:certain]

    def rest(self) -> str:
        """Return the text that is left when no piece follows."""
        return self._kept

    def _may_begin(self, text: str) -> bool:
        return not text or any(string.startswith(text) for string in self._strings)
