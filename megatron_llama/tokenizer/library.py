"""Calls the ``tokenizers`` library for many texts, in processes that are each meant to use one
core."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tokenizers import Tokenizer

from megatron_llama.tokenizer.packed import pack

_THREADS = "TOKENIZERS_PARALLELISM"
"""The library looks this variable up at every call, and has no other switch for its threads."""


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
