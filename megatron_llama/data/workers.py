"""Runs a function on the pieces of a corpus in several processes."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any, Protocol, TypeVar

from megatron_llama.errors import DataError

Piece = TypeVar("Piece")
Result = TypeVar("Result")


@contextmanager
def workers(
    count: int, do: Callable[[Piece], Result]
) -> Iterator[Callable[[Iterable[Piece]], Iterator[Result]]]:
    """A block with ``count`` processes, which yields ``map(do, pieces)``: results in the order of
    the pieces, few in memory at a time. ``do`` has to be picklable. The processes run when the
    block begins.

    If this process has a single thread they are forks of it, and have what it has loaded. They end
    with the block, and at once if it raises. Raises DataError if a process dies.
    """
    # Another thread may hold a lock, of a library or of the heap. A fork would copy that lock, and
    # no thread there would release it.
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
        ours.close()  # the processes end at once: their results are not wanted
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
    """Whether this process has one thread, counting those of libraries. It is False where the
    system does not say."""
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


class Answers(Protocol):
    """The work of a ``Helper``."""

    def __call__(self, question: Any, /) -> Any:
        """Return the answer to a question. A DataError that is raised becomes the answer."""


class Helper:
    """A process of its own that answers questions in their order, while this process goes on.
    Questions and answers are pickled.

    It is a fresh interpreter and no fork, so that it may start beside any threads, and it imports
    nothing of the program that started this process. It ends when ``close`` is called, and when
    this process is gone."""

    def __init__(self, make: Callable[..., Answers], *arguments: Any) -> None:
        """``make(*arguments)`` makes, in the new process, the function that answers. It is named by
        its module, which should not import torch."""
        ours, theirs = multiprocessing.Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from megatron_llama.data.workers import serve; serve({theirs.fileno()})"
        )
        # In a session of its own it gets no Control-C, which goes to all processes of a terminal.
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._line = ours
        self.ask((make, arguments))

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def ask(self, question: Any) -> None:
        """Send a question. Raises DataError if the process is gone."""
        try:
            self._line.send(question)
        except OSError as error:
            raise self._gone() from error

    def answered(self) -> bool:
        """Whether the next answer has arrived."""
        return self._line.poll()

    def answer(self) -> Any:
        """Return the next answer, and wait for it if need be. Raises DataError if the process is
        gone."""
        try:
            return self._line.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error

    def _gone(self) -> DataError:
        code = self._process.wait()
        return DataError(
            "the process that reads and tokenizes text",
            got=f"exit status {code}",
            expected="it running",
            do="look for its message above; give it more memory, or fewer --stream-workers",
        )

    def close(self) -> None:
        """End the process."""
        self._line.close()
        self._process.wait()


def serve(descriptor: int) -> None:
    """Answer the questions of a ``Helper`` until the process that asks is gone."""
    line = Connection(descriptor)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # During a training step the other side may not listen. Its next questions are answered
    # meanwhile.
    Thread(target=_send, args=(line, answers), daemon=True).start()
    do: Answers | None = None
    while (question := _next(line)) is not None:
        try:
            if do is None:
                make, arguments = question
                do = make(*arguments)
            else:
                answers.put(do(question))
        except DataError as error:
            answers.put(error)
    os._exit(0)


def _next(line: Connection) -> Any:
    """Return the next question, or None if the process that asks is gone."""
    try:
        return line.recv()
    except (EOFError, OSError):
        return None


def _send(line: Connection, answers: queue.SimpleQueue[Any]) -> None:
    with suppress(OSError):
        while True:
            line.send(answers.get())
    os._exit(0)
