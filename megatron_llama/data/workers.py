"""Runs a function on the pieces of a corpus in several processes."""

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
    """A block with ``count`` processes, which gives ``map(do, pieces)``: results in the order of
    the pieces, few in memory at a time. ``do`` has to be picklable. The processes run when the
    block begins.

    If this process has a single thread they are forks of it, and have what it has loaded. They end
    with the block, and at once if it raises. Raises DataError if a process dies.
    """
    # Another thread may hold a lock, of a library or of the heap. A fork would copy that lock, and
    # nobody would release it.
    context = multiprocessing.get_context("fork" if single_threaded() else "spawn")
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(count, context, initializer=_begin, initargs=(theirs, ours))
    try:
        pool.submit(int)  # the pool makes its processes at the first call
        yield partial(_ordered, pool, 4 * count, do)
    except BrokenProcessPool as error:
        remedy = "give fewer --workers, or --workers 1 to see the cause"
        raise DataError(
            "preprocess", got="a dead worker process", expected="enough memory for each", do=remedy
        ) from error
    except BaseException:
        # A worker may end in the middle of a result. The thread that reads results has to see the
        # end of the pipe then, which it does not while this process can still write to it.
        pool._result_queue._writer.close()  # type: ignore[attr-defined]
        ours.close()  # the processes end at once: nobody wants their results
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        ours.close()
        theirs.close()


def _begin(line: Connection, others: Connection) -> None:
    """Begin a worker. It ends when the other end of the line is closed: when the process that
    started it is gone, or wants it to end."""
    # Control-C goes to all processes of the terminal; the one that started this one reacts to it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    others.close()
    Thread(target=_end_with, args=(line,), daemon=True).start()


def _end_with(line: Connection) -> None:
    with suppress(EOFError):
        line.recv_bytes()
    os._exit(1)


def single_threaded() -> bool:
    """Return whether this process has one thread, counting those of libraries. It is False where
    the system does not say."""
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
