"""Which storages there are: made when an operator returns one that nobody has seen, ended when its
last tensor goes."""

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
    """The address of what counts references to a storage: its own as long as it lives, whether it
    has memory or not."""
    key: int = tensor.untyped_storage()._cdata
    return key


@dataclass
class _Held:
    bytes: int
    made: int
    watch: weakref.ref[torch.UntypedStorage]


class Storages:
    """Bytes that are there. ``action``: called before a storage is made or ended, answers in which
    action that is."""

    def __init__(self, action: Callable[[], int]) -> None:
        self._action = action
        self._held = dict[int, _Held]()
        self.live = 0
        self.peak = 0
        self.allocated = 0
        self.freed = 0
        """Of all storages now, and what the caller sets back: the most since, and what came and
        went since."""
        self._outlived: Counter[tuple[int, int]] = Counter()
        self._bytes: Counter[tuple[int, int]] = Counter()

    def see(self, tensor: Tensor) -> None:
        """An operator has returned this tensor."""
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
        """Bytes of the storages of tensors, those in ``without`` left out and put in."""
        total = 0
        for tensor in tensors:
            key = _key(tensor)
            if key in self._held and key not in without:
                without.add(key)
                total += self._held[key].bytes
        return total

    def begin(self) -> None:
        """The step begins: everything was made before."""
        for held in self._held.values():
            held.made = BEFORE
        self._outlived.clear()
        self._bytes.clear()

    def lifetimes(self) -> tuple[Lifetime, ...]:
        """Of what outlived the action that made it, or is still there and was made since
        ``begin``."""
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
