"""Processes that work on the pieces of a corpus side by side."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from threading import Thread
from typing import TypeVar

from megatron_llama.errors import DataError

Piece = TypeVar("Piece")
Result = TypeVar("Result")


@contextmanager
def workers(
    count: int, do: Callable[[Piece], Result]
) -> Iterator[Callable[[Iterable[Piece]], Iterator[Result]]]:
    """``map(do, pieces)`` with ``count`` processes, which run when the block begins: results in the
    order of the pieces, few in memory at a time. ``do`` has to be picklable.

    Processes are copies of this one, and have what it has loaded, where it has a single thread.
    They end with the block, and at once if it raises. Errors: DataError if a process dies.
    """
    # Another thread may hold a lock, of a library or of the heap, that a fork would copy and nobody
    # would release.
    context = multiprocessing.get_context("fork" if single_threaded() else "spawn")
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(count, context, initializer=_begin, initargs=(theirs, ours))
    try:
        pool.submit(int)  # makes the processes
        yield partial(_ordered, pool, 4 * count, do)
    except BrokenProcessPool as error:
        remedy = "give fewer --workers, or --workers 1 to see the cause"
        raise DataError(
            "preprocess", got="a dead worker process", expected="enough memory for each", do=remedy
        ) from error
    except BaseException:
        ours.close()  # nobody wants what they are at
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        ours.close()
        theirs.close()


def _begin(line: Connection, others: Connection) -> None:
    """In a worker, which ends when nobody is left at the other end of the line: when the process
    that started it is gone, or wants it to. Control-C is for that process to hear."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    others.close()
    Thread(target=_end_with, args=(line,), daemon=True).start()


def _end_with(line: Connection) -> None:
    with suppress(EOFError):
        line.recv_bytes()
    os._exit(1)


def single_threaded() -> bool:
    """Whether this process has one thread, those of libraries counted. False where the system does
    not say."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _ordered(
    pool: ProcessPoolExecutor, most: int, do: Callable[[Piece], Result], pieces: Iterable[Piece]
) -> Iterator[Result]:
    pending: deque[Future[Result]] = deque()
    for piece in pieces:
        pending.append(pool.submit(do, piece))
        if len(pending) >= most:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
