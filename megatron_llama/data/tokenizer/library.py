"""Calls the libraries that read tokenizers' files. Runs the ``tokenizers`` library on many texts,
in processes that are each meant to use one core."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama.data.tokenizer.packed import pack
from megatron_llama.errors import DataError, UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST_REASON = 300
"""Largest number of characters of a library's message: some quote the whole file."""
_THREADS = "TOKENIZERS_PARALLELISM"
"""Environment variable that the library reads at every call; it has no other switch for threads."""


@contextmanager
def foreign_reader(path: Path, *, expected: str, do: str) -> Iterator[None]:
    """A section in which a library reads the file ``path``. Its errors become DataErrors that name
    the file, with the remedy ``do``.

    ``tokenizers`` raises a bare Exception, or, if its own code fails, a PanicException, which is no
    Exception; sentencepiece raises RuntimeError, and its wrapper raises other errors."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        got = f"{error}" or type(error).__name__
        if not isinstance(error, Exception):
            got = f"content on which the library fails ({got})"
        raise DataError(path, got=got[:LONGEST_REASON], expected=expected, do=do) from error


def encode_many(tokenizer: Tokenizer, texts: Sequence[str]) -> list[bytes]:
    """Return the packed ids of each text, encoded on the calling thread. Positions in the text are
    not computed: they take as much as a quarter of the time."""
    with _one_thread():
        return [
            pack(encoding.ids)
            for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]


@contextmanager
def _one_thread() -> Iterator[None]:
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "false"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_THREADS, None)
        else:
            os.environ[_THREADS] = before
