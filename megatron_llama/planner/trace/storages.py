"""The storages that exist. A storage is made when an operator returns a tensor with a new storage,
and ends when its last tensor is deleted."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_llama.planner.traced import Lifetime

BEFORE = -1


def _key(tensor: Tensor) -> int:
    """Return the StorageImpl's address. It is unique while the storage lives, even without
    memory."""
    key: int = tensor.untyped_storage()._cdata
    return key


@dataclass
class _Held:
    bytes: int
    made: int
    watch: weakref.ref[torch.UntypedStorage]


class Storages:
    """Bytes of all storages. ``action`` is called before a storage is made or ended and returns the
    number of the action in which that happens."""

    def __init__(self, action: Callable[[], int]) -> None:
        self._action = action
        self._held = dict[int, _Held]()
        self.live = 0
        self.peak = 0
        self.allocated = 0
        self.freed = 0
        """``live`` is the bytes of all present storages. The caller resets the others: the peak,
        and the bytes that were allocated and freed, since the reset."""
        self._outlived: Counter[tuple[int, int]] = Counter()
        self._bytes: Counter[tuple[int, int]] = Counter()

    def see(self, tensor: Tensor) -> None:
        """Record the storage of a tensor that an operator has returned."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        if key in self._held or not size:
            return
        action = self._action()
        self._held[key] = _Held(size, action, weakref.ref(storage, lambda _: self._end(key)))
        self.live += size
        self.allocated += size
        self.peak = max(self.peak, self.live)

    def _end(self, key: int) -> None:
        held = self._held.pop(key)
        action = self._action()
        self.live -= held.bytes
        self.freed += held.bytes
        if held.made != action:
            self._outlived[held.made, action] += 1
            self._bytes[held.made, action] += held.bytes

    def of(self, tensors: Iterable[Tensor], without: set[int]) -> int:
        """Return the bytes of the storages of ``tensors`` that are not in ``without``, and add them
        to it."""
        total = 0
        for tensor in tensors:
            key = _key(tensor)
            if key in self._held and key not in without:
                without.add(key)
                total += self._held[key].bytes
        return total

    def begin(self) -> None:
        """Begin a step. All present storages were made before it."""
        for held in self._held.values():
            held.made = BEFORE
        self._outlived.clear()
        self._bytes.clear()

    def lifetimes(self) -> tuple[Lifetime, ...]:
        """Return the lifetimes of storages that outlived the action that made them, or that exist
        and were made since ``begin``."""
        counts = self._outlived.copy()
        sizes = self._bytes.copy()
        for held in self._held.values():
            if held.made != BEFORE:
                counts[held.made, BEFORE] += 1
                sizes[held.made, BEFORE] += held.bytes
        return tuple(
            Lifetime(made, ended, counts[made, ended], sizes[made, ended])
            for made, ended in sorted(counts)
        )
