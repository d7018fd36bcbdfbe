"""Streams for the follow-up work of communication: on a device separate CUDA streams, on the host
threads (``host/threads.py``).

Nothing here waits for a whole device, and no tensor is recorded on a stream for the allocator
(``Tensor.record_stream``): the buffers that streams share live as long as the engine.
"""

from __future__ import annotations

from typing import Protocol

import torch

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.host.threads import ThreadStream
from megatron_llama.engine.comm.worker import Work


class Future(Protocol):
    """The end of some work."""

    def wait(self) -> None:
        """Wait until the work is done; on a device, let the current stream wait for it instead of
        the host. Raises the error of the work if a thread did it."""


class Stream(Protocol):
    """An order of execution that runs concurrently with the caller."""

    def issue(self, work: Work) -> Future:
        """Start something that does not block, after everything that was issued here before. The
        future is done when it has been started.

        On the host a thread does so. On a device it happens in a separate stream, after all work so
        far of the caller's current stream."""

    def run(self, work: Work) -> Future:
        """Run ``work`` without autograd, after everything that was run here before. Work that is
        issued does not wait for it.

        On the host a thread does so, and the future raises its errors. On a device it happens in a
        second stream, after everything that was issued here; errors are raised at once."""

    def run_update(self, work: Work) -> Future:
        """Run an update. On the host it is the same as ``run``, so that the caller goes on while a
        thread updates. On a device the update goes to the caller's current stream, because issuing
        it there takes the host no longer than issuing it anywhere else."""

    def fail(self, error: BaseException) -> None:
        """Let waits for unfinished work raise ``error``, if threads of the host wait for it: gloo
        may never end the wait of a thread."""

    def close(self) -> None:
        """Take no more work."""

    def join(self, seconds: float) -> None:
        """After ``close``, wait for the end of the work that is left, at most ``seconds`` for each
        thread."""


def open_stream(device: torch.device, *, inline: bool) -> Stream:
    """Return the stream for tensors of ``device``. ``inline`` runs everything at once in the
    caller, for an engine that has no other rank to communicate with."""
    if inline:
        return InlineStream()
    return ThreadStream() if devices.is_host(device) else DeviceStream(device)


class CompletedFuture:
    """The future of work that is done, or that the current stream does before any later work."""

    def wait(self) -> None:
        pass


class InlineStream:
    """A stream that runs everything at once, in the caller."""

    def issue(self, work: Work) -> Future:
        work()
        return CompletedFuture()

    def run(self, work: Work) -> Future:
        with torch.no_grad():
            return self.issue(work)

    def run_update(self, work: Work) -> Future:
        return self.run(work)

    def fail(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass

    def join(self, seconds: float) -> None:
        pass


class DeviceStream:
    """Two streams of the device, joined by events.

    With one stream, a reduction would begin only when everything that follows the reduction before
    it (casts, sums over replicas, the norm, an update) is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._issuing = devices.new_stream(device)
        self._follow_up = devices.new_stream(device)

    def issue(self, work: Work) -> Future:
        # The caller's stream computes the tensors that are sent.
        self._issuing.wait_stream(devices.current_stream(self._device))
        with devices.on_stream(self._issuing):
            work()
        return CompletedFuture()

    def run(self, work: Work) -> Future:
        # The work that was issued before includes copies into the buffers that this work reads, and
        # comes after the caller's stream has computed their sources.
        self._follow_up.wait_stream(self._issuing)
        with torch.no_grad(), devices.on_stream(self._follow_up):
            work()
        return _EventFuture(self._device, self._follow_up.record_event())

    def run_update(self, work: Work) -> Future:
        with torch.no_grad():
            work()
        return CompletedFuture()

    def fail(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass

    def join(self, seconds: float) -> None:
        pass


class _EventFuture:
    def __init__(self, device: torch.device, event: torch.Event) -> None:
        self._device = device
        self._event = event

    def wait(self) -> None:
        devices.current_stream(self._device).wait_event(self._event)
