"""Queues of exchanges between hosts, of which only a few are in flight at a time.

Every transfer between two ranks over gloo is its own connection, and connections share a link in
any order. With everything posted at once, one rank gets its twentieth message while another one
still lacks its first, and the slower rank holds up all. Measured on four hosts at 400 Mbit/s with
twenty gathers: ranks entered the backward pass 115 ms apart. A window keeps all ranks within the
same few messages. A device's communicator runs its collectives in order anyway.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import partial

from megatron_llama.engine.comm.exchange import Exchange
from megatron_llama.engine.comm.streams import Future, Stream
from megatron_llama.engine.comm.worker import Task, Worker

WINDOW = 2
"""Exchanges in flight: while one is waited for, the next is on its way."""
SMALL_BYTES = 1 << 18
"""Messages below this size do not count in the window: a link would be idle while they are waited
for."""


class _Ticket:
    """An exchange on its way through a queue. Errors of its source and of its start are kept for
    its ``finish``, so that the queue goes on."""

    def __init__(self, exchange: Exchange, *, size: int, after: Future | None) -> None:
        self._exchange = exchange
        self.counts = size >= SMALL_BYTES
        self._after = after
        self._error: BaseException | None = None

    def wait_for_source(self) -> None:
        """Wait for the work that makes the source of the exchange."""
        after = self._after
        self._after = None
        try:
            if after is not None:
                after.wait()
        except BaseException as error:
            self._error = error

    def start(self) -> None:
        """Start the exchange, when its source is complete."""
        self.wait_for_source()
        try:
            if self._error is None:
                self._exchange.start()
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        """Wait for the exchange. Raises its error or that of its source."""
        if self._error is not None:
            raise self._error
        self._exchange.wait()


class HostCommQueue:
    """A ``CommQueue`` whose exchanges are started by ``stream``'s issuing thread or, as soon as
    there is room in the window, by its own thread, which waits for them in their order."""

    def __init__(self, stream: Stream, window: int = WINDOW) -> None:
        self._stream = stream
        self._window = window
        self._worker = Worker("gathers")
        self._lock = threading.Lock()
        self._queue: deque[tuple[_Ticket, Task]] = deque()
        self._in_flight: deque[_Ticket] = deque()

    def submit(self, exchange: Exchange, *, size: int, after: Future | None = None) -> Future:
        ticket = _Ticket(exchange, size=size, after=after)
        arrival = self._worker.task(ticket.finish)
        # Appended without the lock, because the thread that holds it may be waiting for a source,
        # and the caller has to compute. Appending to a deque is atomic.
        self._queue.append((ticket, arrival))
        self._stream.issue(self._fill_window)
        return arrival

    def _fill_window(self) -> None:
        with self._lock:
            while self._queue and sum(ticket.counts for ticket in self._in_flight) < self._window:
                ticket, arrival = self._queue.popleft()
                ticket.start()
                self._in_flight.append(ticket)
                self._worker.put(arrival)
                # A separate task: a wait for this arrival must not include the source of the next
                # exchange. Otherwise a layer would wait for another bucket's update.
                self._worker.put(Task(self._start_next))

    def _start_next(self) -> None:
        with self._lock:
            self._in_flight.popleft()
        self._fill_window()

    def fail(self, error: BaseException) -> None:
        self._worker.fail(error)

    def close(self) -> None:
        self._worker.close()

    def join(self, seconds: float) -> None:
        self._worker.join(seconds)


class HostPacedCommQueue:
    """A ``CommQueue`` for sources that take long. One thread waits for the sources, in their order,
    and starts the exchanges; another one waits for the exchanges. So a wait for an exchange
    includes only its own source, and work that ``Stream`` issues, such as reductions, never waits
    for a source."""

    def __init__(self, window: int = WINDOW) -> None:
        self._starting = Worker("gathers")
        self._finishing = Worker("gathered")
        self._window = threading.Semaphore(window)

    def submit(self, exchange: Exchange, *, size: int, after: Future | None = None) -> Future:
        ticket = _Ticket(exchange, size=size, after=after)
        arrival = self._finishing.task(ticket.finish)
        self._starting.submit(partial(self._start, ticket, arrival))
        return arrival

    def _start(self, ticket: _Ticket, arrival: Task) -> None:
        ticket.wait_for_source()
        if ticket.counts:
            self._window.acquire()
        ticket.start()
        self._finishing.put(arrival)
        if ticket.counts:
            self._finishing.submit(self._window.release)

    def fail(self, error: BaseException) -> None:
        self._starting.fail(error)
        self._finishing.fail(error)

    def close(self) -> None:
        # Exchanges that have not started yet may be left undone: ``_start`` finds a closed worker.
        self._starting.close()
        self._finishing.close()

    def join(self, seconds: float) -> None:
        self._starting.join(seconds)
        self._finishing.join(seconds)
