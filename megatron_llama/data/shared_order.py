"""Arrays that all processes of a machine map from one file: the order of the samples of a run.

The first process that comes makes the arrays and writes the file; the others wait for it, and every
process maps it read-only. The file's name is a digest of all that the arrays depend on, and its
header repeats that and has sums of the content. One process compares the content with the sums when
a run starts, as it does with blocks of remote datasets (``block_cache.py``). A file of something
else, or one that is cut or damaged, is written anew and never used. When a file is to be written,
others that no process maps make room for it, within --data-cache-gib.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron_llama.config.schema import DataConfig
from megatron_llama.data.block_cache import cache_folder
from megatron_llama.errors import DataError
from megatron_llama.files import replacing

Arrays = Sequence[NDArray[Any]]
FOLDER = "orders"
"""The folder of these files in --data-cache-path."""
SHARED_ABOVE = 16 << 20
"""Bytes up to which every process has arrays of its own: no file is worth less."""
_VERSION = 1
_ALIGNED = 4096
_PIECE = 16 << 20
"""Bytes that have a sum of their own."""
_HEADER_BYTES = 64 << 20
"""The largest header: that of an order of many terabytes."""
_SUMMED_SECONDS = 300.0
"""Seconds for which a file that one process has compared with its sums is not compared again. All
processes of a machine open it when a run starts; a disk takes longer to decay."""


def shared_arrays(
    option: str, data: DataConfig, key: Mapping[str, object], size: int, make: Callable[[], Arrays]
) -> Arrays:
    """Return the arrays that ``make`` makes: of ``size`` bytes, one-dimensional, and the same for
    the same ``key``. ``data`` has folder and size of the cache.

    Raises DataError, with the ``option`` that needs them, if the file cannot be written."""
    if size <= SHARED_ABOVE:
        return make()
    words = json.dumps({"version": _VERSION, **key}, sort_keys=True)
    folder = cache_folder(data.data_cache_path) / FOLDER
    path = folder / f"{hashlib.sha256(words.encode()).hexdigest()[:32]}.order"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("ab") as lock:
            # A process that is killed leaves the lock, and perhaps a file without its final name.
            fcntl.flock(lock, fcntl.LOCK_EX)
            arrays = _read(path, words)
            if arrays is None:
                for left in folder.glob(f"{path.name}.tmp-*"):
                    left.unlink(missing_ok=True)
                _remove_unused(path, data.data_cache_gib * 2**30 - size)
                _require_room(option, folder, size)
                _write(path, words, make())
                arrays = _read(path, words)
    except OSError as error:
        raise _unwritable(option, folder, str(error)) from error
    if arrays is None:
        raise _unwritable(option, folder, f"{path.name}, which is not what was written there")
    return arrays


def _remove_unused(path: Path, room: float) -> None:
    """Remove files beside ``path`` until the others take no more than ``room`` bytes: those that no
    process maps, and of these the one first that was opened longest ago."""
    files = list[tuple[float, int, Path]]()
    for other in path.parent.glob("*.order"):
        with suppress(OSError):  # another process has removed it
            if other != path:
                files.append((other.stat().st_mtime, other.stat().st_size, other))
    taken = sum(size for _, size, _ in files)
    for _, size, other in sorted(files):
        if taken > room and _has_removed(other):
            taken -= size


def _has_removed(path: Path) -> bool:
    with suppress(OSError), path.with_suffix(".lock").open("ab") as lock, path.open("r+b") as file:
        # Who is about to open it has the first lock, and who maps it the second.
        for held in (lock, file):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return True
    return False


def _require_room(option: str, folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size + _HEADER_BYTES > free:
        raise _unwritable(
            option, folder, f"{free / 1e9:,.1f} GB of free space for an order of {size / 1e9:,.1f}"
        )


def _unwritable(option: str, folder: Path, got: str) -> DataError:
    return DataError(
        f"{option}: {folder}",
        got=got,
        expected="a folder for the file that all processes of this machine share",
        do="give --data-cache-path a folder on a disk of this machine with room",
    )


def _write(path: Path, words: str, arrays: Arrays) -> None:
    parts = [np.ascontiguousarray(array).view(np.uint8).data for array in arrays]
    header = {
        "key": words,
        "arrays": [[array.dtype.str, len(array)] for array in arrays],
        "sums": [
            [zlib.crc32(part[at : at + _PIECE]) for at in range(0, len(part), _PIECE)]
            for part in parts
        ],
    }
    content = json.dumps(header).encode()
    first = hashlib.sha256(content).digest() + len(content).to_bytes(8, "little") + content
    with replacing(path, synced=True) as temporary, temporary.open("wb") as file:
        for part in (memoryview(first), *parts):
            file.write(part)
            file.write(bytes(-len(part) % _ALIGNED))
        file.flush()
        _stamp(temporary)


def _read(path: Path, words: str) -> Arrays | None:
    """Map the arrays of a file; None if it is missing, or not what ``words`` names."""
    try:
        with path.open("rb") as file:
            # The mapping duplicates the descriptor, and keeps the lock for as long as it lives.
            fcntl.flock(file, fcntl.LOCK_SH)
            header, at = _read_header(file)
            kinds = [(np.dtype(name), count) for name, count in header["arrays"]]
            ends = at + sum(_aligned(dtype.itemsize * count) for dtype, count in kinds)
            if header["key"] != words or ends != os.fstat(file.fileno()).st_size:
                return None
            whole = np.memmap(file, mode="r", dtype=np.uint8).view(np.ndarray)
    except (FileNotFoundError, ValueError):
        return None
    arrays = list[NDArray[Any]]()
    for dtype, count in kinds:
        arrays.append(whole[at : at + dtype.itemsize * count].view(dtype))
        at += _aligned(dtype.itemsize * count)
    if abs(time.time() - path.stat().st_mtime) > _SUMMED_SECONDS:
        if not all(map(_is_whole, arrays, header["sums"])):
            return None
        with suppress(OSError):  # a file of another user, which is compared by each process
            _stamp(path)
    return arrays


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return the header of a file, and the place of its first array. Raises ValueError if it is
    damaged."""
    digest = file.read(hashlib.sha256().digest_size)
    length = int.from_bytes(file.read(8), "little")
    content = file.read(length) if length <= _HEADER_BYTES else b""
    if hashlib.sha256(content).digest() != digest or not content:
        raise ValueError("a damaged header")
    return json.loads(content), _aligned(len(digest) + 8 + length)


def _is_whole(array: NDArray[Any], sums: Sequence[int]) -> bool:
    content = array.view(np.uint8).data
    return all(
        zlib.crc32(content[number * _PIECE : (number + 1) * _PIECE]) == expected
        for number, expected in enumerate(sums)
    )


def _stamp(path: Path) -> None:
    os.utime(path)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
