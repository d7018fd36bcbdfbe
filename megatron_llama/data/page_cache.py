"""What the kernel has of a file in its memory, so that whoever reads a large file once leaves there
what was there before, and nothing else. On systems other than Linux the kernel decides alone.

All of it is advice: what the kernel refuses is no error."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LINUX = sys.platform == "linux"


@cache
def _mincore() -> Any:
    call = ctypes.CDLL(None, use_errno=True).mincore
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return call


def absent_ranges(file: int, start: int, count: int) -> Sequence[tuple[int, int]]:
    """Return which of the bytes [start, start + count) of an open file are not in memory, as
    [first, last) of whole pages; none where ``start`` is not the start of a page, as after a read
    that gave less than was asked for.

    The kernel tells that only to who may write the file, and says to others that all is there."""
    if not _LINUX or start % mmap.ALLOCATIONGRANULARITY:
        return ()
    try:
        count = min(count, os.fstat(file).st_size - start)
        resident = _resident_pages(file, start, count)
    except (OSError, ValueError):  # the latter if the file becomes shorter
        return ()
    absent = np.concatenate(([False], resident & 1 == 0, [False]))
    edges = np.flatnonzero(absent[1:] != absent[:-1])
    bounds = (start + edges * mmap.PAGESIZE).tolist()
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def _resident_pages(file: int, start: int, count: int) -> NDArray[np.uint8]:
    """Return for each page of [start, start + count) a byte, whose lowest bit says whether it is in
    memory."""
    resident = np.ones(max(-(-count // mmap.PAGESIZE), 0), np.uint8)
    if count > 0:
        with mmap.mmap(file, count, access=mmap.ACCESS_READ, offset=start) as mapped:
            view = np.frombuffer(mapped, np.uint8)
            failed = _mincore()(view.ctypes.data, count, resident.ctypes.data)
            del view  # a mapping that is looked at cannot be closed
        if failed:
            resident[:] = 1
    return resident


def read_nothing_ahead(file: int) -> None:
    """Have the kernel read of an open file what is asked for, and nothing behind it."""
    if _LINUX:
        with suppress(OSError):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)


def forget(file: int, ranges: Iterable[tuple[int, int]]) -> None:
    """Have the kernel drop these bytes of an open file from its memory, but for pages that some
    process maps and has touched: those it keeps."""
    if _LINUX:
        for first, last in ranges:
            with suppress(OSError):
                os.posix_fadvise(file, first, last - first, os.POSIX_FADV_DONTNEED)
