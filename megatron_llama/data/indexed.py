"""Megatron's indexed dataset: PREFIX.bin holds token ids, PREFIX.idx says where each document
begins.

The layout of the index, little endian, is: ``MMIDIDX\\0\\0``, version u64 = 1, dtype code u8,
number of sequences n u64, number of document indices d u64, int32[n] sequence lengths in tokens,
int64[n] byte offsets into the .bin, int64[d] first sequence of each document and n at the end.
Multimodal datasets append int8[n], a mode for each sequence, which is not read. Files are
interchangeable with ``megatron.core.datasets.indexed_dataset``.

Megatron writes sequences end to end, so the lengths determine all other numbers of the index, and
the size of the .bin. An index with any other number is refused: a bit that has flipped in a length
would leave out tokens, or read them twice.
"""

from __future__ import annotations

import hashlib
import os
import struct
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megatron_llama.data.sums import DatasetSums, FileSums, RunningSums
from megatron_llama.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_CODES: Mapping[int, str] = MappingProxyType(
    {
        1: "uint8",
        2: "int8",
        3: "int16",
        4: "int32",
        5: "int64",
        6: "float64",
        7: "float32",
        8: "uint16",
    }
)
_RESTORE = "preprocess the corpus again or copy both files again"
_CHECKED = 1 << 20
"""Sequences that are checked together: the arrays that numpy makes of them stay in a core's cache,
whatever the size of the index."""
_LARGEST_PLACE = 1 << 62
"""Larger than any file; the size of one more block can be added to it in int64."""

