"""Reads files of text, compressed or not, piece by piece in order, while other pieces are
tokenized."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, cast

from megatron_llama.config.limits import LARGEST_RECORD
from megatron_llama.data.words import COMPRESSED, JSON_LINES, PARQUET, kind
from megatron_llama.errors import DataError, describe, listing

CHUNK_BYTES = 1 << 20
"""Large against the cost of a task (0.1 ms), and small against a file, so that all workers end
together."""
LONG_BYTES = 32 << 20
"""A document of more bytes is a chunk of its own. It is encoded piece by piece where it is written:
so there is one at a time, and its tokens are never in memory together."""
_PACKAGES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {".zst": ("zstandard", "zstd"), PARQUET: ("pyarrow", "parquet")}
)
"""By suffix: the package that reads such a file, and the extra that installs it."""


class LongRecordError(EOFError):
    """A line or a text is longer than any: the rest of the file is not read."""


@dataclass(frozen=True)
class Chunk:
    """Some lines of a JSON-lines file, some rows of a parquet file, or the whole of a text file."""

    path: str
    first: int | None
    """Number of the first line or row, counted from 1; None for a text file."""
    size: int
    """Bytes of the file that the chunk takes."""
    lines: Sequence[bytes] = ()
    """Lines of a JSON-lines file, or the whole text."""
    columns: Mapping[str, Sequence[str | None]] | None = None
    """Columns of a parquet file, by key."""
    problem: str | None = None
    """Reason why nothing more could be read of the file."""

    @property
    def is_long(self) -> bool:
        """Whether it is one document of more than ``LONG_BYTES``, in any of its columns."""
        texts = chain(self.lines, *(self.columns or {}).values())
        return any(text is not None and len(text) > LONG_BYTES for text in texts)


def require_packages(files: Sequence[Path]) -> None:
    """Raise DataError where a file needs a package that is not installed."""
    missing = {
        file.suffix: file
        for file in reversed(files)
        if file.suffix in _PACKAGES and find_spec(_PACKAGES[file.suffix][0]) is None
    }
    problems = []
    for suffix, file in missing.items():
        package, extra = _PACKAGES[suffix]
        do = f"pip install '.[{extra}]'"
        problems.append(
            describe(
                file, got=f"no package {package}", expected=f"it installed, to read {suffix}", do=do
            )
        )
    if problems:
        raise DataError(listing("These inputs cannot be read:", problems))


def chunks(files: Sequence[Path], keys: Sequence[str]) -> Iterator[Chunk]:
    """Yield the content of the files in order, in pieces of about ``CHUNK_BYTES``; a text file is
    one piece. ``keys`` are the columns of parquet files."""
    for file in files:
        try:
            if kind(file) == PARQUET:
                yield from _parquet(file, keys)
            elif kind(file) in JSON_LINES:
                yield from _lines(file)
            else:
                yield from _text(file)
        except (OSError, EOFError, UnicodeError, zlib.error, library_error(file)) as error:
            yield Chunk(str(file), None, 0, problem=unreadable(file, error))


def unreadable(file: Path | str, error: Exception) -> str:
    """Return the words of an error that came while a file was read."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, LongRecordError):
        expected = f"at most {LARGEST_RECORD:,} bytes"
        do = "split it into several documents, as JSON lines or files of their own"
        return describe(file, got=reason, expected=expected, do=do)
    return describe(
        file, got=reason, expected="a readable file", do="restore the file or leave it out"
    )


def library_error(file: Path) -> type[Exception]:
    """Return the exception of the library that reads files with this suffix."""
    if file.suffix == ".zst":
        import zstandard

        return zstandard.ZstdError
    if file.suffix == PARQUET:
        import pyarrow

        return pyarrow.ArrowException  # type: ignore[no-any-return]
    return OSError


