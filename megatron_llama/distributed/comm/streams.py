"""Where the follow-up work of communication runs: on a device in a stream of its own, on the host
in a thread of its own.

Nothing here waits for a whole device, and nothing is recorded on a stream for the allocator: what
streams share lives as long as the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

import torch

from megatron_llama.distributed import device as devices

Work = Callable[[], object]


class Future(Protocol):
    """The end of something that was run."""

    def wait(self) -> None:
        """It is finished (a device: the current stream waits for it). Raises what it raised."""


class Stream(Protocol):
    """An order of execution beside the caller's."""

    def issue(self, work: Work) -> Future:
        """Start something that does not block, after everything that was issued here before;
        ``Future.wait``: it has been started. On the host a thread does so, because a sender copies
        into its socket what fits there, and the caller has to compute; on a device it happens in a
        stream of its own, after what the caller's current stream was given so far."""

    def run(self, work: Work) -> Future:
        """Run after everything that was run here before; what is issued does not wait for it. On
        the host in a thread, without autograd; on a device in a second stream, after what was
        issued here and what the caller's current stream was given so far. Only a thread leaves
        errors for ``Future``."""

    def aside(self, work: Work) -> Future:
        """Run what the caller need not wait for. On the host like ``run``; on a device at once,
        where the caller's work goes: the caller does not wait there anyway."""

    def close(self) -> None:
        """Nothing more will be issued or run."""

    def join(self, seconds: float) -> None:
        """After ``close``: wait for the end of what is still to be done, at most so long."""


def open_stream(device: torch.device, *, inline: bool) -> Stream:
    """``inline``: run everything at once in the caller, for an engine that has nobody to
    communicate with."""
    if inline:
        return Inline()
    return HostStream() if devices.is_host(device) else DeviceStream(device)


class Now:
    """Future already."""

    def wait(self) -> None:
        """Nothing to wait for."""


class Inline:
    """No other order of execution."""

    def issue(self, work: Work) -> Future:
        """See Stream."""
        work()
        return Now()

    def run(self, work: Work) -> Future:
        """See Stream."""
        with torch.no_grad():
            return self.issue(work)

    def aside(self, work: Work) -> Future:
        """See Stream."""
        return self.run(work)

    def close(self) -> None:
        """See Stream."""

    def join(self, seconds: float) -> None:
        """See Stream."""


class Task:
    """Work for a thread, and how it ended."""

    def __init__(self, work: Work) -> None:
        self._work: Work | None = work
        self._error: BaseException | None = None
        self._finished = threading.Event()

    def perform(self) -> None:
        """Called by the thread. Keeps nothing of the work alive afterwards."""
        work = self._work
        self._work = None
        assert work is not None
        try:
            work()
        except BaseException as error:
            self._error = error
        self._finished.set()

    def wait(self) -> None:
        """See Future."""
        self._finished.wait()
        if self._error is not None:
            raise self._error


class Worker:
    """One thread that takes its jobs from a queue. One that fails does not stop the next."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=_serve, args=(self._queue,), name=name, daemon=True)
        self._thread.start()

    def put(self, task: Task) -> None:
        """Perform a job after all that were put before it."""
        if self._closed:
            raise RuntimeError(
                "the stream is closed"
            )  # a thread that has ended would never finish it
        self._queue.put(task)

    def close(self) -> None:
        """End the thread after what it still has to do. Does not wait for that: it may be this
        thread."""
        self._closed = True
        self._queue.put(None)

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread, at most so long: it may be waiting for a peer that is
        gone."""
        self._thread.join(seconds)


def _serve(queue: SimpleQueue[Task | None]) -> None:
    with torch.no_grad():  # grad mode belongs to a thread
        while (task := queue.get()) is not None:
            task.perform()
            del task


class HostStream:
    """Two threads: one issues, the other one may wait."""

    def __init__(self) -> None:
        self._issuing = Worker("issue")
        self._running = Worker("follow up")

    def issue(self, work: Work) -> Future:
        """See Stream."""
        return _put(self._issuing, work)

    def run(self, work: Work) -> Future:
        """See Stream."""
        return _put(self._running, work)

    def aside(self, work: Work) -> Future:
        """See Stream."""
        return self.run(work)

    def close(self) -> None:
        """See Worker."""
        self._issuing.close()
        self._running.close()

    def join(self, seconds: float) -> None:
        """See Worker."""
        self._issuing.join(seconds)
        self._running.join(seconds)


def _put(worker: Worker, work: Work) -> Future:
    task = Task(work)
    worker.put(task)
    return task


class DeviceStream:
    """Two streams of the device, joined by events: with one, a reduction would begin when all that
    follows the one before it is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._issuing = devices.new_stream(device)
        self._running = devices.new_stream(device)

    def issue(self, work: Work) -> Future:
        """See Stream."""
        self._issuing.wait_stream(devices.current_stream(self._device))
        with devices.on_stream(self._issuing):
            work()
        return Now()

    def run(self, work: Work) -> Future:
        """See Stream."""
        self._running.wait_stream(devices.current_stream(self._device))
        self._running.wait_stream(self._issuing)
        with torch.no_grad(), devices.on_stream(self._running):
            work()
        return _Recorded(self._device, self._running.record_event())

    def aside(self, work: Work) -> Future:
        """See Stream."""
        with torch.no_grad():
            work()
        return Now()

    def close(self) -> None:
        """See Stream."""

    def join(self, seconds: float) -> None:
        """See Stream."""


class _Recorded:
    def __init__(self, device: torch.device, event: torch.Event) -> None:
        self._device = device
        self._event = event

    def wait(self) -> None:
        """See Future."""
        devices.current_stream(self._device).wait_event(self._event)
