"""Threads of a rank that wait for communication or copies, and the work that they are given."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from weakref import WeakSet

import torch

from megatron_llama.engine.comm import device as devices

Work = Callable[[], object]


class Task:
    """Work for a thread. It is a ``Future``: ``wait`` returns when the work is done and raises its
    error, each time it is called."""

    def __init__(self, work: Work) -> None:
        self._work: Work | None = work
        self._error: BaseException | None = None
        self._finished = threading.Event()

    def perform(self) -> None:
        """Do the work. Called once, by the thread."""
        work = self._work
        # A later holder of the Task must not keep the tensors alive that the work used.
        self._work = None
        assert work is not None
        if self._finished.is_set():
            return
        try:
            work()
        except BaseException as error:
            self._error = error
        self._finished.set()

    def fail(self, error: BaseException) -> None:
        """Let all waits raise ``error``, unless the work is done. The thread may go on with it."""
        if not self._finished.is_set():
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
        self._made = WeakSet[Task]()
        self._failed: BaseException | None = None
        self._lock = threading.Lock()
        """Covers both."""
        # The thread knows the queue and not the Worker, so that it does not keep its owner alive.
        self._thread = devices.start_thread(_serve, self._queue, name=name)

    def put(self, task: Task) -> None:
        """Perform ``task`` after all that were put before it. Raises RuntimeError after
        ``close``."""
        if self._closed:
            # A thread that has ended would never finish the task, and its owner would wait forever.
            raise RuntimeError("the stream is closed")
        self._queue.put(task)

    def task(self, work: Work) -> Task:
        """Make a task for this thread, without putting it."""
        task = Task(work)
        with self._lock:
            self._made.add(task)
            failed = self._failed
        if failed is not None:
            task.fail(failed)
        return task

    def submit(self, work: Work) -> Task:
        """Put a new task that does ``work``, and return it."""
        task = self.task(work)
        self.put(task)
        return task

    def fail(self, error: BaseException) -> None:
        """Fail all unfinished tasks of ``task``, and those to come: no wait may depend on this
        thread any more, because it may itself wait for ever."""
        with self._lock:
            self._failed = error
            made = list(self._made)
        for task in made:
            task.fail(error)

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
