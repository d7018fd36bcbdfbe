"""Copies between the device's memory and the host's, overlapped with everything else: in two
streams of the device, or, where the host itself is the device, in two threads."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.streams import CompletedFuture, Future
from megatron_llama.engine.comm.worker import Task, Worker


class Copy(Future, Protocol):
    """A copy under way. ``wait`` makes the device's current stream wait for it; where the host is
    the device, the caller waits."""

    def complete(self) -> None:
        """Make the host wait for the end of the copy. Raises what went wrong."""


class Copies(Protocol):
    """Copies in two directions. Those of one direction are done one after the other, in the order
    of the calls."""

    def given(self) -> Future:
        """Return the end of the work that the caller's current stream has been given so far."""

    def to_host(self, target: Tensor, source: Tensor) -> Copy:
        """Copy from the device, after the work that the caller's current stream has been given so
        far. ``source`` has to stay as it is until the copy has ended, and ``target`` has to stay
        alive."""

    def to_device(self, target: Tensor, source: Tensor, *, after: Future) -> Copy:
        """Copy from the host, where ``source`` is complete, once ``after`` (made by ``given``) is
        over."""

    def close(self, timeout: float = 0.0) -> None:
        """End the threads, and wait for each at most ``timeout`` seconds."""


def open_copies(device: torch.device) -> Copies:
    """Return the copies for tensors of this device."""
    return HostCopies() if devices.is_host(device) else DeviceCopies(device)


class HostCopies:
    """Copies where the host is the device: a thread for each direction."""

    def __init__(self) -> None:
        self._to_host = Worker("to host")
        self._to_device = Worker("to device")

    def given(self) -> Future:
        return CompletedFuture()  # the caller has done it itself

    def to_host(self, target: Tensor, source: Tensor) -> Copy:
        return self._put(self._to_host, target, source)

    def to_device(self, target: Tensor, source: Tensor, *, after: Future) -> Copy:
        return self._put(self._to_device, target, source)

    def _put(self, worker: Worker, target: Tensor, source: Tensor) -> Copy:
        task = _CopyTask(lambda: self.copy(target, source))
        worker.put(task)
        return task

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Make one copy. Called by the thread of its direction."""
        target.copy_(source)

    def close(self, timeout: float = 0.0) -> None:
        for worker in (self._to_host, self._to_device):
            worker.close()
        if timeout:
            for worker in (self._to_host, self._to_device):
                worker.join(timeout)


class _CopyTask(Task):
    def complete(self) -> None:
        self.wait()


class DeviceCopies:
    """Copies in a stream for each direction, so that a copy to the host does not delay one to the
    device. The host's side has to be pinned, or the host waits for each copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_host = devices.new_stream(device)
        self._to_device = devices.new_stream(device)

    def given(self) -> Future:
        return _Recorded(self._device)

    def to_host(self, target: Tensor, source: Tensor) -> Copy:
        self._to_host.wait_stream(devices.current_stream(self._device))
        copy = self._copy(self._to_host, target, source)
        # The last reference may go before the copy has ended, and the memory would go to another
        # tensor of the stream that made it.
        source.record_stream(self._to_host)
        return copy

    def to_device(self, target: Tensor, source: Tensor, *, after: Future) -> Copy:
        with devices.on_stream(self._to_device):
            after.wait()
        return self._copy(self._to_device, target, source)

    def _copy(self, stream: torch.Stream, target: Tensor, source: Tensor) -> Copy:
        with devices.on_stream(stream):
            target.copy_(source, non_blocking=True)
            return _Recorded(self._device)

    def close(self, timeout: float = 0.0) -> None:
        if timeout:
            # A copy under way must end before its pinned memory is given back.
            self._to_host.synchronize()
            self._to_device.synchronize()


class _Recorded:
    """The end of the work that the current stream has been given until now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = devices.host_event(device)

    def wait(self) -> None:
        devices.current_stream(self._device).wait_event(self._event)

    def complete(self) -> None:
        self._event.synchronize()
