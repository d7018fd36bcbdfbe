"""Threads of a rank that wait for communication or copies, and the work that they are given."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

from megatron_llama.distributed import device as devices

Work = Callable[[], object]


class Task:
    """Work for a thread. It is a ``Future``: ``wait`` returns when the work is done and raises what
    the work raised, each time it is called."""

    def __init__(self, work: Work) -> None:
        self._work: Work | None = work
        self._error: BaseException | None = None
        self._finished = threading.Event()

    def perform(self) -> None:
        """Do the work. Called once, by the thread."""
        work = self._work
        # Whoever holds the Task later must not keep alive the tensors that the work used.
        self._work = None
        assert work is not None
        try:
            work()
        except BaseException as error:
            self._error = error
        self._finished.set()

    def wait(self) -> None:
        self._finished.wait()
        if self._error is not None:
            raise self._error


class Worker:
    """One thread that performs tasks in the order in which they were put. A task that fails does
    not stop the next one."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._closed = False
        # The thread knows the queue and not the Worker, so that it does not keep its owner alive.
        self._thread = devices.start_thread(_serve, self._queue, name=name)

    def put(self, task: Task) -> None:
        """Perform ``task`` after all that were put before it. Raises RuntimeError after
        ``close``."""
        if self._closed:
            # A thread that has ended would never finish the task, and its owner would wait forever.
            raise RuntimeError("the stream is closed")
        self._queue.put(task)

    def submit(self, work: Work) -> Task:
        """Put a new task that does ``work``, and return it."""
        task = Task(work)
        self.put(task)
        return task

    def close(self) -> None:
        """End the thread after the tasks that it still has. Does not wait for that, because the
        caller may be this very thread (a finalizer runs anywhere)."""
        self._closed = True
        self._queue.put(None)

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread, at most ``seconds``: it may be waiting for a peer that
        is gone."""
        self._thread.join(seconds)


def _serve(queue: SimpleQueue[Task | None]) -> None:
    with torch.no_grad():  # grad mode belongs to a thread
        while (task := queue.get()) is not None:
            task.perform()
            del task  # while this thread waits for the next one it keeps nothing of the last alive
