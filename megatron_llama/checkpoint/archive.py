"""One chunk of a tensor as ``torch.save`` writes it: a zip archive of a small pickle and the
values, with their CRC-32.

torch reads such archives without checking their checksums: a flipped bit would become a wrong
weight. Here they are opened without making the tensor, and compared with the index."""

from __future__ import annotations

import io
import zlib
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch import Tensor

from megatron_llama.checkpoint.pickles import ForbiddenNames
from megatron_llama.checkpoint.torch_pickle import read_pickle
from megatron_llama.checkpoint.torch_zip import Entry, find_entry, read_entries
from megatron_llama.config.limits import LARGEST_CHUNK_HEADER

CRC_BYTES = 2**22
"""Checksums are computed over so many bytes at a time."""


class DamageError(Exception):
    """A chunk differs from the index."""

    def __init__(self, got: object, expected: object) -> None:
        super().__init__(got, expected)
        self.got = f"{got}"
        self.expected = f"{expected}"


@dataclass(frozen=True)
class ChunkHeader:
    """Header of the archive of one chunk: the place of the storage in the archive, and the layout
    of the tensor in the storage."""

    start: int
    """First byte of the storage in the archive."""
    numel: int
    """Elements of the storage."""
    first: int
    """Element of the storage that is the first of the tensor."""
    stride: tuple[int, ...]


class Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file = file
        self._start = start
        self.length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self.length - self._at)]
        count = self._fill(view)
        self._at += count
        return count

    def crc32(self, start: int, length: int) -> int:
        """Return the CRC-32 of bytes of the window. Raises DamageError if the file ends before
        them."""
        self.seek(start)
        buffer = bytearray(min(CRC_BYTES, length))
        crc = 0
        while length > 0:
            count = self.readinto(memoryview(buffer)[: min(length, CRC_BYTES)])
            if count == 0:
                raise DamageError("the end of the file", f"{length} more bytes")
            crc = zlib.crc32(memoryview(buffer)[:count], crc)
            length -= count
        return crc

    def _fill(self, view: memoryview) -> int:
        self._file.seek(self._start + self._at)
        return self._file.readinto(view) or 0  # type: ignore[attr-defined]


class MemoryWindow(Window):
    """An archive that is in memory, as a file. It is never copied as a whole."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self.length = len(content)
        self._at = 0

    def crc32(self, start: int, length: int) -> int:
        return zlib.crc32(self._content[start : start + length])

    def _fill(self, view: memoryview) -> int:
        content = self._content[self._at : self._at + len(view)]
        view[: len(content)] = content
        return len(content)


def open_archive(
    window: Window, size: tuple[int, ...], dtype: torch.dtype, crc32: int | None
) -> ChunkHeader:
    """Read the archive of one chunk, and compare its values with their checksum. ``size``,
    ``dtype`` and, in later versions, ``crc32`` are the index's. Raises DamageError, or OSError."""
    try:
        return _open_archive(window, size, dtype, crc32)
    except (DamageError, OSError):
        raise
    except Exception as error:
        # A damaged archive may raise any error, since its bytes may mean anything.
        got = f"damaged content ({type(error).__name__})"
        raise DamageError(got, "a tensor that torch.save wrote") from error


def _open_archive(
    window: Window, size: tuple[int, ...], dtype: torch.dtype, crc32: int | None
) -> ChunkHeader:
    file = cast(IO[bytes], window)
    text, entries = read_entries(file, window.length, largest=LARGEST_CHUNK_HEADER)
    stored: list[Entry] = []

    def note_storage(key: str, nbytes: int) -> torch.UntypedStorage:
        stored.append(find_entry(entries, key, nbytes))
        empty: Tensor = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        return empty.untyped_storage()

    try:
        saved = read_pickle(text, note_storage)
    except ForbiddenNames as error:
        raise DamageError(error, "a tensor (nothing was run)") from error
    if not isinstance(saved, Tensor):
        raise DamageError(f"a {type(saved).__name__}", "a tensor")
    if (saved.shape, saved.dtype) != (size, dtype):
        got = f"{saved.dtype} {tuple(saved.shape)}"
        raise DamageError(got, f"{dtype} {size}, by the index")
    if len(stored) != 1:
        raise DamageError(f"{len(stored)} storages", "that of the tensor alone")
    if saved.dim() and saved.stride(-1) != 1 and saved.size(-1) != 1:
        raise DamageError(f"strides {saved.stride()}", "rows whose elements are neighbours")
    (entry,) = stored
    if window.crc32(entry.start, entry.size) != entry.crc:
        raise DamageError("damaged content (a checksum does not match)", "what was saved")
    if crc32 is not None and crc32 != entry.crc:
        expected = f"{crc32:08x}, by the index: these values were saved at another time"
        raise DamageError(f"values with CRC-32 {entry.crc:08x}", expected)
    numel = entry.size // dtype.itemsize
    return ChunkHeader(entry.start, numel, int(saved.storage_offset()), saved.stride())
