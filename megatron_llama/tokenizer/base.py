"""What the rest of the package needs from a tokenizer."""

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
        """Begin-of-text id, None if the tokenizer has none."""
        ...

    @property
    def eos_id(self) -> int | None:
        """End-of-text id, which also ends documents; None if the tokenizer has none."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: no begin or end token is added."""
        ...

    def encode_packed(self, texts: Sequence[str]) -> list[bytes]:
        """``encode`` of each text as bytes (see ``packed``), on the calling thread."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; special tokens give no text."""
        ...

    def save_hf(self, folder: str | Path) -> None:
        """Write the files from which ``transformers.AutoTokenizer.from_pretrained(folder)`` gives
        the same ids.

        Errors: DataError if the tokenizer cannot be expressed there.
        """
        ...
