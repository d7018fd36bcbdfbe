"""Exchanges one after the other, at most so many under way.

On the host every transfer between two ranks is a connection of its own, and connections share a link as they like: with everything
posted at once one rank gets its twentieth message while another still lacks its first, and the slower one holds up all. Measured
on four hosts at 400 Mbit/s, twenty gathers: ranks entered the backward pass 115 ms apart. A window keeps all ranks within the
same few messages. A device's communicator runs its collectives in order anyway.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

import torch

from megatron_llama import device as devices
from megatron_llama.comm.exchange import Exchange
from megatron_llama.comm.streams import DeviceStream, Done, Job, Stream, Worker

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


def open_lane(device: torch.device, stream: Stream, *, inline: bool) -> Lane:
    """``stream``: what else is issued on the host; ``inline``: for exchanges with nobody."""
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

    def start(self) -> None:
        """Start it; an error is kept for the one who waits."""
        try:
            if self._after is not None:
                self._after.wait()
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
