"""Files of ``torch.save``: read through a memory map without running anything in them.

The pickle in a file is read by ``torch_pickle``: tensors, settings and plain containers. Classes of
Megatron and its libraries (enums, settings) become inert objects: nothing of theirs is imported.
Everything else is refused by name.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from megatron_llama.checkpoint.pickles import ForbiddenNames
from megatron_llama.checkpoint.torch_pickle import read_pickle
from megatron_llama.checkpoint.torch_zip import Entry, find_entry, read_entries
from megatron_llama.config.lines import require_regular
from megatron_llama.errors import CheckpointError


class TorchFile:
    """The content of one file: memory-mapped tensors in the dicts and lists in which they were
    saved."""

    def __init__(self, path: Path, part: bytes | None = None) -> None:
        """Open the file, or a ``part`` of it that ``torch.save`` wrote and that is in memory.
        Raises CheckpointError when it is damaged, of another kind, or names code to run."""
        self.path = path
        self._lock = Lock()
        self._verified = set[int]()
        self._sums: dict[int, int] = {}
        """Checksum of each storage's bytes, by the address of the storage."""
        try:
            if part is None:
                require_regular(path)
                size = path.stat().st_size
                with path.open("rb") as file:
                    text, entries = read_entries(file, size)
                whole: Any = torch.UntypedStorage.from_file(str(path), False, size)
            else:
                text, entries = read_entries(io.BytesIO(part), len(part))
                whole = None
            self.content = read_pickle(text, partial(self._load_storage, entries, whole, part))
        except OSError as error:
            raise self._error(error.strerror or error) from error
        except ForbiddenNames as error:
            trust = "do not load it elsewhere unless you trust who made it"
            do = f"{trust}; convert a copy from its origin"
            raise CheckpointError(
                path, got=error, expected="tensors and settings only (nothing was run)", do=do
            ) from error
        except _UNREADABLE as error:
            raise self._error(f"damaged or foreign content ({error})") from error

    def _load_storage(
        self, entries: Mapping[str, Entry], whole: Any, part: bytes | None, key: str, nbytes: int
    ) -> Any:
        """Return the values of one entry: a slice of the map of the ``whole`` file, or a copy from
        the ``part``. Raises UnpicklingError unless the entry has ``nbytes``."""
        entry = find_entry(entries, key, nbytes)
        stop = entry.start + entry.size
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8).untyped_storage()
        if whole is not None:
            storage = whole[entry.start : stop]
        else:
            assert part is not None
            copied = bytearray(part[entry.start : stop])
            storage = torch.frombuffer(copied, dtype=torch.uint8).untyped_storage()
        self._sums[storage.data_ptr()] = entry.crc
        return storage

    def verify(self, tensor: Tensor) -> None:
        """Compare the storage behind a tensor with the file's checksum, once, since torch does
        not. Raises CheckpointError."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return
        with self._lock:
            if storage.data_ptr() in self._verified:
                return
            values: Tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
            if zlib.crc32(values.numpy().data) != self._sums[storage.data_ptr()]:
                raise self._error("damaged content (a checksum does not match)")
            self._verified.add(storage.data_ptr())

    def verify_all(self) -> None:
        """Compare every tensor of ``content`` with the file's checksums. For files with few and
        small tensors. Raises CheckpointError."""
        values = [self.content]
        while values:
            value = values.pop()
            if isinstance(value, Tensor):
                self.verify(value)
            elif isinstance(value, dict):
                values += value.values()
            elif isinstance(value, list | tuple):
                values += value

    def _error(self, got: object) -> CheckpointError:
        do = "copy the file again from where the model came from"
        return CheckpointError(self.path, got=got, expected="a file that torch.save wrote", do=do)


_UNREADABLE = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    EOFError,
    RuntimeError,
    UnicodeDecodeError,
    ValueError,
    struct.error,
)
"""Errors of zipfile and of the reader of pickles for damaged or foreign content."""
