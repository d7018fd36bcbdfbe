"""Cuts a range of documents, as one token stream, into samples of seq_length + 1 tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_llama.data.indexed import IndexedDataset
from megatron_llama.data.tokenizer.base import Tokenizer
from megatron_llama.errors import DataError

SCANNED_TOKENS = 1 << 22
"""Tokens that are checked together."""


def split_documents(
    split: str, num_documents: int
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Return the document ranges (start, stop) for training, validation and test, in file order,
    by weights such as ``969,30,1``. They may have any sum, and missing ones are 0. Raises DataError
    if they are no weights.
    """
    try:
        weights = [float(word) for word in split.split(",")]
    except ValueError:
        weights = []
    if (
        not 1 <= len(weights) <= 3
        or any(not math.isfinite(w) or w < 0 for w in weights)
        or sum(weights) == 0
    ):
        expected = "one to three weights of at least 0, not all 0, such as 969,30,1"
        raise DataError("split", got=repr(split), expected=expected, do="change --split")
    weights += [0.0] * (3 - len(weights))
    # Rounding sums instead of weights makes the ranges adjacent, and the last one ends at the last
    # document.
    first, second = (round(num_documents * sum(weights[:count]) / sum(weights)) for count in (1, 2))
    return (0, first), (first, second), (second, num_documents)


def megatron_split(split: str, num_documents: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the document ranges (start, stop) for training and validation, rounded as Megatron
    rounds them. ``split`` has been checked: one to three weights, not all 0."""
    weights = [float(word) for word in split.split(",")]
    shares = normalized([*weights, 0.0, 0.0][:3])
    first = round(shares[0] * float(num_documents))
    second = round((shares[0] + shares[1]) * float(num_documents))
    return (0, first), (first, second)


def normalized(weights: Sequence[float]) -> list[float]:
    """Return weights whose sum is 1, rounded as Megatron rounds them."""
    values = np.array(weights, dtype=np.float64)
    shares: list[float] = (values / np.sum(values)).tolist()
    return shares


class TokenStream:
    """The documents in [start, stop), laid end to end. Sample i is the tokens [i * seq_length,
    (i + 1) * seq_length] of this stream, both ends included.

    Neighbours share one token, so that each token but the first is a label once. A tail that is too
    short for a sample is dropped; with ``keep_tail`` it becomes a last sample that is shorter.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: tuple[int, int],
        seq_length: int,
        vocab_size: int,
        *,
        keep_tail: bool = False,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """``tokenizer`` is for messages, which name the token that the model does not have."""
        self.dataset = dataset
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        self.keep_tail = keep_tail
        self.tokenizer = tokenizer
        self.documents = documents
        self.num_documents = documents[1] - documents[0]
        self._start = dataset.document_start(documents[0])
        self.num_tokens = dataset.document_start(documents[1]) - self._start

    def __len__(self) -> int:
        """Return the number of samples."""
        labels = max(0, self.num_tokens - 1)
        tail = self.keep_tail and labels % self.seq_length > 0
        return labels // self.seq_length + tail

    def identity(self) -> dict[str, Any]:
        """Return numbers for JSON that tell this stream from another one."""
        # Counts and no checksum: reading all tokens would take too long at the start of a run.
        return {"documents": self.num_documents, "tokens": self.num_tokens}

    def found(self) -> tuple[str, str]:
        """Return the prefix of the dataset, and the mark of its files."""
        return self.dataset.prefix, self.dataset.found

    def require_samples(self, split: str) -> None:
        """Raise DataError if the stream, used for ``split``, is too short for one sample."""
        if len(self) == 0:
            got = f"{self.num_tokens} tokens in the {split} split"
            expected = (
                "at least 2 tokens"
                if self.keep_tail
                else f"at least {self.seq_length + 1} tokens (seq_length + 1)"
            )
            do = "give more text, lower --seq-length or change --split"
            raise DataError(self.dataset.prefix, got=got, expected=expected, do=do)

    def require_ids(self, share: tuple[int, int]) -> None:
        """Raise DataError if the r-th of n parts of the stream, for ``share`` (r, n), has an id
        outside [0, vocab_size)."""
        rank, count = share
        stop = self._start + self.num_tokens * (rank + 1) // count
        for start in range(self._start + self.num_tokens * rank // count, stop, SCANNED_TOKENS):
            self._checked(start, min(start + SCANNED_TOKENS, stop))

    def sample(self, index: int) -> NDArray[np.int64]:
        """Return the tokens of one sample, int64 [seq_length + 1]; a tail has fewer, 2 at least.
        Raises DataError if an id is outside [0, vocab_size)."""
        pieces = [self._checked(*range) for range in self.ranges(index)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def ranges(self, index: int) -> list[tuple[int, int]]:
        """Return the places [start, stop) in the dataset's stream of the tokens of a sample."""
        assert 0 <= index < len(self), f"sample {index} of {len(self)}"
        start = self._start + index * self.seq_length
        return [(start, min(start + self.seq_length + 1, self._start + self.num_tokens))]

    @property
    def is_remote(self) -> bool:
        """Whether the dataset is behind a URL."""
        return self.dataset.is_remote

    def fetch(self, index: int) -> None:
        """Begin to read a sample of a remote dataset before ``sample`` is called for it."""
        for start, stop in self.ranges(index):
            self.dataset.fetch(start, stop)

    def _checked(self, start: int, stop: int) -> NDArray[np.int64]:
        tokens = self.dataset.tokens(start, stop).astype(np.int64)
        # As unsigned numbers negative ids are huge: one comparison finds ids outside either end.
        if int(tokens.view(np.uint64).max()) >= self.vocab_size:
            self._refuse(start, tokens)
        return tokens

    def _refuse(self, start: int, tokens: NDArray[np.int64]) -> None:
        at = int(np.argmax((tokens < 0) | (tokens >= self.vocab_size)))
        document = self.dataset.document_at(start + at)
        token = start + at - self.dataset.document_start(document)
        where = f"{self.dataset.prefix}.bin: document {document}, token {token}"
        do = (
            "preprocess with this model's tokenizer, or give --resize-embeddings to add rows to a"
            " trained model, --vocab-size to a new one"
        )
        id = int(tokens[at])
        known = self.tokenizer.token(id) if self.tokenizer is not None else None
        got = f"id {id}" if known is None else f"the token {known!r} (id {id})"
        raise DataError(where, got=got, expected=f"0 to {self.vocab_size - 1}", do=do)
