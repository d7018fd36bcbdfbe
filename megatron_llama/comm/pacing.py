"""Exchanges one after the other, at most so many under way.

On the host every transfer between two ranks is a connection of its own, and connections share a link as they like: with everything
posted at once one rank gets its twentieth message while another still lacks its first, and the slower one holds up all. Measured
on four hosts at 400 Mbit/s, twenty gathers: ranks entered the backward pass 115 ms apart. A window keeps all ranks within the
same few messages. A device's communicator runs its collectives in order anyway.
"""

from __future__ import annotations

import threading
from collections import deque
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from megatron_llama import device as devices
from megatron_llama.comm.exchange import Exchange
from megatron_llama.comm.streams import DeviceStream, Done

WINDOW = 2
"""While one message is waited for, the next is on its way."""


class Lane(Protocol):
    """The one who issues on a communicator, in the order of ``submit``."""

    def submit(self, exchange: Exchange, *, ahead: bool = False) -> Done:
        """Start an exchange in its turn; ``ahead``: at once, whatever is under way. ``Done.wait``: its result is in place.

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
    def submit(self, exchange: Exchange, *, ahead: bool = False) -> Done:
        exchange.start()
        return _Whole(exchange)

    def close(self) -> None:
        pass


class _DeviceLane:
    def __init__(self, device: torch.device) -> None:
        self._stream = DeviceStream(device)

    def submit(self, exchange: Exchange, *, ahead: bool = False) -> Done:
        self._stream.issue(exchange.start)
        return _Whole(exchange)

    def close(self) -> None:
        self._stream.close()


class _Turn:
    """One exchange in the hands of the thread."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange: Exchange | None = exchange
        self._error: BaseException | None = None
        self._finished = threading.Event()

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
    """A thread that starts exchanges and waits for them, both in their order."""

    def __init__(self, window: int = WINDOW) -> None:
        self._queue: SimpleQueue[_Turn | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self._queue, window), name="communication", daemon=True).start()

    def submit(self, exchange: Exchange, *, ahead: bool = False) -> Done:
        """See Lane."""
        if ahead:
            exchange.start()
            return _Whole(exchange)
        turn = _Turn(exchange)
        self._queue.put(turn)
        return turn

    def close(self) -> None:
        """End the thread after what it still has to do."""
        self._queue.put(None)


def _serve(queue: SimpleQueue[_Turn | None], window: int) -> None:
    under_way: deque[_Turn] = deque()
    closed = False
    with torch.no_grad():  # grad mode belongs to a thread
        while under_way or not closed:
            turn = None
            if len(under_way) < window and not closed:
                turn, closed = _next(queue, block=not under_way)
            if turn is not None and turn.start():
                under_way.append(turn)
            elif turn is None and under_way:
                under_way.popleft().finish()
            del turn  # or an idle thread would keep it


def _next(queue: SimpleQueue[_Turn | None], *, block: bool) -> tuple[_Turn | None, bool]:
    """The next turn, if it is there or worth waiting for, and whether none will come any more."""
    try:
        turn = queue.get(block=block)
    except Empty:
        return None, False
    return turn, turn is None
