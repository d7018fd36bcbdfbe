"""Examples as tokens in a folder on the disk, which every process of a machine maps into its
memory: the kernel holds them once, whatever number of processes reads them, and only what is read.

    FOLDER/KEY/meta.json    the columns with dtype, length and digest; what was read and left out
    FOLDER/KEY/COLUMN       the values of one column, end to end

An entry is written under another name, and renamed when it is whole. Its key is a digest of
everything that the tokens depend on (``fingerprint.py``), so an entry never has to be changed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron_llama.errors import DataError, describe
from megatron_llama.tune.sft.fingerprint import BYTES, text_digest

FORMAT_VERSION = 1
"""The version of the format. Raise it if the columns or their description change."""
META = "meta.json"
BLOCK_BYTES = 1 << 24
_TEMPORARY = ".tmp-"
_DAMAGES = (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors of reading a damaged entry."""
_ABANDONED = 24 * 3600.0
"""Seconds without a write after which a folder counts as left by a process that was killed."""


class Ragged(Sequence[NDArray[Any]]):
    """Arrays of different lengths that lie end to end in one."""

    def __init__(self, values: NDArray[Any], lengths: NDArray[np.int32]) -> None:
        self.values = values
        self._ends = np.cumsum(lengths, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]
        start = self._ends[index - 1] if index else 0
        return self.values[start : self._ends[index]]


class TokenStore:
    """The folder of entries. Raises DataError where it cannot be read or written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, key: str) -> Path:
        """Return the path of the entry of a key."""
        return self._folder / key

    def is_whole(self, key: str) -> bool:
        """Whether there is such an entry with every byte as it was written. A damaged one is
        removed."""
        path = self.path(key)
        with _usable(path):
            if not path.is_dir():
                return False
            try:
                meta = json.loads((path / META).read_bytes())
                columns = meta["columns"]
                # The digest of the columns comes first: it vouches for the names of the files.
                if meta["digest"] == text_digest(columns, meta["about"]) and all(
                    (path / name).is_file() and _digest(path / name) == col["digest"]
                    for name, col in columns.items()
                ):
                    return True
            except _DAMAGES:
                pass  # as damaged as one whose digests differ
            # A rename comes first: another process must not find half of it.
            aside = self._temporary(key)
            with suppress(FileNotFoundError):  # another run has found the damage, too
                path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
            return False

    def read(self, key: str) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return the columns of an entry, mapped into memory, and its writer's ``about``."""
        path = self.path(key)
        with _usable(path):
            meta = json.loads((path / META).read_bytes())
            columns = {name: _mapped(path / name, col) for name, col in meta["columns"].items()}
            return columns, meta["about"]

    @contextmanager
    def writing(self, key: str) -> Iterator[TokenWriter]:
        """Yield the writer of an entry. Without ``TokenWriter.publish`` nothing of it is left."""
        temporary = self._temporary(key)
        with _usable(temporary):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned()
            temporary.mkdir()
        writer = TokenWriter(temporary, self.path(key))
        try:
            yield writer
        finally:
            writer.close()
            shutil.rmtree(temporary, ignore_errors=True)

    def _temporary(self, key: str) -> Path:
        return self._folder / f"{_TEMPORARY}{key}-{uuid.uuid4().hex}"

    def _remove_abandoned(self) -> None:
        before = time.time() - _ABANDONED
        for folder in self._folder.glob(f"{_TEMPORARY}*"):
            # Another process may remove or rename it too.
            with suppress(FileNotFoundError):
                times = [file.stat().st_mtime for file in (folder, *folder.glob("*"))]
                if max(times) < before:
                    shutil.rmtree(folder, ignore_errors=True)


class TokenWriter:
    """The writer of one entry, all columns side by side."""

    def __init__(self, temporary: Path, path: Path) -> None:
        self._temporary = temporary
        self._path = path
        self._files: dict[str, BinaryIO] = {}
        self._columns: dict[str, dict[str, Any]] = {}
        self._digests: dict[str, hashlib.blake2b] = {}

    def add(self, columns: Mapping[str, NDArray[Any]]) -> None:
        """Append values, always to the same columns. Raises DataError if the disk is full."""
        with _usable(self._path):
            for name, values in columns.items():
                if name not in self._files:
                    self._files[name] = (self._temporary / name).open("xb")
                    self._columns[name] = {"dtype": values.dtype.name, "count": 0}
                    self._digests[name] = hashlib.blake2b(digest_size=BYTES)
                assert values.dtype.name == self._columns[name]["dtype"], name
                content = np.ascontiguousarray(values).data
                self._files[name].write(content)
                self._digests[name].update(content)
                self._columns[name]["count"] += len(values)

    def publish(self, about: Mapping[str, Any]) -> None:
        """End the entry and give it its name, with ``about``, which is for JSON."""
        with _usable(self._path):
            for name, column in self._columns.items():
                self._files[name].close()
                column["digest"] = self._digests[name].hexdigest()
            content: dict[str, Any] = {"columns": self._columns, "about": about}
            content["digest"] = text_digest(self._columns, about)
            (self._temporary / META).write_text(json.dumps(content))
            try:
                self._temporary.rename(self._path)
            except OSError:
                if not (self._path / META).is_file():
                    raise
                # Another run has written the same entry meanwhile.

    def close(self) -> None:
        """Close the files of an entry that is published or given up."""
        for file in self._files.values():
            with suppress(OSError):  # closing writes, once more, what a full disk has refused
                file.close()


def _mapped(path: Path, column: Mapping[str, Any]) -> NDArray[Any]:
    dtype = np.dtype(column["dtype"])
    count = int(column["count"])
    # A read past the end of a file that is shorter than its mapping would kill the process.
    if path.stat().st_size != count * dtype.itemsize:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes")
    if not count:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r", shape=(count,)).view(np.ndarray)


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=BYTES)
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, *_DAMAGES) as error:
        words = error.strerror if isinstance(error, OSError) else None
        raise DataError(
            describe(
                str(path),
                got=words or error,
                expected="a folder that keeps the tokens of examples",
                do="give another --data-cache-path, or make room on its disk",
            )
        ) from error
