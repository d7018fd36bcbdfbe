"""The weights that autograd has saved in a unit are read again in backward, where the unit's slot
must hold them. Each such read is checked.

A unit's backward pass is announced by its outputs. A tensor that leaves the unit in another way (an
auxiliary loss that the module keeps as an attribute) leads backward past this: the operators before
it would read what another unit has in the slot, and no error would say so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_llama.engine.tensors import inner


class _Saved(NamedTuple):
    """The value that autograd keeps in place of a tensor."""

    packed: Any
    """The result of the hooks around ours, or the tensor itself without its graph: with it an
    output that its operator saves would hold itself."""
    version: int | None
    """The number of its changes in place, which autograd does not compare where there are hooks;
    None if other hooks have it."""
    is_weight: bool


def checks_reads(
    storages: frozenset[int], require_announced: Callable[[], None]
) -> AbstractContextManager[None]:
    """A section of a forward pass. ``require_announced`` is called in backward before a weight that
    has been saved in it is read; ``storages`` are the addresses of the memory of these weights.

    Hooks that are there already (those of torch.utils.checkpoint and of offloaded activations) see
    every tensor as they would without this section."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(saved: Tensor) -> _Saved:
        # By address: autograd saves views and transposes, which are other tensors of the same slot.
        is_weight = inner(saved).untyped_storage().data_ptr() in storages
        if outer is not None:
            return _Saved(outer[0](saved), None, is_weight)
        return _Saved(saved.detach(), saved._version, is_weight)

    def unpack(saved: _Saved) -> Tensor:
        # Before the value is used: a slot with another unit's weights has the right shape.
        if saved.is_weight:
            require_announced()
        if outer is not None:
            unpacked: Tensor = outer[1](saved.packed)
            return unpacked
        kept: Tensor = saved.packed
        # Autograd compares versions itself only where no hooks are.
        if kept._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of {tuple(kept.shape)} is at version "
                f"{kept._version}, and version {saved.version} was saved"
            )
        return kept

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
