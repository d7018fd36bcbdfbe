"""The interface of a tokenizer to the rest of the package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron_llama.errors import describe


@dataclass(frozen=True)
class Token:
    """The meaning of an id."""

    text: str | None
    """Spelling as in a tokenizer.json; None for an id that no token has."""
    special: bool
    """Whether it is no text: a begin or end token, a header, a reserved place."""


class Tokenizer(Protocol):
    """Text to ids and back. Ids lie in [0, vocab_size)."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def base_vocab_size(self) -> int:
        """The same without tokens that were added behind the vocabulary, for which a model need not
        have rows."""
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

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids with which transformers' tokenizer begins a text. They include the tokens
        that it puts before and behind it (a begin token or none, as its files say), and a special
        token where the text spells one."""
        ...

    def encode_packed(self, texts: Sequence[str]) -> list[bytes]:
        """Encode each text on the calling thread, and return its ids as bytes (see ``packed``)."""
        ...

    def encode_long(self, text: str) -> Iterator[bytes]:
        """Yield the ids of ``encode_packed`` for one text piece by piece, so that little of a long
        text is in memory as words. A tokenizer yields one piece if no place is known where a text
        can be cut without changing ids."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids. Special tokens give no text."""
        ...

    def token(self, id: int) -> str | None:
        """Return the token of an id as the vocabulary spells it, or None if there is none."""
        ...

    def tokens(self) -> list[Token]:
        """Return the meaning of each id. A tokenizer's own file and the ``tokenizer.json`` that it
        was converted to give the same tokens."""
        ...

    def save_hf(self, folder: str | Path) -> None:
        """Write the files from which ``transformers.AutoTokenizer.from_pretrained(folder)`` gives
        the same ids. Raises DataError if the tokenizer cannot be expressed in them."""
        ...


def beyond_vocabulary(
    where: str, ids: Sequence[int], vocab_size: int, tokenizer: Tokenizer, *, do: str
) -> str | None:
    """Return a line that names the first of the tokens for which the model has no row; None if it
    has one for each of the ids."""
    beyond = next((id for id in ids if id >= vocab_size), None)
    if beyond is None:
        return None
    return describe(
        where,
        got=f"the token {tokenizer.token(beyond)!r} (id {beyond})",
        expected=f"tokens of the model, whose vocab_size is {vocab_size}",
        do=do,
    )
