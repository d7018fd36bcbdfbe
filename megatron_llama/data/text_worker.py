"""Reads documents of text from any place of a piece, and tokenizes them. It runs in a process of
its own, which imports no torch."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

from megatron_llama.config.limits import LARGEST_RECORD
from megatron_llama.data.byte_ranges import SourceFile, newlines_before, open_source
from megatron_llama.data.documents import Problems, texts
from megatron_llama.data.readers import (
    Chunk,
    ZstdFrames,
    column_problems,
    library_error,
    refuse_long,
    unreadable,
)
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.data.words import COMPRESSED, PARQUET, kind
from megatron_llama.errors import DataError, describe, listing

TEXTS_AT_ONCE = 64
CHARACTERS_AT_ONCE = 1 << 18
"""Largest number of documents that are tokenized together, and of their characters."""
ROWS_AT_ONCE = 64
SKIPPED_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Question:
    """A request for text to be tokenized."""

    lane: int
    """The lane. Its file is still open if the question begins where its last answer ended."""
    number: int
    """Number of the question, which its answer repeats."""
    file: SourceFile
    start: int
    """The piece is [start, stop) of the file, see ``Piece``."""
    stop: int
    place: int
    """The place to begin: the byte of a line, counted in the uncompressed text, or the number of a
    row."""
    tokens: int
    """Number of tokens wanted. The last document is whole, so there may be more."""


@dataclass(frozen=True)
class Answer:
    """Documents as tokens."""

    lane: int
    number: int
    tokens: NDArray[np.int32]
    """Documents end to end, each with its end token."""
    lengths: NDArray[np.int64]
    """Tokens of each document."""
    places: NDArray[np.int64]
    """Place of each document."""
    next_place: int | None
    """The place to go on from; None at the end of the piece."""


@dataclass(frozen=True)
class Failure:
    """Reason why a question has no answer."""

    lane: int
    number: int
    error: DataError


Documents = Iterator[tuple[int, int, str]]
"""Place of each document, the place behind it, and its text."""


class TextWorker:
    """Answers questions with tokens."""

    def __init__(self, tokenizer: str, tokenizer_type: str | None, key: str, end: int) -> None:
        """``key`` is the field or column with the text, ``end`` the id behind each document."""
        self._tokenizer = load_tokenizer(tokenizer, tokenizer_type)
        self._key = key
        self._end = np.array([end], np.int32)
        self._open: dict[int, tuple[tuple[str, int, int], Documents]] = {}

    def __call__(self, question: Question) -> Answer | Failure:
        try:
            return self._answer(question)
        except DataError as error:
            self._open.pop(question.lane, None)
            return Failure(question.lane, question.number, error)

    def _answer(self, question: Question) -> Answer:
        key = (question.file.path, question.start, question.place)
        kept, documents = self._open.pop(question.lane, (None, iter(())))
        if kept != key:
            documents = read_documents(
                question.file, question.start, question.stop, question.place, self._key
            )
        tokens: list[NDArray[np.int32]] = []
        places: list[int] = []
        lengths: list[int] = []
        place: int | None = question.place
        wanted = question.tokens
        while wanted > 0:
            batch = _some(documents)
            if not batch:
                place = None
                break
            encoded = self._tokenizer.encode_packed([text for _, _, text in batch])
            for (at, _, _), ids in zip(batch, encoded, strict=True):
                if ids:
                    tokens += [np.frombuffer(ids, np.int32), self._end]
                    places.append(at)
                    lengths.append(len(ids) // 4 + 1)
                    wanted -= lengths[-1]
            place = batch[-1][1]
        if place is not None:
            self._open[question.lane] = ((question.file.path, question.start, place), documents)
        return Answer(
            question.lane,
            question.number,
            np.concatenate(tokens) if tokens else np.zeros(0, np.int32),
            np.array(lengths, np.int64),
            np.array(places, np.int64),
            place,
        )


def _some(documents: Documents) -> list[tuple[int, int, str]]:
    """Return the next documents that are tokenized together; none at the end."""
    batch = []
    characters = 0
    for entry in documents:
        batch.append(entry)
        characters += len(entry[2])
        if len(batch) == TEXTS_AT_ONCE or characters >= CHARACTERS_AT_ONCE:
            break
    return batch


def read_documents(file: SourceFile, start: int, stop: int, place: int, key: str) -> Documents:
    """Yield the documents of the piece [start, stop) of a file from ``place`` on. Raises DataError
    for the first that cannot be used, with its line or row, and for a file that cannot be read."""
    name = _name(file)
    reads = _rows if kind(name) == PARQUET else _lines
    errors = (OSError, EOFError, UnicodeError, zlib.error, library_error(name))
    try:
        yield from reads(file, start, stop, place, key)
    except errors as error:
        raise DataError(unreadable(file.path, error)) from error


def _name(file: SourceFile) -> Path:
    """Return the last part of a path or a URL, whose suffix tells the kind of the file."""
    return Path(PurePosixPath(file.path.partition("?")[0]).name)


def _lines(file: SourceFile, start: int, stop: int, place: int, key: str) -> Documents:
    suffix = _name(file).suffix
    with ExitStack() as stack:
        raw: IO[bytes] = stack.enter_context(open_source(file))
        stream = raw
        if suffix == ".gz":
            stream = cast(IO[bytes], stack.enter_context(gzip.GzipFile(fileobj=raw)))
        elif suffix == ".zst":
            stream = cast(IO[bytes], io.BufferedReader(ZstdFrames(raw), SKIPPED_AT_ONCE))
        if suffix in COMPRESSED:
            # Compressed text is one piece, and only read in order.
            stop = -1
            _skip(stream, place)
        elif place == start > 0:
            # The line that begins before the piece belongs to the piece before.
            stream.seek(start - 1)
            place = start - 1 + len(stream.readline())
        else:
            stream.seek(place)
        while stop < 0 or place < stop:
            line = stream.readline(LARGEST_RECORD + 1)
            if not line:
                return
            refuse_long(line)
            behind = place + len(line)
            for text in _texts(file, place, line, key):
                yield place, behind, text
            place = behind


def _skip(stream: IO[bytes], count: int) -> None:
    while count > 0 and (piece := stream.read(min(count, SKIPPED_AT_ONCE))):
        count -= len(piece)


def _texts(file: SourceFile, place: int, line: bytes, key: str) -> Sequence[str]:
    """Return the text of a line; none of a blank one."""
    problems = Problems()
    first = 1 if place == 0 else 2
    documents = texts(Chunk(file.path, first, len(line), [line]), (key,), problems)[key]
    if problems.count:
        # Lines are counted only now, because only the message needs the number.
        problems = Problems()
        number = _line_number(file, place)
        texts(Chunk(file.path, number, len(line), [line]), (key,), problems)
        raise DataError(listing("A document of --data-path cannot be used:", problems.listed))
    return documents


def _line_number(file: SourceFile, place: int) -> int:
    suffix = _name(file).suffix
    if suffix not in COMPRESSED:
        return 1 + newlines_before(file, place)
    with open_source(file) as raw:
        stream: IO[bytes] = (
            cast(IO[bytes], gzip.GzipFile(fileobj=raw))
            if suffix == ".gz"
            else cast(IO[bytes], io.BufferedReader(ZstdFrames(raw), SKIPPED_AT_ONCE))
        )
        lines = 1
        while place > 0 and (piece := stream.read(min(place, SKIPPED_AT_ONCE))):
            lines += piece.count(b"\n")
            place -= len(piece)
        return lines


def _rows(file: SourceFile, start: int, stop: int, place: int, key: str) -> Documents:
    import pyarrow
    from pyarrow import parquet

    with open_source(file) as raw, parquet.ParquetFile(raw) as table:
        kinds = {field.name: field.type for field in table.schema_arrow}
        problems = list(column_problems(file.path, (key,), kinds))
        if problems:
            raise DataError(problems[0].replace("--json-keys", "--stream-key"))
        group = first = 0
        while group < table.num_row_groups:
            rows = table.metadata.row_group(group).num_rows
            if first + rows > place:
                break
            first += rows
            group += 1
        groups = list(range(group, table.num_row_groups))
        for batch in table.iter_batches(ROWS_AT_ONCE, row_groups=groups, columns=[key]):
            if first + batch.num_rows <= place:
                first += batch.num_rows
                continue
            for row, text in enumerate(batch.column(0).cast(pyarrow.string()).to_pylist(), first):
                if row < place:
                    continue
                if text is None:
                    raise DataError(
                        describe(
                            f"{file.path}: row {row + 1}, column {key!r}",
                            got="null",
                            expected="a string",
                            do="mend the row or change --stream-key",
                        )
                    )
                yield row, row + 1, text
            first += batch.num_rows