Tokens = NDArray[np.integer[Any]]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype that Megatron takes: uint16 below 65500 ids, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedDatasetWriter:
    """Writes a dataset document by document. ``finish`` puts both files in place, replacing older
    ones; nothing appears under the final names before.

    As a context manager it finishes at the end of the block, or removes its temporary files if the
    block raises.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        self._code = next(code for code, name in _CODES.items() if name == self.dtype.name)
        self.num_documents = self.num_tokens = 0
        self._lengths: list[NDArray[np.int32]] = []
        self._bin_sums = RunningSums()
        self._idx_sums: FileSums | None = None
        self._temporary = {
            suffix: Path(f"{self.prefix}{suffix}.tmp-{os.getpid()}") for suffix in (".bin", ".idx")
        }
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)

    @cached_property
    def _bin(self) -> BinaryIO:
        """The temporary .bin. It is made when the first tokens come, not with the writer: an
        interrupt comes before the writer's block begins, or the block can discard the file."""
        return open(self._temporary[".bin"], "wb")  # closed by finish and discard

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()

    def add(self, document: Tokens) -> None:
        """Append one document, a vector of token ids. Raises DataError if an id does not fit the
        dtype."""
        self.add_many(document, np.array([document.size]))

    def add_many(self, tokens: Tokens, lengths: NDArray[np.integer[Any]]) -> None:
        """Append documents of the given lengths, which lie end to end in ``tokens``. Raises
        DataError if an id does not fit the dtype, or a document is too long for the format."""
        assert int(lengths.sum()) == tokens.size, "lengths do not add up to the tokens"
        self._write(tokens)
        self._end_documents(lengths)

    def add_pieces(self, pieces: Iterable[Tokens]) -> int:
        """Append one document whose tokens come piece by piece, unless it has none. Return their
        number. Raises DataError as ``add_many`` does."""
        count = 0
        for piece in pieces:
            self._write(piece)
            count += piece.size
        if count:
            self._end_documents(np.array([count]))
        return count

    def _write(self, tokens: Tokens) -> None:
        if tokens.size and not np.can_cast(tokens.dtype, self.dtype):
            limits = np.iinfo(self.dtype)
            if tokens.min() < limits.min or tokens.max() > limits.max:
                got = f"token ids {tokens.min()} to {tokens.max()}"
                raise DataError(
                    self.prefix,
                    got=got,
                    expected=f"ids that fit {self.dtype}",
                    do="use a wider dtype",
                )
        content = np.ascontiguousarray(tokens, dtype=self.dtype).data.cast("B")
        self._bin.write(content)
        self._bin_sums.add(content)

    def _end_documents(self, lengths: NDArray[np.integer[Any]]) -> None:
        """Note the documents whose tokens have been written."""
        if lengths.size and int(lengths.max()) > np.iinfo(np.int32).max:
            got = f"a document of {lengths.max()} tokens"
            raise DataError(
                self.prefix,
                got=got,
                expected="fewer than 2**31 tokens, the format's limit",
                do="split the document",
            )
        self._lengths.append(lengths.astype(np.int32))
        self.num_documents += lengths.size
        self.num_tokens += int(lengths.sum())

    @property
    def sums(self) -> DatasetSums:
        """The sums of both files, which are known when they are finished."""
        assert self._idx_sums is not None, "the files are not finished"
        return DatasetSums(self._bin_sums.result(), self._idx_sums)

    def finish(self) -> None:
        """Write the index and put both files in place. Nothing may be called after it."""
        try:
            self._bin.close()
            self._write_index()
            # Two files that belong together, so not `replacing`. The old index goes first: if this
            # process dies in between, no reader can pair it with the new tokens.
            Path(self.prefix + ".idx").unlink(missing_ok=True)
            os.replace(self._temporary[".bin"], self.prefix + ".bin")
            os.replace(self._temporary[".idx"], self.prefix + ".idx")
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove the temporary files and leave older outputs as they are."""
        if "_bin" in vars(self):
            self._bin.close()
        for path in self._temporary.values():
            path.unlink(missing_ok=True)

    def _write_index(self) -> None:
        lengths = np.concatenate(self._lengths) if self._lengths else np.zeros(0, np.int32)
        sizes = lengths.astype(np.int64) * self.dtype.itemsize
        offsets = np.cumsum(sizes) - sizes
        documents = np.arange(lengths.size + 1, dtype=np.int64)
        header = _HEADER.pack(MAGIC, VERSION, self._code, lengths.size, lengths.size + 1)
        sums = RunningSums()
        with open(self._temporary[".idx"], "wb") as idx:
            for content in (header, *(array.tobytes() for array in (lengths, offsets, documents))):
                idx.write(content)
                sums.add(memoryview(content))
        self._idx_sums = sums.result()


class IndexedDataset:
    """The documents of PREFIX.bin as one token stream, memory-mapped."""

    is_remote = False
    """Whether tokens come from a server."""

    def __init__(self, prefix: str | Path) -> None:
        """Open the files. Raises DataError if one is missing or damaged."""
        self.prefix = str(prefix)
        idx = self.prefix + ".idx"
        bin = self.prefix + ".bin"
        for path in (idx, bin):
            if not os.path.isfile(path):
                do = "give the common prefix of the .bin and .idx files, without suffix"
                raise DataError(
                    path, got="no such file", expected="PREFIX.bin and PREFIX.idx", do=do
                )
        bin_size = os.path.getsize(bin)
        self._open_index(Path(idx), bin_size)
        # A plain view, since slicing an np.memmap runs Python code.
        self._tokens: Tokens = np.memmap(
            bin, mode="r", dtype=self.dtype, shape=(bin_size // self.dtype.itemsize,)
        ).view(np.ndarray)

    def _open_index(self, path: Path, bin_size: int) -> None:
        """Take the index from a file. Raises DataError if it is damaged, or does not fit a .bin of
        so many bytes."""
        idx = self.prefix + ".idx"
        bin = self.prefix + ".bin"
        self.dtype, sequences, documents = _read_header(path, idx)
        raw = self._index = np.memmap(path, mode="r", dtype=np.uint8).view(np.ndarray)
        at = _HEADER.size
        self._lengths = raw[at : (at := at + 4 * sequences)].view(np.int32)
        self._pointers = raw[at : (at := at + 8 * sequences)].view(np.int64)
        self._documents = raw[at : at + 8 * documents].view(np.int64)
        self.num_documents = documents - 1
        self._check_documents(idx)
        self.num_tokens = self._check_sequences(idx, bin, bin_size)

    @property
    def found(self) -> str:
        """Mark that tells these files from others, as far as is known without reading them."""
        return f"{self.num_documents} documents with {self.num_tokens} tokens"

    def require_sums(self, sums: DatasetSums) -> None:
        """Raise DataError unless the files have the sizes with which they were written, and unless
        the hash of an index of one piece is right. Hashing a larger index takes too long at the
        start of a run (``verification.py``)."""
        idx = self.prefix + ".idx"
        sums.bin.require_size(self.prefix + ".bin", self.num_tokens * self.dtype.itemsize)
        sums.idx.require_size(idx, self._index.nbytes)
        if len(sums.idx.pieces) == 1:
            sums.idx.require_piece(idx, 0, hashlib.sha256(self._index.data))

    @cached_property
    def sequences_are_documents(self) -> bool:
        """Whether each document has one sequence."""
        documents = self._documents
        blocks = range(0, self._lengths.size, _CHECKED)
        return documents.size == self._lengths.size + 1 and all(
            bool(np.all(np.diff(documents[first : first + _CHECKED + 1]) == 1)) for first in blocks
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens in each document, int64 [num_documents]."""
        starts = np.append(self._pointers // self.dtype.itemsize, self.num_tokens)
        return np.diff(starts[self._documents])

    def lengths_digest(self, start: int, stop: int) -> str:
        """Return a digest of the lengths of the documents in [start, stop), each one sequence."""
        return hashlib.sha256(self._lengths[start:stop].data).hexdigest()

    def document_start(self, document: int) -> int:
        """Return the stream position of a document's first token; for ``num_documents`` that is the
        length of the stream."""
        sequence = int(self._documents[document])
        if sequence == self._lengths.size:
            return self.num_tokens
        return int(self._pointers[sequence]) // self.dtype.itemsize

    def document_at(self, position: int) -> int:
        """Return the document that holds a stream position."""
        return bisect_right(range(self.num_documents), position, key=self.document_start) - 1

    def tokens(self, start: int, stop: int) -> Tokens:
        """Return tokens [start, stop) of the stream in the file's dtype. Where the .bin is on the
        disk they are read-only and not copied. Raises DataError if a remote .bin cannot be read."""
        assert 0 <= start <= stop <= self.num_tokens, (
            f"[{start}, {stop}) is outside the stream of {self.num_tokens} tokens"
        )
        return self._read(start, stop)

    def fetch(self, start: int, stop: int) -> None:
        """Begin to read tokens that ``tokens`` is about to be asked for."""

    def _read(self, start: int, stop: int) -> Tokens:
        """Return the tokens at the places [start, stop) of the .bin."""
        return self._tokens[start:stop]

    def _check_documents(self, idx: str) -> None:
        """Raise DataError unless documents begin at the first sequence, rise, and end with the
        last."""
        documents = self._documents
        sequences = self._lengths.size
        wrong = None if documents[0] == 0 else 0
        for first in range(0, documents.size, _CHECKED):
            block = documents[first : first + _CHECKED + 1]
            if wrong is None and (falls := block[1:] < block[:-1]).any():
                wrong = first + 1 + int(falls.argmax())
        if wrong is None and documents[-1] != sequences:
            wrong = documents.size - 1
        if wrong is not None:
            got = f"document indices that do not rise: number {wrong} is {documents[wrong]}"
            raise DataError(idx, got=got, expected=f"indices from 0 to {sequences}", do=_RESTORE)

    def _check_sequences(self, idx: str, bin: str, bin_size: int) -> int:
        """Return the number of tokens. Raise DataError for lengths that are negative, for sequences
        that do not lie end to end, and for a .bin that is shorter or longer than they say."""
        item = self.dtype.itemsize
        place = 0
        for first in range(0, self._lengths.size, _CHECKED):
            lengths = self._lengths[first : first + _CHECKED]
            if (lengths < 0).any():
                at = int((lengths < 0).argmax())
                raise DataError(
                    idx,
                    got=f"a negative length, {lengths[at]}, of sequence {first + at}",
                    expected="lengths of at least 0",
                    do=_RESTORE,
                )
            ends = np.cumsum(lengths, dtype=np.int64) * item
            expected = ends - lengths.astype(np.int64) * item + place
            wrong = self._pointers[first : first + _CHECKED] != expected
            if wrong.any():
                at = int(wrong.argmax())
                self._refuse_offset(idx, first + at, int(expected[at]), bin_size)
            place += int(ends[-1])
            if place > _LARGEST_PLACE:
                break
        if place == 0:
            raise DataError(
                bin,
                got="no tokens",
                expected="at least one document with text",
                do="preprocess a corpus that has text",
            )
        if place != bin_size:
            raise DataError(
                bin, got=f"{bin_size} bytes", expected=f"{place} bytes, as {idx} says", do=_RESTORE
            )
        return place // item

    def _refuse_offset(self, idx: str, sequence: int, expected: int, bin_size: int) -> None:
        offset = int(self._pointers[sequence])
        if not 0 <= offset <= bin_size:
            words = f"outside the .bin of {bin_size} bytes"
        elif offset < expected:
            words = "inside the sequence before it"
        else:
            words = f"behind a gap of {offset - expected} bytes"
        raise DataError(
            idx,
            got=f"an offset of {offset} for sequence {sequence}, {words}",
            expected=f"{expected}, since sequences lie end to end",
            do=_RESTORE,
        )


def _read_header(path: Path, idx: str) -> tuple[np.dtype[Any], int, int]:
    """Return (dtype, number of sequences, number of document indices) of an index, which errors
    call ``idx``. Raises DataError if its header is damaged or does not fit its size."""
    size = path.stat().st_size
    with open(path, "rb") as stream:
        header = stream.read(_HEADER.size)
    if header[:9] != MAGIC[: len(header)]:
        do = "give the prefix of a Megatron indexed dataset"
        raise DataError(idx, got=f"the first bytes {header[:9]!r}", expected=f"{MAGIC!r}", do=do)
    if size < _HEADER.size:
        raise DataError(
            idx, got=f"{size} bytes", expected=f"a header of {_HEADER.size} bytes", do=_RESTORE
        )
    _, version, code, sequences, documents = _HEADER.unpack(header)
    if version != VERSION:
        raise DataError(
            idx,
            got=f"version {version}",
            expected=f"version {VERSION}",
            do="write it with Megatron's current tool or this one",
        )
    dtype = np.dtype(_CODES.get(code, "float64"))
    if dtype.kind == "f":
        expected = "the code of an integer type: " + ", ".join(
            f"{code} {name}" for code, name in _CODES.items() if "int" in name
        )
        raise DataError(idx, got=f"dtype code {code}", expected=expected, do=_RESTORE)
    needed = _HEADER.size + 12 * sequences + 8 * documents
    # Multimodal datasets append a byte for each sequence.
    if size not in (needed, needed + sequences):
        raise DataError(
            idx,
            got=f"{size} bytes",
            expected=f"{needed} bytes for its {sequences} sequences and {documents} document "
            "indices",
            do=_RESTORE,
        )
    if documents == 0:
        raise DataError(idx, got="no document indices", expected="at least one", do=_RESTORE)
    return dtype, sequences, documents
