"""Cuts a range of documents, as one token stream, into samples of seq_length + 1 tokens."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from megatron_llama.data.indexed import IndexedDataset
from megatron_llama.errors import DataError


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
    # Sums are rounded, not the weights: so the ranges are adjacent, and the last ends at the last
    # document.
    first, second = (round(num_documents * sum(weights[:count]) / sum(weights)) for count in (1, 2))
    return (0, first), (first, second), (second, num_documents)


class TokenStream:
    """The documents in [start, stop), laid end to end. Sample i is the tokens [i * seq_length,
    (i + 1) * seq_length] of this stream, both ends included.

    Neighbours share one token, so that each token but the first is a label once. A tail that is too
    short for a sample is dropped.
    """

    def __init__(
        self, dataset: IndexedDataset, documents: tuple[int, int], seq_length: int, vocab_size: int
    ) -> None:
        self.dataset = dataset
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        self.num_documents = documents[1] - documents[0]
        self._start = dataset.document_start(documents[0])
        self.num_tokens = dataset.document_start(documents[1]) - self._start

    def __len__(self) -> int:
        """Return the number of samples."""
        return max(0, self.num_tokens - 1) // self.seq_length

    def require_samples(self, split: str) -> None:
        """Raise DataError if the stream, used for ``split``, is too short for one sample."""
        if len(self) == 0:
            got = f"{self.num_tokens} tokens in the {split} split"
            expected = f"at least {self.seq_length + 1} tokens (seq_length + 1)"
            do = "give more text, lower --seq-length or change --split"
            raise DataError(self.dataset.prefix, got=got, expected=expected, do=do)

    def sample(self, index: int) -> NDArray[np.int64]:
        """Return the tokens of one sample, int64 [seq_length + 1]. Raises DataError if an id is
        outside [0, vocab_size)."""
        assert 0 <= index < len(self), f"sample {index} of {len(self)}"
        start = self._start + index * self.seq_length
        tokens = self.dataset.tokens(start, start + self.seq_length + 1).astype(np.int64)
        # As unsigned numbers negative ids are huge, so that one pass finds both ends.
        if int(tokens.view(np.uint64).max()) >= self.vocab_size:
            self._refuse(start, tokens)
        return tokens

    def _refuse(self, start: int, tokens: NDArray[np.int64]) -> None:
        at = int(np.argmax((tokens < 0) | (tokens >= self.vocab_size)))
        document = self.dataset.document_at(start + at)
        token = start + at - self.dataset.document_start(document)
        where = f"{self.dataset.prefix}.bin: document {document}, token {token}"
        do = "preprocess with this model's tokenizer or raise --vocab-size"
        raise DataError(
            where, got=f"id {tokens[at]}", expected=f"0 to {self.vocab_size - 1}", do=do
        )
