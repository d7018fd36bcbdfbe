"""The part of a file that the kernel holds in its memory. A process that reads a large file once
can leave there the bytes that were there before, and nothing else. On systems other than Linux the
kernel decides alone. All of it is advice: a refusal of the kernel is no error."""

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
PROBE_BYTES = 128 << 10
"""Bytes of a read that takes only what is in memory. Some kernels begin to read the rest from the
disk, so they are not few."""


@cache
def _mincore() -> Any:
    call = ctypes.CDLL(None, use_errno=True).mincore
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return call


def absent_ranges(file: int, start: int, count: int) -> Sequence[tuple[int, int]]:
    """Return those of the bytes [start, start + count) of an open file that are not in memory, as
    [first, last) of whole pages; none where ``start`` is not the start of a page, as after a read
    that gave less than was asked for.

    A process that may not write the file learns less: where a page is absent, those behind it, up
    to ``PROBE_BYTES``, count as absent, too."""
    if not _LINUX or start % mmap.ALLOCATIONGRANULARITY:
        return ()
    try:
        count = min(count, os.fstat(file).st_size - start)
        resident = _resident_pages(file, start, count)
        if resident.all():
            # So the kernel answers for every page to a process that may neither write nor own it.
            resident = _readable_pages(file, start, count)
    except (OSError, ValueError):  # the latter if the file becomes shorter
        return ()
    absent = np.concatenate(([False], resident == 0, [False]))
    edges = np.flatnonzero(absent[1:] != absent[:-1])
    bounds = (start + edges * mmap.PAGESIZE).tolist()
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def _resident_pages(file: int, start: int, count: int) -> NDArray[np.uint8]:
    """Return for each page of [start, start + count) a byte, whose lowest bit says whether it is in
    memory."""
    resident = np.ones(_pages(count), np.uint8)
    if count > 0:
        with mmap.mmap(file, count, access=mmap.ACCESS_READ, offset=start) as mapped:
            view = np.frombuffer(mapped, np.uint8)
            failed = _mincore()(view.ctypes.data, count, resident.ctypes.data)
            del view  # a mapping that is looked at cannot be closed
        if failed:
            resident[:] = 1
    return resident & np.uint8(1)


def _readable_pages(file: int, start: int, count: int) -> NDArray[np.uint8]:
    """Return the same as ``_resident_pages``, found by reads that may not wait for a disk. Raises
    OSError for a file system that has no such reads."""
    readable = np.ones(_pages(count), np.uint8)
    buffer = memoryview(bytearray(PROBE_BYTES))
    for first in range(0, count, PROBE_BYTES):
        wanted = buffer[: min(PROBE_BYTES, count - first)]
        try:
            taken = os.preadv(file, [wanted], start + first, os.RWF_NOWAIT)
        except BlockingIOError:
            taken = 0
        if taken < len(wanted):
            readable[(first + taken) // mmap.PAGESIZE : _pages(first + len(wanted))] = 0
    return readable


def _pages(count: int) -> int:
    return max(-(-count // mmap.PAGESIZE), 0)


def read_nothing_ahead(file: int) -> None:
    """Have the kernel read only the requested bytes of an open file, and nothing behind them."""
    if _LINUX:
        with suppress(OSError):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)


def forget(file: int, ranges: Iterable[tuple[int, int]]) -> None:
    """Have the kernel drop these bytes of an open file from its memory. It keeps pages that some
    process maps and has touched."""
    if _LINUX:
        for first, last in ranges:
            with suppress(OSError):
                os.posix_fadvise(file, first, last - first, os.POSIX_FADV_DONTNEED)
