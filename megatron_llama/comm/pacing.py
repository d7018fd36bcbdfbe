"""Exchanges one after the other, at most so many under way.

On the host every transfer between two ranks is a connection of its own, and connections share a link as they like: with everything
posted at once one rank gets its twentieth message while another still lacks its first, and the slower one holds up all. Measured
on four hosts at 400 Mbit/s, twenty gathers: ranks entered the backward pass 115 ms apart. A window keeps all ranks within the
same few messages. A device's communicator runs its collectives in order anyway.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from queue import SimpleQueue
from typing import Protocol

import torch

from megatron_llama import device as devices
from megatron_llama.comm.exchange import Exchange
from megatron_llama.comm.streams import DeviceStream, Done

WINDOW = 2
"""While one message is waited for, the next is on its way."""
SMALL_BYTES = 1 << 18
"""Messages below this do not count: a link would idle behind them."""


class Lane(Protocol):
    """The one who issues on a communicator, in the order of ``submit``."""

    def submit(self, exchange: Exchange, *, size: int, ahead: bool = False) -> Done:
        """Start an exchange of ``size`` bytes in its turn; ``ahead``: at once, whatever is under way. ``Done.wait``: its result is
        in place.

        All ranks submit in one order. On the host those that go ahead may be others on every rank: they wait for nothing, and
        the first of the rest is always one that every rank has sent, or is about to send."""

    def close(self) -> None:
        """Nothing more will be submitted."""


def open_lane(device: torch.device, *, inline: bool) -> Lane:
    """``inline``: for exchanges with nobody."""
    if inline:
        return _InlineLane()
    return HostLane() if devices.is_host(device) else _DeviceLane(device)


class _Whole:
    """An exchange that its owner waits for."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def wait(self) -> None:
        """See Done."""
        self._exchange.wait()


class _InlineLane:
    def submit(self, exchange: Exchange, *, size: int, ahead: bool = False) -> Done:
        exchange.start()
        return _Whole(exchange)

    def close(self) -> None:
        pass


class _DeviceLane:
    def __init__(self, device: torch.device) -> None:
        self._stream = DeviceStream(device)

    def submit(self, exchange: Exchange, *, size: int, ahead: bool = False) -> Done:
        self._stream.issue(exchange.start)
        return _Whole(exchange)

    def close(self) -> None:
        self._stream.close()


class _Turn:
    """One exchange in the hands of the thread."""

    def __init__(self, exchange: Exchange, *, counts: bool) -> None:
        self._exchange: Exchange | None = exchange
        self._error: BaseException | None = None
        self._finished = threading.Event()
        self.counts = counts

    def start(self) -> bool:
        """Called by the thread; whether it has to be finished."""
        assert self._exchange is not None
        try:
            self._exchange.start()
        except BaseException as error:
            self._error = error
            self._finished.set()
        return self._error is None

    def finish(self) -> None:
        """Called by the thread."""
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        try:
            exchange.wait()
        except BaseException as error:
            self._error = error
        self._finished.set()

    def wait(self) -> None:
        """See Done."""
        self._finished.wait()
        if self._error is not None:
            raise self._error


class HostLane:
    """Whoever makes room, or finds some, starts the next exchange; a thread waits for them, in their order."""

    def __init__(self, window: int = WINDOW) -> None:
        self._window, self._lock = window, threading.Lock()
        self._queue: deque[_Turn] = deque()
        self._under_way: deque[_Turn] = deque()
        self._started: SimpleQueue[_Turn | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(weakref.ref(self), self._started), name="communication", daemon=True).start()

    def submit(self, exchange: Exchange, *, size: int, ahead: bool = False) -> Done:
        """See Lane."""
        if ahead:
            exchange.start()
            return _Whole(exchange)
        turn = _Turn(exchange, counts=size >= SMALL_BYTES)
        with self._lock:
            self._queue.append(turn)
            self._fill()
        return turn

    def _fill(self) -> None:
        while self._queue and sum(turn.counts for turn in self._under_way) < self._window:
            turn = self._queue.popleft()
            if turn.start():
                self._under_way.append(turn)
                self._started.put(turn)

    def make_room(self) -> None:
        """Called by the thread: the oldest exchange is through."""
        with self._lock:
            self._under_way.popleft()
            self._fill()

    def close(self) -> None:
        """End the thread after what it still has to do."""
        self._started.put(None)


def _serve(lane: weakref.ref[HostLane], started: SimpleQueue[_Turn | None]) -> None:
    with torch.no_grad():  # grad mode belongs to a thread
        while (turn := started.get()) is not None:
            turn.finish()
            owner = lane()
            if owner is not None:
                owner.make_room()
            del turn, owner  # or an idle thread would keep them
