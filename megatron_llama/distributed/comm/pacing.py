"""Exchanges one after the other, at most so many under way.

On the host every transfer between two ranks is a connection of its own, and connections share a
link as they like: with everything posted at once one rank gets its twentieth message while another
still lacks its first, and the slower one holds up all. Measured on four hosts at 400 Mbit/s, twenty
gathers: ranks entered the backward pass 115 ms apart. A window keeps all ranks within the same few
messages. A device's communicator runs its collectives in order anyway.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from typing import Protocol

import torch

from megatron_llama.distributed import device as devices
from megatron_llama.distributed.comm.exchange import Exchange
from megatron_llama.distributed.comm.streams import DeviceStream, Future, Stream, Task, Worker

WINDOW = 2
"""While one message is waited for, the next is on its way."""
SMALL_BYTES = 1 << 18
"""Messages below this do not count: a link would idle behind them."""


class CommQueue(Protocol):
    """The one who issues on a communicator, in the order of ``submit``, which is the same on all
    ranks."""

    def submit(self, exchange: Exchange, *, size: int, after: Future | None = None) -> Future:
        """Start an exchange of ``size`` bytes in its turn, ``after`` what makes its source.
        ``Future.wait``: its result is in place."""

    def close(self) -> None:
        """Nothing more will be submitted."""

    def join(self, seconds: float) -> None:
        """See Stream."""


def open_comm_queue(
    device: torch.device, stream: Stream, *, inline: bool, paced: bool = False
) -> CommQueue:
    """``stream``: what else is issued on the host; ``inline``: for exchanges with nobody;
    ``paced``: sources are long in coming, and nothing but their own exchange may wait for them."""
    if paced:
        return PacedCommQueue(device)
    if inline:
        return _InlineCommQueue()
    return HostCommQueue(stream) if devices.is_host(device) else _DeviceCommQueue(device)


class _InlineCommQueue:
    def submit(self, exchange: Exchange, *, size: int, after: Future | None = None) -> Future:
        exchange.start()
        return exchange

    def close(self) -> None:
        pass

    def join(self, seconds: float) -> None:
        pass


class _DeviceCommQueue:
    def __init__(self, device: torch.device) -> None:
        self._stream = DeviceStream(device)

    def submit(self, exchange: Exchange, *, size: int, after: Future | None = None) -> Future:
        self._stream.issue(exchange.start)
        return exchange

    def close(self) -> None:
        self._stream.close()

    def join(self, seconds: float) -> None:
        self._stream.join(seconds)


class _Ticket:
    """An exchange on its way through the lane."""

    def __init__(self, exchange: Exchange, *, counts: bool, after: Future | None) -> None:
        self._exchange = exchange
        self.counts = counts
        self._after = after
        self._error: BaseException | None = None

    def prepare(self) -> None:
        """Wait for its source; an error is kept for the one who waits."""
        after = self._after
        self._after = None
        try:
            if after is not None:
                after.wait()
        except BaseException as error:
            self._error = error

    def start(self) -> None:
        """Start it when its source is there; an error is kept for the one who waits."""
        self.prepare()
        try:
            if self._error is None:
                self._exchange.start()
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        """Wait for it."""
        if self._error is not None:
            raise self._error
        self._exchange.wait()


class HostCommQueue:
    """Whoever makes room, or finds some, starts the next exchange; a thread waits for them, in
    their order."""

    def __init__(self, stream: Stream, window: int = WINDOW) -> None:
        self._stream = stream
        self._window = window
        self._worker = Worker("gathers")
        self._lock = threading.Lock()
        self._queue: deque[tuple[_Ticket, Task]] = deque()
        self._under_way: deque[_Ticket] = deque()

    def submit(self, exchange: Exchange, *, size: int, after: Future | None = None) -> Future:
        """See CommQueue."""
        ticket = _Ticket(exchange, counts=size >= SMALL_BYTES, after=after)
        done = Task(ticket.finish)
        self._queue.append(
            (ticket, done)
        )  # without the lock: whoever has it may be waiting for a source
        self._stream.issue(self._fill)
        return done

    def _fill(self) -> None:
        with self._lock:
            while self._queue and sum(ticket.counts for ticket in self._under_way) < self._window:
                ticket, done = self._queue.popleft()
                ticket.start()
                self._under_way.append(ticket)
                self._worker.put(done)
                self._worker.put(Task(self._next))

    def _next(self) -> None:
        """In the lane's thread: the oldest exchange is through. A job of its own, because whoever
        waits for that exchange shall not wait for what the next one waits for."""
        with self._lock:
            self._under_way.popleft()
        self._fill()

    def close(self) -> None:
        """See Worker."""
        self._worker.close()

    def join(self, seconds: float) -> None:
        """See Worker."""
        self._worker.join(seconds)


class PacedCommQueue:
    """Whoever waits for an exchange waits for its own source only: one thread waits for the
    sources, in their order, and starts the exchanges, another one waits for these. What is issued
    elsewhere, reductions for one, never stands behind a source."""

    def __init__(self, device: torch.device, window: int = WINDOW) -> None:
        self._device = device
        self._starting = Worker("gathers")
        self._finishing = Worker("gathered")
        self._room = threading.Semaphore(window)
        self._stream = None if devices.is_host(device) else devices.new_stream(device)

    def submit(self, exchange: Exchange, *, size: int, after: Future | None = None) -> Future:
        """See CommQueue."""
        ticket = _Ticket(exchange, counts=size >= SMALL_BYTES, after=after)
        if self._stream is not None:
            begun = _Begun(ticket, self._device, self._stream)
            self._starting.put(begun.task)
            return begun
        done = Task(ticket.finish)
        self._starting.put(Task(partial(self._start, ticket, done)))
        return done

    def _start(self, ticket: _Ticket, done: Task) -> None:
        ticket.prepare()
        if ticket.counts:
            self._room.acquire()
        ticket.start()
        self._finishing.put(done)
        if ticket.counts:
            self._finishing.put(Task(self._room.release))

    def close(self) -> None:
        """See Worker. What has not begun by now may be left undone."""
        self._starting.close()
        self._finishing.close()

    def join(self, seconds: float) -> None:
        """See Worker."""
        self._starting.join(seconds)
        self._finishing.join(seconds)


class _Begun:
    """An exchange on a device that a thread issues when the host has its source."""

    def __init__(self, ticket: _Ticket, device: torch.device, stream: torch.Stream) -> None:
        self._ticket = ticket
        self._device = device
        self._stream = stream
        self._given = devices.current_stream(
            device
        ).record_event()  # whoever reads the slot until now
        self._issued: torch.Event | None = None
        self.task = Task(self._issue)

    def _issue(self) -> None:
        with devices.on_stream(self._stream):
            self._stream.wait_event(self._given)
            self._ticket.start()
            self._issued = self._stream.record_event()

    def wait(self) -> None:
        """See Future. The host waits until it has been issued."""
        self.task.wait()
        assert self._issued is not None
        devices.current_stream(self._device).wait_event(self._issued)
        self._ticket.finish()
