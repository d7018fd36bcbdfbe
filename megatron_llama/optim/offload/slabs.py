"""Memory of the host for optimizer state: allocated once, before training, and pinned for the device's copies."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from megatron_llama import device as devices
from megatron_llama.errors import OffloadError, describe
from megatron_llama.layout import ALIGN, align_up


class Slab:
    """One piece of zeroed host memory that hands out its parts, each at a multiple of ALIGN elements. They live as long as it does.

    Pinned as a whole: an allocator of pinned memory that rounds up each part to a power of two would take up to twice as much."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, what: str) -> None:
        """``numel``: of all parts, padding included. Raises OffloadError where the system refuses it, or to pin it for ``device``."""
        self._what, self._taken = what, 0
        size = numel * dtype.itemsize
        where, got = f"host memory for {what}", f"{size:,} bytes"
        do = "offload less with --optimizer-offload-fraction, shard over more ranks, or free memory of the machine"
        try:
            self._whole = torch.zeros(numel, dtype=dtype)
        except RuntimeError as error:
            raise OffloadError(describe(where, got=f"{got}, which the system refused", expected="that much memory", do=do)) from error
        if size:
            do = f"raise the limit of locked memory (ulimit -l) or {do}"
            try:
                devices.pin(self._whole, device)
            except RuntimeError as error:
                raise OffloadError(describe(where, got=f"{got}, refused: {error}", expected="memory that can be pinned", do=do)) from error
            weakref.finalize(self, devices.unpin, self._whole, device).atexit = False

    @property
    def nbytes(self) -> int:
        """Of the whole."""
        return self._whole.nbytes

    def take(self, numel: int) -> Tensor:
        """The next part [numel]. RuntimeError where the slab was planned smaller."""
        start = self._taken
        self._taken += align_up(numel, ALIGN)
        if self._taken > self._whole.numel():
            raise RuntimeError(f"host memory for {self._what}: {self._taken} elements are asked for, {self._whole.numel()} were planned")
        return self._whole[start : start + numel]
