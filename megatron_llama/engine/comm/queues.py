"""Queues that issue the exchanges of one communicator, in one order on all ranks: on a device in a
stream, on the host by threads that keep a window (``host/queues.py``)."""

from __future__ import annotations

from typing import Protocol

import torch

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.exchange import Exchange
from megatron_llama.engine.comm.host.queues import HostCommQueue, HostPacedCommQueue
from megatron_llama.engine.comm.streams import DeviceStream, Future, Stream
from megatron_llama.engine.comm.worker import Worker


class CommQueue(Protocol):
    """Starts exchanges in the order of ``submit``, which is the same on all ranks."""

    def submit(self, exchange: Exchange, *, size: int, after: Future | None = None) -> Future:
        """Start ``exchange``, of ``size`` bytes, when the earlier ones have been started and
        ``after``, which makes its source, is done. The future is done when the result is in
        place."""

    def fail(self, error: BaseException) -> None:
        """Let waits for unfinished exchanges raise ``error``, if threads of the host wait for them:
        gloo may never end the wait of a thread."""

    def close(self) -> None:
        """Take no more exchanges."""

    def join(self, seconds: float) -> None:
        """After ``close``, wait for the end of the threads, at most ``seconds`` for each."""


def open_comm_queue(
    device: torch.device, stream: Stream, *, inline: bool, paced: bool = False
) -> CommQueue:
    """Return the queue for exchanges of tensors of ``device``.

    ``stream``: issues the other work on the host. ``inline``: there is no rank to exchange with.
    ``paced``: sources take long (the host updates them), and only their own exchange may wait for
    them."""
    host = devices.is_host(device)
    if paced:
        return HostPacedCommQueue() if host else PacedCommQueue(device)
    if inline:
        return InlineCommQueue()
    return HostCommQueue(stream) if host else DeviceCommQueue(device)


class InlineCommQueue:
    """Starts each exchange at once, in the caller."""

    def submit(self, exchange: Exchange, *, size: int, after: Future | None = None) -> Future:
        exchange.start()
        return exchange

    def fail(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass

    def join(self, seconds: float) -> None:
        pass


class DeviceCommQueue:
    """Issues exchanges in a stream of its own, at the point of the program where they are
    submitted. ``after`` is ignored: the source is made in the stream from which ``submit`` is
    called, so the exchange runs after it anyway."""

    def __init__(self, device: torch.device) -> None:
        self._stream = DeviceStream(device)

    def submit(self, exchange: Exchange, *, size: int, after: Future | None = None) -> Future:
        self._stream.issue(exchange.start)
        return exchange

    def fail(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass

    def join(self, seconds: float) -> None:
        pass


class PacedCommQueue:
    """Exchanges on a device whose sources the host makes. A thread waits for the sources, in their
    order, and issues the exchanges, so that the computing thread never waits for the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = devices.new_stream(device)
        self._worker = Worker("gathers")

    def submit(self, exchange: Exchange, *, size: int, after: Future | None = None) -> Future:
        return _PacedExchange(exchange, after, self._device, self._stream, self._worker)

    def fail(self, error: BaseException) -> None:
        self._worker.fail(error)

    def close(self) -> None:
        self._worker.close()

    def join(self, seconds: float) -> None:
        self._worker.join(seconds)


class _PacedExchange:
    def __init__(
        self,
        exchange: Exchange,
        after: Future | None,
        device: torch.device,
        stream: torch.Stream,
        worker: Worker,
    ) -> None:
        self._exchange = exchange
        self._after = after
        self._device = device
        self._stream = stream
        # Kernels that the caller has issued until now may still read the slot that the exchange
        # will write.
        self._slot_free = devices.current_stream(device).record_event()
        self._issued: torch.Event | None = None
        self._issuing = worker.submit(self._issue)

    def _issue(self) -> None:
        with devices.on_stream(self._stream):
            self._stream.wait_event(self._slot_free)
            after = self._after
            self._after = None
            if after is not None:
                after.wait()
            self._exchange.start()
            self._issued = self._stream.record_event()

    def wait(self) -> None:
        # The host has to wait until the exchange is issued: before that there is no event that the
        # current stream could wait for.
        self._issuing.wait()
        assert self._issued is not None
        devices.current_stream(self._device).wait_event(self._issued)
        self._exchange.wait()
