"""Exchanges one after the other, at most so many under way.

On the host every transfer between two ranks is a connection of its own, and connections share a link as they like: with everything
posted at once one rank gets its twentieth message while another still lacks its first, and the slower one holds up all. Measured
on four hosts at 400 Mbit/s, twenty gathers: ranks entered the backward pass 115 ms apart. A window keeps all ranks within the
same few messages. A device's communicator runs its collectives in order anyway.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from typing import Protocol

import torch

from megatron_llama.distributed import device as devices
from megatron_llama.distributed.comm.exchange import Exchange
from megatron_llama.distributed.comm.streams import DeviceStream, Done, Job, Stream, Worker

WINDOW = 2
"""While one message is waited for, the next is on its way."""
SMALL_BYTES = 1 << 18
"""Messages below this do not count: a link would idle behind them."""


class Lane(Protocol):
    """The one who issues on a communicator, in the order of ``submit``, which is the same on all ranks."""

    def submit(self, exchange: Exchange, *, size: int, after: Done | None = None) -> Done:
        """Start an exchange of ``size`` bytes in its turn, ``after`` what makes its source. ``Done.wait``: its result is in place."""

    def close(self) -> None:
        """Nothing more will be submitted."""

    def join(self, seconds: float) -> None:
        """See Stream."""


def open_lane(device: torch.device, stream: Stream, *, inline: bool, patient: bool = False) -> Lane:
    """``stream``: what else is issued on the host; ``inline``: for exchanges with nobody; ``patient``: sources are long in coming, and
    nothing but their own exchange may wait for them."""
    if patient:
        return PatientLane(device)
    if inline:
        return _InlineLane()
    return HostLane(stream) if devices.is_host(device) else _DeviceLane(device)


class _InlineLane:
    def submit(self, exchange: Exchange, *, size: int, after: Done | None = None) -> Done:
        exchange.start()
        return exchange

    def close(self) -> None:
        pass

    def join(self, seconds: float) -> None:
        pass


class _DeviceLane:
    def __init__(self, device: torch.device) -> None:
        self._stream = DeviceStream(device)

    def submit(self, exchange: Exchange, *, size: int, after: Done | None = None) -> Done:
        self._stream.issue(exchange.start)
        return exchange

    def close(self) -> None:
        self._stream.close()

    def join(self, seconds: float) -> None:
        self._stream.join(seconds)


class _Turn:
    """An exchange on its way through the lane."""

    def __init__(self, exchange: Exchange, *, counts: bool, after: Done | None) -> None:
        self._exchange, self.counts, self._after = exchange, counts, after
        self._error: BaseException | None = None

    def prepare(self) -> None:
        """Wait for its source; an error is kept for the one who waits."""
        after, self._after = self._after, None
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


class HostLane:
    """Whoever makes room, or finds some, starts the next exchange; a thread waits for them, in their order."""

    def __init__(self, stream: Stream, window: int = WINDOW) -> None:
        self._stream, self._window, self._worker = stream, window, Worker("gathers")
        self._lock = threading.Lock()
        self._queue: deque[tuple[_Turn, Job]] = deque()
        self._under_way: deque[_Turn] = deque()

    def submit(self, exchange: Exchange, *, size: int, after: Done | None = None) -> Done:
        """See Lane."""
        turn = _Turn(exchange, counts=size >= SMALL_BYTES, after=after)
        done = Job(turn.finish)
        self._queue.append((turn, done))  # without the lock: whoever has it may be waiting for a source
        self._stream.issue(self._fill)
        return done

    def _fill(self) -> None:
        with self._lock:
            while self._queue and sum(turn.counts for turn in self._under_way) < self._window:
                turn, done = self._queue.popleft()
                turn.start()
                self._under_way.append(turn)
                self._worker.put(done)
                self._worker.put(Job(self._next))

    def _next(self) -> None:
        """In the lane's thread: the oldest exchange is through. A job of its own, because whoever waits for that exchange shall not
        wait for what the next one waits for."""
        with self._lock:
            self._under_way.popleft()
        self._fill()

    def close(self) -> None:
        """See Worker."""
        self._worker.close()

    def join(self, seconds: float) -> None:
        """See Worker."""
        self._worker.join(seconds)


class PatientLane:
    """Whoever waits for an exchange waits for its own source only: one thread waits for the sources, in their order, and starts the
    exchanges, another one waits for these. What is issued elsewhere, reductions for one, never stands behind a source."""

    def __init__(self, device: torch.device, window: int = WINDOW) -> None:
        self._device, self._starting, self._finishing = device, Worker("gathers"), Worker("gathered")
        self._room = threading.Semaphore(window)
        self._stream = None if devices.is_host(device) else devices.new_stream(device)

    def submit(self, exchange: Exchange, *, size: int, after: Done | None = None) -> Done:
        """See Lane."""
        turn = _Turn(exchange, counts=size >= SMALL_BYTES, after=after)
        if self._stream is not None:
            begun = _Begun(turn, self._device, self._stream)
            self._starting.put(begun.job)
            return begun
        done = Job(turn.finish)
        self._starting.put(Job(partial(self._start, turn, done)))
        return done

    def _start(self, turn: _Turn, done: Job) -> None:
        turn.prepare()
        if turn.counts:
            self._room.acquire()
        turn.start()
        self._finishing.put(done)
        if turn.counts:
            self._finishing.put(Job(self._room.release))

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

    def __init__(self, turn: _Turn, device: torch.device, stream: torch.Stream) -> None:
        self._turn, self._device, self._stream = turn, device, stream
        self._given = devices.current_stream(device).record_event()  # whoever reads the slot until now
        self._issued: torch.Event | None = None
        self.job = Job(self._issue)

    def _issue(self) -> None:
        with devices.on_stream(self._stream):
            self._stream.wait_event(self._given)
            self._turn.start()
            self._issued = self._stream.record_event()

    def wait(self) -> None:
        """See Done. The host waits until it has been issued."""
        self.job.wait()
        assert self._issued is not None
        devices.current_stream(self._device).wait_event(self._issued)
        self._turn.finish()