def _open(file: Path, stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Return the text of a file, and the file itself, whose position tells how much is read."""
    raw: IO[bytes] = stack.enter_context(open(file, "rb"))  # noqa: SIM115  closed by the stack
    if file.suffix == ".gz":
        return cast(IO[bytes], stack.enter_context(gzip.GzipFile(fileobj=raw))), raw
    if file.suffix == ".zst":
        return cast(IO[bytes], io.BufferedReader(ZstdFrames(raw), CHUNK_BYTES)), raw
    return raw, raw


class ZstdFrames(io.RawIOBase):
    """Content of all frames of a .zst file. It raises EOFError where the file ends inside a frame,
    which the library's own stream does not report."""

    def __init__(self, raw: IO[bytes]) -> None:
        import zstandard

        self._raw = raw
        self._frame = None
        self._library = zstandard.ZstdDecompressor()
        self._input = self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output and self._advance():
            pass
        taken = self._output[: len(buffer)]
        buffer[: len(taken)] = taken
        self._output = self._output[len(taken) :]
        return len(taken)

    def _advance(self) -> bool:
        """Decompress some more, and return False at the end of the file."""
        self._input = self._input or self._raw.read(CHUNK_BYTES // 8)
        if not self._input:
            if self._frame is not None:
                raise EOFError("the file ends inside a frame")
            return False
        frame: Any = self._frame or self._library.decompressobj()
        self._output = frame.decompress(self._input)
        self._input, self._frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        return True


def _lines(file: Path) -> Iterator[Chunk]:
    with ExitStack() as stack:
        stream, raw = _open(file, stack)
        line = 1
        before = 0
        while lines := _next_lines(stream):
            size = raw.tell() - before
            before = raw.tell()
            # ``readlines`` ends with the line that fills the chunk: only the last one can be long.
            if len(lines) > 1 and len(lines[-1]) > LONG_BYTES:
                yield Chunk(str(file), line, 0, lines[:-1])
                line = line + len(lines) - 1
                lines = lines[-1:]
            yield Chunk(str(file), line, size, lines)
            line = line + len(lines)


def _next_lines(stream: IO[bytes]) -> list[bytes]:
    """Return lines of ``CHUNK_BYTES`` or a little more; none at the end. Raises LongRecordError for
    one that is longer than any."""
    lines = []
    size = 0
    while size < CHUNK_BYTES and (line := stream.readline(LARGEST_RECORD + 1)):
        refuse_long(line)
        lines.append(line)
        size += len(line)
    return lines


def refuse_long(line: bytes) -> None:
    """Raise LongRecordError for a line that is longer than any."""
    if len(line) > LARGEST_RECORD:
        raise LongRecordError(f"a line or a text of more than {LARGEST_RECORD:,} bytes")


def _text(file: Path) -> Iterator[Chunk]:
    with ExitStack() as stack:
        stream, raw = _open(file, stack)
        if file.suffix in COMPRESSED:
            text = stream.read(LARGEST_RECORD + 1)
            refuse_long(text)
        else:
            text = stream.read()  # it takes the memory that its size has announced
        yield Chunk(str(file), None, lines=[text], size=raw.tell())


def _parquet(file: Path, keys: Sequence[str]) -> Iterator[Chunk]:
    import pyarrow
    from pyarrow import parquet

    with parquet.ParquetFile(file) as table:
        kinds = {field.name: field.type for field in table.schema_arrow}
        problems = list(column_problems(file, keys, kinds))
        if problems:
            yield from (Chunk(str(file), None, 0, problem=problem) for problem in problems)
            return
        size = file.stat().st_size
        rows = table.metadata.num_rows
        uncompressed = sum(
            table.metadata.row_group(group).total_byte_size for group in range(table.num_row_groups)
        )
        row = 1
        for batch in table.iter_batches(
            max(1, rows * CHUNK_BYTES // max(uncompressed, 1)), columns=list(keys)
        ):
            text = {key: batch.column(key).cast(pyarrow.large_string()).to_pylist() for key in keys}
            read = size * batch.num_rows // max(rows, 1)
            whole = Chunk(str(file), row, read, columns=text)
            if whole.is_long:
                for at in range(batch.num_rows):
                    alone = {key: column[at : at + 1] for key, column in text.items()}
                    yield Chunk(str(file), row + at, read if at == 0 else 0, columns=alone)
            else:
                yield whole
            row += batch.num_rows


def column_problems(
    file: Path | str, keys: Sequence[str], kinds: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the problems with the columns of a parquet file; ``kinds`` has their types."""
    from pyarrow import types

    for key in keys:
        where = f"{file}: column {key!r}"
        do = "change --json-keys or leave the file out"
        if key not in kinds:
            got = f"no such column (columns: {', '.join(map(repr, kinds)) or 'none'})"
            yield describe(where, got=got, expected="strings", do=do)
            continue
        held = kinds[key].value_type if types.is_dictionary(kinds[key]) else kinds[key]
        if not (types.is_string(held) or types.is_large_string(held) or types.is_string_view(held)):
            yield describe(where, got=str(kinds[key]), expected="strings", do=do)
