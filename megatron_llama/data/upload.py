"""Sends the batches of a step to the device while the step before it computes.

All tensors of a step lie in one buffer of pinned host memory, and in one of the device: one copy a
step, in a stream of its own. Two pairs of buffers take turns, so that nothing is overwritten that a
step under way still reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_llama.data.loader import Batch
from megatron_llama.engine.comm import device as devices

ALIGNMENT = 256
"""Tensors begin at multiples of so many bytes."""


class GrowingBuffer:
    """Memory in which tensors lie one behind the other. It grows when a step needs more."""

    def __init__(self, device: torch.device, *, pinned: bool = False) -> None:
        self._device = device
        self._pinned = pinned
        self.memory = torch.empty(0, dtype=torch.uint8, device=device, pin_memory=pinned)

    def hold(self, size: int) -> Tensor:
        """Return the first ``size`` bytes. If the buffer has to grow, its content is lost."""
        if self.memory.numel() < size:
            self.memory = torch.empty(
                size, dtype=torch.uint8, device=self._device, pin_memory=self._pinned
            )
        return self.memory[:size]


def size_of(batches: Sequence[Batch]) -> int:
    """Return the bytes that the tensors of the batches take in a buffer."""
    return sum(_aligned(tensor.nbytes) for batch in batches for tensor in batch.tensors().values())


def laid_out(batches: Sequence[Batch], memory: Tensor) -> list[Batch]:
    """Return the same batches with tensors that are views of ``memory``, whatever it holds."""
    placed = []
    begin = 0
    for batch in batches:
        views = {}
        for name, tensor in batch.tensors().items():
            views[name] = (
                memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            )
            begin += _aligned(tensor.nbytes)
        placed.append(batch.with_tensors(views))
    return placed


def pack(batches: Sequence[Batch], memory: Tensor) -> None:
    """Copy the tensors of batches to their places in ``laid_out``."""
    for batch, place in zip(batches, laid_out(batches, memory), strict=True):
        views = place.tensors()
        for name, tensor in batch.tensors().items():
            views[name].copy_(tensor)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class _BufferPair:
    def __init__(self, device: torch.device) -> None:
        self.host = GrowingBuffer(torch.device("cpu"), pinned=True)
        self.device = GrowingBuffer(device)
        self.copied: torch.Event | None = None


class Upload:
    """Sends the batches of one process. On a host it returns them as they are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = devices.is_host(device)
        self._stream = None if self._host else devices.new_stream(device)
        self._pairs = () if self._host else (_BufferPair(device), _BufferPair(device))
        self._turn = 0

    def send(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the batches on the device, to be read after ``wait``. They are valid until the
        second ``send`` after this one: all work that reads them has to be issued before."""
        if self._stream is None:
            return batches
        batches = [batch.prepared(self._device) for batch in batches]
        pair = self._pairs[self._turn]
        self._turn = 1 - self._turn
        if pair.copied is not None:
            # The host is about to write the buffer that this copy read. This does not block: the
            # step that the copy was for has begun long ago.
            pair.copied.synchronize()
        size = size_of(batches)
        source = pair.host.hold(size)
        target = pair.device.hold(size)
        pack(batches, source)
        # The step that reads the device's buffer now has been issued: the copy follows it.
        self._stream.wait_stream(devices.current_stream(self._device))
        with devices.on_stream(self._stream):
            target.copy_(source, non_blocking=True)
            pair.copied = self._stream.record_event()
        # The last copy of a run, and one whose batches are not taken, are never waited for: without
        # this line the memory could go to another tensor of the computing stream during the copy.
        target.record_stream(self._stream)
        return laid_out(batches, target)

    def wait(self) -> None:
        """Have all work that is issued from now on follow the copy of the last ``send``."""
        pair = self._pairs[1 - self._turn] if self._pairs else None
        if pair is not None and pair.copied is not None:
            devices.current_stream(self._device).wait_event(pair.copied)
