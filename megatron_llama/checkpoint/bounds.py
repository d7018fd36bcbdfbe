"""Largest sizes of the files of a checkpoint that describe its other files. A file claims its size,
and is read whole; but the files that it describes have to lie beside it.

Saving and loading ask the same functions: what has been saved can be loaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatron_llama.config.limits import (
    INDEX_BYTES_PER_KIB,
    LARGEST_INDEX,
    LARGEST_META,
    META_BYTES_PER_FILE,
)
from megatron_llama.errors import CheckpointError

DATA_SUFFIX = ".distcp"


def size_of(path: Path) -> int:
    """Return the size of a file, or 0 on an error: opening the file reports the reason."""
    with suppress(OSError):
        return int(path.stat().st_size)
    return 0


def largest_index(folder: Path, size: int) -> int:
    """Return the most bytes of an index that describes the ``*.distcp`` of a folder. Only as many
    files are looked at as a ``size`` needs."""
    return _bound(folder, size, LARGEST_INDEX, lambda held: held * INDEX_BYTES_PER_KIB // 1024)


def largest_meta(folder: Path, size: int) -> int:
    """Return the most bytes of a folder's ``meta.json``."""
    return _bound(folder, size, LARGEST_META, lambda _: META_BYTES_PER_FILE)


def _bound(folder: Path, size: int, least: int, share: Callable[[int], int]) -> int:
    """Return ``least`` and a share for each file of tensors, which follows from its size."""
    bound = least
    # Nearly every file is within ``least``: then no folder of thousands of files is listed.
    if size <= bound:
        return bound
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name.endswith(DATA_SUFFIX) and path.is_file():
                bound += share(size_of(path))
                if size <= bound:
                    break
    return bound


def require_size(path: Path, size: int, bound: int, *, do: str) -> None:
    """Raise CheckpointError for a file to be written that is too large to be read again."""
    if size > bound:
        expected = f"at most {bound:,}, which is what a load accepts"
        raise CheckpointError(path, got=f"{size:,} bytes", expected=expected, do=do)
