"""Copies between the device's memory and the host's, each way beside everything else: in two
streams of the device, or, where the host itself is the device, in two threads."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron_llama.distributed import device as devices
from megatron_llama.distributed.comm.streams import CompletedFuture, Future
from megatron_llama.distributed.comm.worker import Task, Worker


class Copy(Future, Protocol):
    """A copy under way. ``wait``: what comes after it in the current stream of a device finds it
    done; on the host the caller does."""

    def complete(self) -> None:
        """The host waits for its end. Raises what went wrong."""


class Copies(Protocol):
    """Who copies. Those of one direction are done one after the other, in the order of the
    calls."""

    def given(self) -> Future:
        """The end of what the caller's current stream has been given so far."""

    def to_host(self, target: Tensor, source: Tensor) -> Copy:
        """Copy from the device, after what the caller's current stream has been given so far. Both
        tensors have to stay alive."""

    def to_device(self, target: Tensor, source: Tensor, *, after: Future) -> Copy:
        """Copy from the host, where the source is complete, once ``after``, made by ``given``, is
        over."""

    def close(self) -> None:
        """Nothing more will be copied."""

    def join(self, seconds: float) -> None:
        """After ``close``: wait for the end of the threads, each at most so long."""


def open_copies(device: torch.device) -> Copies:
    """For tensors of this device."""
    return HostCopies() if devices.is_host(device) else DeviceCopies(device)


class HostCopies:
    """The host is the device: a thread for each direction."""

    def __init__(self) -> None:
        self._to_host = Worker("to host")
        self._to_device = Worker("to device")

    def given(self) -> Future:
        """See Copies. The caller has done it."""
        return CompletedFuture()

    def to_host(self, target: Tensor, source: Tensor) -> Copy:
        """See Copies."""
        return self._put(self._to_host, target, source)

    def to_device(self, target: Tensor, source: Tensor, *, after: Future) -> Copy:
        """See Copies."""
        return self._put(self._to_device, target, source)

    def _put(self, worker: Worker, target: Tensor, source: Tensor) -> Copy:
        task = _CopyTask(lambda: self.copy(target, source))
        worker.put(task)
        return task

    def copy(self, target: Tensor, source: Tensor) -> None:
        """One copy, in its thread."""
        target.copy_(source)

    def close(self) -> None:
        """See Copies."""
        self._to_host.close()
        self._to_device.close()

    def join(self, seconds: float) -> None:
        """See Copies."""
        self._to_host.join(seconds)
        self._to_device.join(seconds)


class _CopyTask(Task):
    def complete(self) -> None:
        self.wait()


class DeviceCopies:
    """A stream for each direction, joined to others by events. The host's side has to be pinned, or
    the host waits for each copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_host = devices.new_stream(device)
        self._to_device = devices.new_stream(device)

    def given(self) -> Future:
        """See Copies."""
        return _Recorded(self._device)

    def to_host(self, target: Tensor, source: Tensor) -> Copy:
        """See Copies."""
        self._to_host.wait_stream(devices.current_stream(self._device))
        return self._copy(self._to_host, target, source)

    def to_device(self, target: Tensor, source: Tensor, *, after: Future) -> Copy:
        """See Copies."""
        with devices.on_stream(self._to_device):
            after.wait()
        return self._copy(self._to_device, target, source)

    def _copy(self, stream: torch.Stream, target: Tensor, source: Tensor) -> Copy:
        with devices.on_stream(stream):
            target.copy_(source, non_blocking=True)
            return _Recorded(self._device)

    def close(self) -> None:
        """See Copies."""

    def join(self, seconds: float) -> None:
        """See Copies. What is under way must end before its memory is given back."""
        self._to_host.synchronize()
        self._to_device.synchronize()


class _Recorded:
    """What the current stream was given until now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = devices.host_event(device)

    def wait(self) -> None:
        devices.current_stream(self._device).wait_event(self._event)

    def complete(self) -> None:
        self._event.synchronize()
