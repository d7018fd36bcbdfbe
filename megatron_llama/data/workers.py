"""Processes that work on the pieces of a corpus side by side."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from megatron_llama.errors import DataError, describe

Piece = TypeVar("Piece")
Result = TypeVar("Result")


@contextmanager
def workers(count: int, do: Callable[[Piece], Result]) -> Iterator[Callable[[Iterable[Piece]], Iterator[Result]]]:
    """``map(do, pieces)`` with ``count`` processes, which run when the block begins: results in the order of the pieces, few in memory at
    a time. ``do`` has to be picklable.

    Processes are copies of this one, and have what it has loaded, where it has a single thread. Errors: DataError if a process dies.
    """
    # Another thread may hold a lock, of a library or of the heap, that a fork would copy and nobody would release.
    method = "fork" if single_threaded() else "spawn"
    try:
        with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context(method)) as pool:
            pool.submit(int)  # makes the processes
            yield partial(_ordered, pool, 4 * count, do)
    except BrokenProcessPool as error:
        remedy = "give fewer --workers, or --workers 1 to see the cause"
        raise DataError(describe("preprocess", got="a dead worker process", expected="enough memory for each", do=remedy)) from error


def single_threaded() -> bool:
    """Whether this process has one thread, those of libraries counted. False where the system does not say."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _ordered(pool: ProcessPoolExecutor, most: int, do: Callable[[Piece], Result], pieces: Iterable[Piece]) -> Iterator[Result]:
    pending: deque[Future[Result]] = deque()
    for piece in pieces:
        pending.append(pool.submit(do, piece))
        if len(pending) >= most:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
