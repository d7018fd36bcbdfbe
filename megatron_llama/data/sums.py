"""Sums of a dataset's files: SHA-256 of each piece of 64 MiB. They are made while the files are
written, and kept in PREFIX.meta.json.

Sums of pieces allow any part of a file to be checked: nothing has to read terabytes before it can
tell. A file of one piece has the sum that ``sha256sum`` prints."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from megatron_llama.config.fields import Fields, shown
from megatron_llama.errors import DataError

PIECE_BYTES = 64 << 20
"""A piece is read in a moment, and the sums of a terabyte are a megabyte of JSON."""
SUFFIXES = (".bin", ".idx")
REMEDY = (
    "copy the dataset again or preprocess its text again; if the file was changed on purpose, "
    'take "sums" out of the meta.json'
)
_SUM = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class FileSums:
    """Size and sums of a file when it was written."""

    size: int
    """Bytes."""
    pieces: tuple[str, ...]
    """SHA-256 of each piece, in hexadecimal digits. An empty file has none."""

    def ends(self, piece: int) -> tuple[int, int]:
        """Return the bytes [start, stop) of a piece."""
        return piece * PIECE_BYTES, min((piece + 1) * PIECE_BYTES, self.size)

    def require_size(self, name: str, size: int) -> None:
        """Raise DataError unless the file has its size. ``name`` is its path or URL."""
        if size != self.size:
            expected = f"{self.size} bytes, as it was written"
            raise DataError(name, got=f"{size} bytes", expected=expected, do=REMEDY)

    def require_piece(self, name: str, piece: int, content: hashlib._Hash) -> None:
        """Raise DataError unless the content of a piece is as it was written."""
        if content.hexdigest() != self.pieces[piece]:
            start, stop = self.ends(piece)
            raise DataError(
                f"{name}: bytes {start} to {stop}",
                got=f"the SHA-256 {content.hexdigest()}",
                expected=f"{self.pieces[piece]}, as they were written",
                do=REMEDY,
            )


@dataclass(frozen=True)
class DatasetSums:
    """Sizes and sums of a dataset's files when they were written."""

    bin: FileSums
    idx: FileSums

    def by_suffix(self) -> dict[str, FileSums]:
        """Return the sums of each file."""
        return dict(zip(SUFFIXES, (self.bin, self.idx), strict=True))

    def entry(self) -> dict[str, Any]:
        """Return the sums as JSON keeps them."""
        files = {
            suffix: {"bytes": file.size, "sha256": list(file.pieces)}
            for suffix, file in self.by_suffix().items()
        }
        return {"piece_bytes": PIECE_BYTES, **files}

    @classmethod
    def read(cls, fields: Fields) -> DatasetSums | None:
        """Return the sums that ``entry`` wrote, or None. Problems are added to ``fields``."""
        before = len(fields.problems)
        fields.integer("piece_bytes", low=PIECE_BYTES, high=PIECE_BYTES)
        files = []
        for suffix in SUFFIXES:
            inner = fields.inner(suffix)
            size = inner.integer("bytes")
            pieces = inner.sequence("sha256", str)
            wrong = next((text for text in pieces if not _SUM.fullmatch(text)), None)
            if wrong is not None:
                inner.problem("sha256", shown(wrong), "sums of 64 hexadecimal digits")
            elif len(pieces) != -(-size // PIECE_BYTES):
                expected = (
                    f"{-(-size // PIECE_BYTES)}, a sum for each {PIECE_BYTES} bytes of {size}"
                )
                inner.problem("sha256", f"{len(pieces)} sums", expected)
            files.append(FileSums(size, tuple(pieces)))
        return cls(*files) if len(fields.problems) == before else None


class RunningSums:
    """The sums of a file that is being written from its beginning to its end."""

    def __init__(self) -> None:
        self._size = 0
        self._pieces: list[str] = []
        self._digest = hashlib.sha256()
        self._room = PIECE_BYTES

    def add(self, content: memoryview) -> None:
        """Count the next bytes, as ``memoryview.cast("B")`` has them."""
        while content:
            head = content[: self._room]
            self._digest.update(head)
            self._size += len(head)
            self._room -= len(head)
            if not self._room:
                self._pieces.append(self._digest.hexdigest())
                self._digest = hashlib.sha256()
                self._room = PIECE_BYTES
            content = content[len(head) :]

    def result(self) -> FileSums:
        """Return the sums of the bytes so far."""
        last = [self._digest.hexdigest()] if self._room < PIECE_BYTES else []
        return FileSums(self._size, (*self._pieces, *last))
