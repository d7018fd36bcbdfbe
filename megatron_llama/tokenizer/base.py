"""The interface of a tokenizer to the rest of the package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class Tokenizer(Protocol):
    """Text to ids and back. Ids lie in [0, vocab_size)."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The begin-of-text id, or None if the tokenizer has none."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The end-of-text id, which also ends documents, or None if the tokenizer has none."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of the text alone: no begin or end token is added."""
        ...

    def encode_packed(self, texts: Sequence[str]) -> list[bytes]:
        """Encode each text on the calling thread, and return its ids as bytes (see ``packed``)."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids. Special tokens give no text."""
        ...

    def save_hf(self, folder: str | Path) -> None:
        """Write the files from which ``transformers.AutoTokenizer.from_pretrained(folder)`` gives
        the same ids. Raises DataError if the tokenizer cannot be expressed there."""
        ...
