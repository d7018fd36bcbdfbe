"""The weights that autograd has saved in a unit are read again in backward, where the unit's slot
must hold them. While the order of a step is recorded, each such read is checked.

A unit's backward pass is announced by its outputs. A tensor that leaves the unit in another way (an
auxiliary loss that the module keeps as an attribute) leads backward past this: the operators before
it would read what another unit has in the slot, and no error would say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Saved(NamedTuple):
    """What autograd keeps in place of a saved weight."""

    packed: Any
    """What the hooks around ours have made of it, or the weight itself."""


def checks_reads(
    storages: Iterable[int], require_announced: Callable[[], None]
) -> AbstractContextManager[None]:
    """A section of a forward pass. ``require_announced`` is called in backward before a weight that
    has been saved in it is read; ``storages`` are the addresses of the memory of these weights.

    Hooks that are there already (those of torch.utils.checkpoint and of offloaded activations) see
    every tensor as they would without this section."""
    slots = frozenset(storages)
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(saved: Tensor) -> Any:
        packed = saved if outer is None else outer[0](saved)
        return _Saved(packed) if saved.untyped_storage().data_ptr() in slots else packed

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, _Saved):
            require_announced()
            packed = packed.packed
        found: Tensor = packed if outer is None else outer[1](packed)
        return found

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
