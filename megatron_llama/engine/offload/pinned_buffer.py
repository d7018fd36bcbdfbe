"""Host memory for optimizer state: allocated once, before training, and pinned, so that the device
copies without the host."""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.plan.buckets import ALIGN, align_up
from megatron_llama.errors import OffloadError, describe

_REMEDY = (
    "offload less with --optimizer-offload-fraction, shard over more ranks, "
    "or free memory of the machine"
)


class PinnedBuffer:
    """A piece of zeroed host memory that hands out its parts, each at a multiple of ALIGN elements.
    The parts are valid as long as the buffer lives."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, what: str) -> None:
        """``numel`` counts all parts, padding included; ``what`` names the memory in errors. Raises
        OffloadError where the system refuses the memory, or refuses to pin it for ``device``."""
        self._what = what
        self._taken = 0
        size = numel * dtype.itemsize
        where = f"host memory for {what}"
        got = f"{size:,} bytes"
        if not size:
            self._whole = torch.zeros(0, dtype=dtype)
            return
        # Pinned as a whole: torch's allocator of pinned memory rounds each part up to a power of
        # two, and would take up to twice as much. From mmap, because a page cannot be pinned twice;
        # and without a device its pages are allocated near the thread that first uses them.
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            refusal = describe(
                where,
                got=f"{got}, which the system refused: {error}",
                expected="that much memory",
                do=_REMEDY,
            )
            raise OffloadError(refusal) from error
        self._whole = torch.frombuffer(memory, dtype=dtype)
        try:
            devices.pin(self._whole, device)
        except RuntimeError as error:
            do = f"raise the limit of locked memory (ulimit -l) or {_REMEDY}"
            raise OffloadError(
                describe(
                    where,
                    got=f"{got}, refused: {error}",
                    expected="memory that can be pinned",
                    do=do,
                )
            ) from error
        weakref.finalize(self, devices.unpin, self._whole, device).atexit = False

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return self._whole.nbytes

    def take(self, numel: int) -> Tensor:
        """Return the next part [numel]. Raises RuntimeError if the buffer was planned smaller."""
        start = self._taken
        self._taken += align_up(numel, ALIGN)
        if self._taken > self._whole.numel():
            raise RuntimeError(
                f"host memory for {self._what}: {self._taken} elements are asked for, "
                f"{self._whole.numel()} were planned"
            )
        return self._whole[start : start + numel]
