"""The batches of a step go to the device while the step before it computes.

All their tensors lie in one slab of host memory that the device reads by itself, and in one of the
device: one copy a step, in a stream of its own. Two pairs of slabs take turns, so that nothing is
overwritten that a step under way still reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_llama.data.loader import Batch
from megatron_llama.distributed import device as devices

ALIGNMENT = 256
"""Bytes at whose multiples tensors begin."""


class GrowingBuffer:
    """Memory in which tensors lie one behind the other. It grows when it has to."""

    def __init__(self, device: torch.device, *, pinned: bool = False) -> None:
        self._device = device
        self._pinned = pinned
        self.memory = torch.empty(0, dtype=torch.uint8, device=device, pin_memory=pinned)

    def hold(self, size: int) -> Tensor:
        """The first ``size`` bytes. What lay there is lost if it has to grow."""
        if self.memory.numel() < size:
            self.memory = torch.empty(
                size, dtype=torch.uint8, device=self._device, pin_memory=self._pinned
            )
        return self.memory[:size]


def size_of(batches: Sequence[Batch]) -> int:
    """Bytes of a slab for them."""
    return sum(_aligned(tensor.nbytes) for batch in batches for tensor in batch.tensors().values())


def laid_out(batches: Sequence[Batch], memory: Tensor) -> list[Batch]:
    """The same batches with tensors that are views of ``memory``, as it is."""
    placed = []
    begin = 0
    for batch in batches:
        views = {}
        for name, tensor in batch.tensors().items():
            views[name] = (
                memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            )
            begin += _aligned(tensor.nbytes)
        placed.append(replace(batch, **views))  # type: ignore[arg-type]
    return placed


def pack(batches: Sequence[Batch], memory: Tensor) -> None:
    """Write the tensors of batches where ``laid_out`` has them."""
    for batch, place in zip(batches, laid_out(batches, memory), strict=True):
        views = place.tensors()
        for name, tensor in batch.tensors().items():
            views[name].copy_(tensor)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Pair:
    def __init__(self, device: torch.device) -> None:
        self.here = GrowingBuffer(torch.device("cpu"), pinned=True)
        self.there = GrowingBuffer(device)
        self.copied: torch.Event | None = None


class Upload:
    """Of one process. On a host batches are where they should be."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = devices.is_host(device)
        self._stream = None if self._host else devices.new_stream(device)
        self._pairs = () if self._host else (_Pair(device), _Pair(device))
        self._turn = 0

    def send(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """The batches on the device, to be read after ``wait``. They are valid until the second
        ``send`` after this one, before which everything that reads them must have been issued."""
        if self._stream is None:
            return batches
        batches = [batch.prepared(self._device) for batch in batches]
        pair = self._pairs[self._turn]
        self._turn = 1 - self._turn
        if pair.copied is not None:
            pair.copied.synchronize()  # long ago: the step that it was for has begun
        size = size_of(batches)
        source = pair.here.hold(size)
        target = pair.there.hold(size)
        pack(batches, source)
        self._stream.wait_stream(devices.current_stream(self._device))
        with devices.on_stream(self._stream):
            target.copy_(source, non_blocking=True)
            pair.copied = self._stream.record_event()
        return laid_out(batches, target)

    def wait(self) -> None:
        """What is issued from now on comes after the last ``send``."""
        pair = self._pairs[1 - self._turn] if self._pairs else None
        if pair is not None and pair.copied is not None:
            devices.current_stream(self._device).wait_event(pair.copied)
